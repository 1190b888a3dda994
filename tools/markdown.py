"""Tables in documents that a script makes. Such a table is between two comments, the second of which is ``END``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = ["END", "replaced", "table"]

END: Final = "<!-- end -->"


def table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [header, ("---",) * len(header), *rows]
    ruled = [f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |") for line in lines]
    return "\n".join(ruled).replace("| --- ", "|---").replace("|--- |", "|---|")


def replaced(page: str, begin: str, text: str) -> str:
    """The page with ``text`` between the comments ``begin`` and ``END``. Raises ValueError if one of them is
    missing."""
    before, found, rest = page.partition(begin)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise ValueError(f"the page lacks {begin} or {END}")
    return f"{before}{begin}\n\n{text}\n\n{END}{after}"
