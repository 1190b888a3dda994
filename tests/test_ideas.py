"""The page of the field's ideas: its rows are complete, its files exist, and its commands and links are valid."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from chairlift.cli.main import _parse, main

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "ideas.md"
TEXT = DOCUMENT.read_text("utf-8")
HEADER = ["Idea", "What it brought", "Our rule", "Command", "Published", "Ours"]
COMMAND = HEADER.index("Command")
OURS = HEADER.index("Ours")
SYSTEMS = (
    *("Static batching", "FasterTransformer", "Triton Inference Server", "Cellular", "Orca", "Selective batching"),
    *("PagedAttention", "Fragmentation", "RadixAttention", "In-flight batching", "TGI", "LightLLM", "Chunked prefill"),
    *("Preemption", "Priority tiers", "Reservations", "FlashAttention", "Medusa", "EAGLE", "LoRA", "Images", "Experts"),
    *("learning", "LMCache", "Anyscale", "Megatron-LM", "NeMo", "DeepSpeed", "Continual training", "staleness"),
    *("Hopper", "Blackwell", "Millions of users"),
)
"""Words of which each must be in the first cell of a row."""


def _tables() -> Iterator[list[list[str]]]:
    """Rows of each table of ideas, without header and rule."""
    for table in re.findall(r"(?:^\|.*\|\n)+", TEXT, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        if rows[0][0] == HEADER[0]:
            assert rows[0] == HEADER
            yield rows[2:]


ROWS = [row for table in _tables() for row in table]
COMMANDS = sorted({row[COMMAND].strip("`") for row in ROWS} - {"none"})
SIMULATIONS = [command for command in COMMANDS if command.startswith("chairlift sim ")]


def _anchors(path: Path) -> set[str]:
    """Anchors that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _words(script: Path) -> set[str]:
    """Every text in a script and in the modules beside it that it imports: its flags and their choices among them."""
    nodes = list(ast.walk(ast.parse(script.read_text("utf-8"))))
    words = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    for node in nodes:
        beside = (
            script.with_name(f"{(node.module or '').rpartition('.')[2]}.py")
            if isinstance(node, ast.ImportFrom)
            else script
        )
        if beside != script and beside.exists():
            words |= _words(beside)
    return words


def test_every_row_has_all_columns() -> None:
    assert len(ROWS) >= len(SYSTEMS)
    assert not [row[0] for row in ROWS if len(row) != len(HEADER) or not all(row)]


@pytest.mark.parametrize("word", SYSTEMS)
def test_every_system_and_claim_of_the_field_has_a_row(word: str) -> None:
    assert [row[0] for row in ROWS if word.lower() in row[0].lower()]


def test_a_figure_of_ours_has_its_source_and_a_missing_one_is_named() -> None:
    assert not [row[0] for row in ROWS if not re.search(r"\]\(|No figure|\*\*Not done\*\*", row[OURS])]


def test_a_row_without_a_command_is_not_done() -> None:
    assert not [row[0] for row in ROWS if row[COMMAND] == "none" and not row[OURS].startswith("**Not done**")]


def test_every_named_file_exists() -> None:
    named = set(re.findall(r"`([\w./-]+/[\w.-]+\.(?:py|h|json|md)|\w+\.py)`", TEXT))
    assert len(named) > 50
    assert not [file for file in named if not ((ROOT / "chairlift" / file).exists() or (ROOT / file).exists())]


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    missing = []
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", TEXT):
        path = DOCUMENT.parent / target if target else DOCUMENT
        if not path.exists() or (anchor and anchor not in _anchors(path)):
            missing.append(f"{target}#{anchor}")
    assert not missing


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_exists_with_its_flags(command: str) -> None:
    words = shlex.split(command)
    if words[0] == "chairlift":
        assert _parse(words[1:]).command == words[1]
        return
    if words[0] == "pytest":
        assert all((ROOT / word).exists() for word in words if word.endswith(".py"))
        return
    assert words[0] == "python"
    named = f"{words[2].replace('.', '/')}.py" if words[1] == "-m" else words[1]
    assert {word for word in words[1:] if word.startswith("--")} <= _words(ROOT / named)


@pytest.mark.nightly
@pytest.mark.parametrize("command", SIMULATIONS)
def test_every_simulation_runs(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)[1:]) == 0
    assert "modelled, unvalidated" in capsys.readouterr().out
