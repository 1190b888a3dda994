"""Kernels for one NVIDIA GPU, in Triton: import the module you need, and only where Triton is installed.

What each computes is defined in :mod:`chairlift.kernels.reference` and :mod:`chairlift.sampling`; docs/gpu.md says how
they fit together and what has not been measured.
"""
