"""Compiles grammars with llguidance, and checks generated tokens against them. Only these modules import llguidance,
when the first grammar arrives."""
