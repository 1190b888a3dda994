"""Counters of the engine and the server as plain records, and their export in Prometheus' format."""
