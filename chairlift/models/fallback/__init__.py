"""Models that run through transformers' own classes, where Chairlift has no implementation of its own."""
