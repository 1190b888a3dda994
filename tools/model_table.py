"""Writes the table of models that run through transformers, or are refused, into ``docs/models.md``.

::

    python tools/model_table.py

The table is between two comments. It is made from the registry and ``chairlift/models/fallback/families.py``. A test
compares it with the page.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from chairlift.models.fallback.families import ALLOWED, REASONS, REFUSED
from chairlift.models.registry import FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
_BEGIN, _END = "<!-- made by tools/model_table.py -->", "<!-- end -->"


def _names(model_types: set[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(model_types))


def table() -> str:
    """The table in Markdown: a row for native families, one for the allow-list, and one for each reason to refuse."""
    both = ALLOWED & FAMILIES.keys()
    rows = [
        ("natively, or through transformers if asked", _names(both)),
        *((("natively only", _names(FAMILIES.keys() - both)),) if FAMILIES.keys() - both else ()),
        ("through transformers", _names(ALLOWED - both)),
    ]
    for reason, text in REASONS.items():
        refused = {name for name, why in REFUSED.items() if why == reason} - FAMILIES.keys()
        rows.append((f"no: {text}", _names(refused)))
    return "\n".join(("| runs | `model_type` |", "|---|---|", *(f"| {how} | {names} |" for how, names in rows)))


def with_table(page: str) -> str:
    """The page with the present table. Raises ValueError where its comments are missing."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{PAGE} lacks {_BEGIN} or {_END}")
    return f"{before}{_BEGIN}\n\n{table()}\n\n{_END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
