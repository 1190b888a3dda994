"""The command line, a module per command. It knows every other part; no other part knows it."""

from __future__ import annotations

__all__: list[str] = []
