"""Templates that packages on this machine ship: each prints all that was said, as in transformers, or we refuse."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.text.tokenizer.published_templates import CHATS, compare, reference


def _files() -> list[Path]:
    spec = importlib.util.find_spec("trl")
    return sorted(
        path for place in (spec and spec.submodule_search_locations) or () for path in Path(place).rglob("*.jinja")
    )


@pytest.mark.nightly
@pytest.mark.parametrize("name", CHATS)
def test_published_templates_lose_nothing(name: str) -> None:
    pytest.importorskip("transformers")
    files = _files()
    if not files:
        pytest.skip("no package with chat templates is installed; pip install trl")
    truth = reference()
    outcomes = {file.name: compare(file.read_text("utf-8"), name, truth) for file in files}
    assert not {file: outcome for file, outcome in outcomes.items() if outcome in ("lost", "differs")}
    assert "same" in outcomes.values()
