"""The backend of plain PyTorch operations, on every device."""
