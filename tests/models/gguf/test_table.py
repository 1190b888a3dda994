"""The page names every architecture of GGUF files that is read."""

from __future__ import annotations

from chairlift.models.formats.gguf_families import GGUF_FAMILIES
from tests.models.gguf.write_table import BEGIN, PAGE, rows
from tools.markdown import END


def test_the_table_names_every_architecture_with_its_families() -> None:
    """Figures and remarks are not compared: write_table.py measures them."""
    text = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    _, *table = [line for line in text.splitlines() if line.startswith("| `")]
    lines = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in table]
    assert lines == [row[:2] for row in rows({})], "run python -m tests.models.gguf.write_table"
    assert len(lines) == len(GGUF_FAMILIES)
