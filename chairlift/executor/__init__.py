"""The executor: turns a scheduled step into tokens."""
