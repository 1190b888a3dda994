"""The loop knows kinds of requests only by the methods of a kind: its files name none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

CORE = ROOT / "chairlift" / "core"
LOOP = [
    *(CORE / "scheduler" / f"{name}.py" for name in ("scheduler", "batch", "admission", "prompt_budget", "preemptor")),
    *(CORE / "scheduler" / f"{name}.py" for name in ("decode_rows", "step", "invariants")),
    *sorted((CORE / "kv_cache").glob("*.py")),
]
FORBIDDEN = ["adapter", "image", "lora", "draft", "grammar", "pooled", "embedding"]
EXCEPTIONS = {
    "draft": {"scheduler.py", "step.py"},
    "grammar": {"batch.py"},
}
"""Word -> files of the loop that may name it, because it is not a file of ``core/rows/`` yet."""


def named(word: str, text: str) -> list[str]:
    """The lines that have the word, also as a part of another one."""
    return [line.strip() for line in text.splitlines() if re.search(word, line, re.IGNORECASE)]


@pytest.mark.parametrize("word", FORBIDDEN)
@pytest.mark.parametrize("path", LOOP, ids=lambda path: path.name)
def test_the_loop_names_no_kind_of_request(path: Path, word: str) -> None:
    lines = named(word, path.read_text(encoding="utf-8"))
    if path.name in EXCEPTIONS.get(word, ()):
        assert lines, f"{path.name} names no {word} any more; remove the exception"
    else:
        assert not lines, f"put what {path.name} says of this kind into a file of core/rows/"


def test_a_name_inside_a_word_is_found() -> None:
    assert named("image", "x = 1\nself.num_images += 1\n") == ["self.num_images += 1"]
