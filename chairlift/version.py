"""The version, where everybody can read it without importing more."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
