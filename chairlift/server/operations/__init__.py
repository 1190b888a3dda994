"""Endpoints and log lines for those who run the server."""
