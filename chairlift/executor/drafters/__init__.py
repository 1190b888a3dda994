"""Makers of drafts that run beside the served model."""
