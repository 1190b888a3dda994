"""Worlds on a disk hold, reach what they are for, and find bugs: each known one, planted, fails in one of them."""

from __future__ import annotations

import collections
import logging

import pytest

from tests.simulation.kv_store_mutants import KV_STORE_MUTANTS
from tests.simulation.kv_store_worlds import run_world
from tests.simulation.planted import check_some_world_finds

_MOST = 150
"""Number of worlds that may be needed to find a planted bug."""
_FAILED_ONCE = (20224,)
"""Seeds of worlds that have found a fault that was not planted."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="chairlift")


@pytest.mark.planted
@pytest.mark.parametrize("name", sorted(KV_STORE_MUTANTS))
def test_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    KV_STORE_MUTANTS[name](monkeypatch.setattr)
    check_some_world_finds(run_world, _MOST)


def test_worlds_hold_and_reach_what_they_are_for() -> None:
    seen = collections.Counter[str]()
    for seed in range(40):
        seen += run_world(seed)
    names = "answers", "recovered", "loaded tokens", "written", "rejected", "stopped", "faults", "beside", "shared"
    assert all(seen[name] >= 3 for name in names), seen


@pytest.mark.parametrize("seed", _FAILED_ONCE)
def test_worlds_that_failed_once_hold(seed: int) -> None:
    run_world(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(20))
def test_ten_thousand_worlds_hold(part: int) -> None:
    for seed in range(500 * part, 500 * part + 500):
        run_world(seed)
