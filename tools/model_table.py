"""Writes the tables of models into ``docs/models.md``: native families, families that run through transformers, and
refused families.

::

    python tools/model_table.py

Each table is between two comments in the page. The content comes from the registry, the published configs of
``tests/models/published.py``, and ``chairlift/models/fallback/families.py``. A test compares them with the page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from chairlift.models.fallback.families import ALIASES, ALLOWED, INSIDE, REASONS, REFUSED
from chairlift.models.registry import FAMILIES
from tests.models.published import PUBLISHED
from tests.models.published_renamed import PUBLISHED_RENAMED
from tools.markdown import replaced, table
from tools.popular_models import POPULAR_EMBEDDERS, POPULAR_EYES, POPULAR_TEXTS, runs, sees

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
_NATIVE = (
    "`model_type`",
    "runs",
    "models",
    "differences from Llama",
    "between the kernels",
    "configs tested",
)


def _names(model_types: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(model_types))


def native_table() -> str:
    """Table with a row for each native family: implementation, features, and the published configs that tests compare.

    Raises ValueError for a family without descriptions for the table.
    """
    rows = []
    for name, family in sorted(FAMILIES.items()):
        runs = "native; transformers if asked" if name in ALLOWED else "native"
        if not family.models or not (family.differences or name == "llama"):
            raise ValueError(f"the Family of {name} has no text for models or differences, which {PAGE.name} shows")
        tested = "; ".join({**PUBLISHED, **PUBLISHED_RENAMED}.get(name, ()))
        rows.append((f"`{name}`", runs, family.models, family.differences, family.called_out, tested))
    return table(_NATIVE, rows)


def other_table() -> str:
    """Table with one row for families that run only through transformers, and one row for each reason to refuse a
    family."""
    rows = [
        ("through transformers", _names(ALLOWED - FAMILIES.keys())),
        (
            "through transformers, under another name",
            "; ".join(f"`{one}` as `{other}`" for one, other in ALIASES.items()),
        ),
        ("through transformers, texts only: its images and sounds are left out", _names(INSIDE)),
    ]
    for reason, text in REASONS.items():
        refused = {name for name, why in REFUSED.items() if why == reason} - FAMILIES.keys()
        rows.append((f"no: {text}", _names(refused)))
    return table(("runs", "`model_type`"), rows)


def popular_table() -> str:
    """Table of checkpoints that many people use, one row per family and way to run."""
    rows = []
    for use, lists in (("text", POPULAR_TEXTS), ("embeddings", POPULAR_EMBEDDERS)):
        for model_type, names in sorted(lists.items()):
            found: dict[str, list[str]] = {}
            for name in names:
                found.setdefault(runs(model_type, name), []).append(name)
            rows += [(f"{use}: `{model_type}`", ", ".join(names), how) for how, names in found.items()]
    rows += [(f"images: `{kind}`", ", ".join(names), sees(kind)) for kind, names in sorted(POPULAR_EYES.items())]
    return table(("use: `model_type`", "checkpoints", "runs"), rows)


TABLES = {
    "<!-- native families, made by tools/model_table.py -->": native_table,
    "<!-- popular checkpoints, made by tools/model_table.py -->": popular_table,
    "<!-- other families, made by tools/model_table.py -->": other_table,
}


def with_tables(page: str) -> str:
    """The page with the tables replaced by the current ones. Raises ValueError if the comments around a table are
    missing."""
    for begin, make in TABLES.items():
        page = replaced(page, begin, make())
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
