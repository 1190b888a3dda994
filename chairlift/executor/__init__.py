"""The executor: runs the scheduled steps on the model, and returns their tokens."""
