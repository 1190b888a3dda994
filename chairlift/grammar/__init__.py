"""Compiles and follows grammars with llguidance. Only these modules import it, when the first grammar arrives."""
