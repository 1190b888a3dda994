"""Benchmarks: measure the limits of this machine, the speed of the kernels and of the engine, and which fraction of the
limits they reach."""
