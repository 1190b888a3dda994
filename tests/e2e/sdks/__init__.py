"""Scripted tool loops with the libraries that agents are built on, and the model that they talk to."""
