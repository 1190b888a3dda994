"""Backends: each runs a model on one kind of kernels."""
