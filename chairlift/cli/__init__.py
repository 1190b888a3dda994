"""The command line, with one module per command. It may import every other part of the package; no other part imports
it."""

from __future__ import annotations

__all__: list[str] = []
