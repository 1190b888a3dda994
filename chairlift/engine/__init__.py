"""The loop: turns requests into steps and steps into text."""
