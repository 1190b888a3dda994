"""The backend of the native CPU kernels."""
