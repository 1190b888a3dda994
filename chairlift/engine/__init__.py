"""The engine: schedules requests into steps, runs the steps, and turns tokens into text."""
