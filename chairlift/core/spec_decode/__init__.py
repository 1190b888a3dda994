"""Speculative decoding: proposes draft tokens, and decides how many of them to compute."""
