"""The C++ kernels of ``csrc/cpu``: their binding, packed weights and step programs. Modules here import no other part
of the engine."""
