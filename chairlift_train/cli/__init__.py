"""The training half's commands."""
