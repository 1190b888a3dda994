"""Maintainers' scripts: how the bundled model is made and scored. Not part of the installed package."""
