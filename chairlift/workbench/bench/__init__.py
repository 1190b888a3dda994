"""Benchmarks: limits of this machine, speed of the kernels and the engine, and the share of the limits that they
reach."""
