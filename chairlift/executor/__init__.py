"""THE MUSCLE: turns a scheduled step into tokens."""
