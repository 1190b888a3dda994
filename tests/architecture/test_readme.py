"""The README is short, its tables agree with the files they come from, and its figures with docs/ideas.md."""

from __future__ import annotations

import re

import pytest

from tests.architecture.test_prose import ROOT
from tools import laboratory_tables, markdown, preset_table

MOST_LINES = 130
README = (ROOT / "README.md").read_text(encoding="utf-8")
IDEAS = (ROOT / "docs" / "ideas.md").read_text(encoding="utf-8")


def ideas_of(page: str) -> list[list[str]]:
    """Cells of the rows of every table whose first column is ``Idea``."""
    rows = []
    for lines in re.findall(r"^\| Idea \|.*\n\|---.*\n((?:\|.*\n)+)", page, re.MULTILINE):
        rows += [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines.splitlines()]
    return rows


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES


@pytest.mark.parametrize("name", preset_table.PAGES)
def test_the_tables_of_presets_are_current(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    assert preset_table.pages()[name] == page, "run tools/preset_table.py"
    with pytest.raises(ValueError, match="lacks"):
        markdown.replaced(page.replace(markdown.END, ""), preset_table.BEGIN, "")


def test_the_tables_of_the_laboratory_are_current() -> None:
    page = laboratory_tables.PAGE.read_text(encoding="utf-8")
    assert laboratory_tables.page() == page, "run tools/laboratory_tables.py"


def test_the_ideas_of_the_readme_have_files_that_exist_and_figures_of_the_ideas_page() -> None:
    rows = ideas_of(README)
    assert len(rows) == 10
    for idea, here, *figures in rows:
        for path in re.findall(r"`([a-z_/]+\.py)`", here):
            assert any((folder / path).is_file() for folder in (ROOT / "chairlift", ROOT)), f"{idea}: {path}"
        for figure in re.findall(r"-?\d[\d.]*(?:x|(?: to [\d.]+)? %)", " ".join(figures)):
            assert figure in IDEAS, f"{idea}: docs/ideas.md does not have {figure}"


def test_the_readme_counts_the_ideas() -> None:
    assert f"[docs/ideas.md](docs/ideas.md) has {len(ideas_of(IDEAS))}, each" in README
