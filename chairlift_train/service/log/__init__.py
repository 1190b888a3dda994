"""Everything that the training service must know after it was killed, in one SQLite database."""
