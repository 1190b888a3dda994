"""Endpoints of Ollama's API."""
