"""Tables of text, and sizes and times for people. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["duration", "print_table", "size"]

_UNITS: Final = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_TIMES: Final = ((86_400, "d"), (3600, "h"), (60, "min"))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns as wide as their longest text. The last column is not padded."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head) - 1)]
    for line in lines:
        print("  ".join([*(text.ljust(width) for text, width in zip(line, widths, strict=False)), line[-1]]).rstrip())


def size(num_bytes: int) -> str:
    """A size such as ``1.2 GB`` (powers of 1000)."""
    return next((f"{num_bytes / unit:.1f} {name}" for unit, name in _UNITS if num_bytes >= unit), f"{num_bytes} B")


def duration(seconds: float) -> str:
    """A duration such as ``5 min``."""
    return next(
        (f"{seconds / unit:.0f} {name}" for unit, name in _TIMES if seconds >= unit), f"{max(seconds, 0):.0f} s"
    )
