"""THE MEMORY: who holds which KV block. Standard library only; a block here is a number, its tensor lives elsewhere."""
