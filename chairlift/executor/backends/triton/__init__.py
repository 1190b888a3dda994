"""The backend of the Triton kernels, for one GPU."""
