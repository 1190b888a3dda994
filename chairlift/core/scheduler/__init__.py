"""The scheduler: decides which tokens of which requests the next step computes. Standard library only: no tensors, no
clocks, no threads."""
