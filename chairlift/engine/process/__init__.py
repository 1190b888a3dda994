"""Both sides of the border between the server's process and the engine's process."""
