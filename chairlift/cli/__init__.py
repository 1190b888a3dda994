"""The command line, with a module per command. It uses all other parts; no other part uses it."""

from __future__ import annotations

__all__: list[str] = []
