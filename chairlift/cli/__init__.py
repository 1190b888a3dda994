"""The command line: ``chairlift generate``, ``chat`` and ``check``. Knows every other part; no other part knows it."""

from __future__ import annotations

__all__: list[str] = []
