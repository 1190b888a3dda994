"""The C++ kernels of ``csrc/cpu``: their binding, packed weights and step programs. They import nothing else of ours."""
