"""Triton kernels for one NVIDIA GPU. Import single modules, and only where Triton is installed.

:mod:`chairlift.kernels.reference` and :mod:`chairlift.sampling` define what each kernel computes. docs/gpu.md explains
how they work together and what was not measured.
"""
