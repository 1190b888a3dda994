"""THE BRAIN: who computes what in the next step. Standard library only: no tensors, no clocks, no threads."""
