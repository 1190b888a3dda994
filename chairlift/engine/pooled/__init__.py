"""Requests to models for embeddings, scores and classes."""
