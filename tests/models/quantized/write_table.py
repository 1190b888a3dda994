"""Writes the table of docs/quantized-repositories.md: every layout is made, loaded and compared.

python -m tests.models.quantized.write_table
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from chairlift.models.registry import FAMILIES
from tests.models.quantized.repositories import REPOSITORIES, Repository
from tests.models.quantized.test_repositories import LOADED, compare
from tools.markdown import replaced

__all__ = ["BEGIN", "PAGE", "main"]

PAGE: Final = Path(__file__).parents[3] / "docs" / "quantized-repositories.md"
BEGIN: Final = "<!-- repositories, made by tests/models/quantized/write_table.py -->"
_HEAD: Final = (
    "| repository | family | layout | equal to | weights | logits |",
    "|---|---|---|---|---|---|",
)


def line(repositories: Sequence[Repository]) -> str:
    """Row of the table for repositories with the same layout, made by comparing the first with its oracle, or by its
    refusal."""
    repository = repositories[0]
    kind = "GGUF " if repository.layout and repository.is_gguf else "GGUF" if repository.is_gguf else ""
    names = ", ".join(each.name for each in repositories)
    first = f"| {names} | `{repository.family}` | {kind}{repository.layout}"
    if repository.refused:
        native = repository.family in FAMILIES
        why = f"format {repository.refused[0].strip(': ')}" if native else f"no native family `{repository.family}`"
        return f"{first} | refused: {why} | | |"
    with tempfile.TemporaryDirectory() as folder:
        found = compare(Path(folder), repository)
    weights = "equal" if found.weights == 0 else f"{found.weights:.0e}"
    return f"{first} | {found.oracle} | {weights} | {'equal' if found.logits == 0 else f'{found.logits:.0e}'} |"


def groups() -> list[list[Repository]]:
    """Repositories that differ in their names only are written, byte for byte, as the same tiny model."""
    found: dict[str, list[Repository]] = {}
    for each in REPOSITORIES:
        found.setdefault(repr(dataclasses.replace(each, name=str(each.is_gguf))), []).append(each)
    return list(found.values())


def main() -> None:
    lines = [*_HEAD]
    for group in groups():
        lines.append(line(group))
        sys.stderr.write(f"{lines[-1]}\n")
    lines.append(f"\n{len(LOADED)} of {len(REPOSITORIES)} load.")
    PAGE.write_text(replaced(PAGE.read_text(), BEGIN, "\n".join(lines)))


if __name__ == "__main__":
    main()
