"""Worlds of agents hold, reach what they are for, and find bugs: each known one, planted, fails in one of them."""

from __future__ import annotations

import collections
import logging

import pytest

from tests.simulation.planted import check_some_world_finds
from tests.simulation.session_mutants import SESSION_MUTANTS
from tests.simulation.session_worlds import run_world

_MOST = 12
"""Number of worlds that may be needed to find a planted bug."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="chairlift")


@pytest.mark.planted
@pytest.mark.parametrize("name", sorted(SESSION_MUTANTS))
def test_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SESSION_MUTANTS[name](monkeypatch.setattr)
    check_some_world_finds(run_world, _MOST)


@pytest.mark.full
def test_worlds_hold_and_reach_what_they_are_for() -> None:
    seen = collections.Counter[str]()
    for seed in range(12):
        seen += run_world(seed)
    names = ("answers", "flood", "jumps", "pauses", "returned", "kept", "leases", "spared", "shortened", "expired")
    assert all(seen[name] >= 3 for name in names), seen


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(20))
def test_ten_thousand_worlds_hold(part: int) -> None:
    for seed in range(500 * part, 500 * part + 500):
        run_world(seed)
