"""The C++ kernels of ``csrc/cpu``: their binding, packed weights and step programs; they import nothing else."""
