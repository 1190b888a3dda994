"""Extensions that no part of the engine imports: each is loaded by its ``module:Class`` path."""
