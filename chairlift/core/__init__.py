"""The brain: requests, the scheduler, the memory of the KV cache, and how many drafts pay. Standard library only."""
