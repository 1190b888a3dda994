"""Formats of weights: how files store them, and how this package writes them."""
