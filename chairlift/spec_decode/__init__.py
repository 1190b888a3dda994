"""Speculative decoding: who proposes tokens, and how many of them are worth computing."""
