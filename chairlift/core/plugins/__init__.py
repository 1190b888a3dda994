"""Extensions, which no part of the engine imports. Each is loaded by its ``module:Class`` path."""
