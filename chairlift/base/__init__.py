"""Plain data and small tools that every other part passes on: parameters, outputs, the step as arrays, files."""
