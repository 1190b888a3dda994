"""Maintainers' scripts, for example to make and score the bundled model. Not part of the installed package."""
