"""Worlds of agents hold, reach what they are for, and find bugs: each known one, planted, fails in one of them."""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterable

import pytest

from tests.simulation.planted import check_some_world_finds
from tests.simulation.session_mutants import SESSION_MUTANTS
from tests.simulation.session_worlds import run_beside, run_world

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
    for seed in (*range(12), 1038):  # in the last one, requests compute a leased prompt at once
        seen += run_world(seed)
    names = ("answers", "flood", "jumps", "pauses", "returned", "kept", "leases", "spared", "shortened", "expired")
    assert all(seen[name] >= 3 for name in names), seen


def check_beside(seeds: Iterable[int]) -> None:
    """A flood keeps the bounds that it has without leases. Leases can be wrong about what comes back. In a world of few
    turns, conversations are then computed more often, and the flood waits for that. Over many worlds it does not."""
    total = [0.0, 0.0]
    for seed in seeds:
        leases, lru = run_beside(seed)
        assert len(leases) == len(lru)
        assert max(leases, default=0.0) <= 1.1 * max(lru, default=0.0) + 1.0, seed
        assert sum(leases) <= 1.5 * sum(lru) + 1.0, seed
        total = [total[0] + sum(leases), total[1] + sum(lru)]
    assert total[0] <= 1.05 * total[1]


@pytest.mark.full
def test_neighbours_keep_the_bounds_that_they_have_without_leases() -> None:
    check_beside(range(6))


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(20))
def test_ten_thousand_worlds_hold(part: int) -> None:
    for seed in range(500 * part, 500 * part + 500):
        run_world(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(10))
def test_neighbours_of_a_thousand_worlds_keep_their_bounds(part: int) -> None:
    check_beside(range(100 * part, 100 * part + 100))
