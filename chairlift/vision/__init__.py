"""Images in requests: reading them, cutting them into tiles, and the places of their rows in a prompt."""
