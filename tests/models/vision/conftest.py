"""Engines for the tests of models that read images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM
from chairlift.engine.clock import SystemClock


@pytest.fixture
def still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes for the engine. The encoder's turns and the chunks of prompts follow measured times; with this
    clock, a test has the same steps on every machine."""
    monkeypatch.setattr(SystemClock, "now", lambda self: 0.0)


@pytest.fixture
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., LLM]]:
    """Makes engines for the model in the test file's ``folder``, with the file's ``SETTINGS``, if any.

    After the test, no engine may hold blocks.
    """
    made: list[LLM] = []
    sizes = {"num_kv_blocks": 80, "max_num_batched_tokens": 24, "dtype": "float32"}
    defaults = sizes | getattr(request.module, "SETTINGS", {})

    def make(**settings: Any) -> LLM:
        made.append(LLM(folder, **(defaults | settings)))
        return made[-1]

    yield make
    for each in made:
        each.engine.check_invariants()
        assert each.engine.kv.counts().used == 0
