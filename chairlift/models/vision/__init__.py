"""Images in requests: decoding them, cutting them into tiles, and the prompt positions of their encoded rows."""
