"""Quantised directories from models of 16 bits: what ``chairlift quantize`` does. Serving imports none of it."""
