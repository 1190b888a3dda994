"""Triton kernels for one NVIDIA GPU. Import its modules one by one, and only where Triton is installed.

:mod:`chairlift.kernels.reference` and :mod:`chairlift.executor.sampling` define what each kernel computes. docs/gpu.md
explains how the kernels work together, and lists what was not measured.
"""
