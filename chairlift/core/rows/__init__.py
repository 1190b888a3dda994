"""Kinds of requests: what a request with an adapter or images needs besides rows and blocks, in a file per kind."""
