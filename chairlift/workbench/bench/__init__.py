"""Benchmarks: what this machine could do at best, what the kernels and the engine make of it, and the share between."""
