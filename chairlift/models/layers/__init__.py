"""Layers of decoder-only transformers."""
