"""Grammars compiled and followed, through llguidance. Only these modules import it, and only when a grammar comes."""
