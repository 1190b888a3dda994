"""Worlds of drained replicas hold, reach every stage, and find bugs: each known one, planted, fails in one of them."""

from __future__ import annotations

import collections
import logging

import pytest

from tests.simulation.move_mutants import MOVE_MUTANTS
from tests.simulation.move_worlds import STAGES, TROUBLES, run_world
from tests.simulation.planted import check_some_world_finds

_MOST = 250
"""Number of worlds that may be needed to find a planted bug."""
_FEW = 3
"""Number of the rarest pairs of a trouble and a stage that a thousand worlds may miss."""
_SEEN_AT = {
    "blocks_used_before_they_are_verified": 43,
    "destination_keeps_what_was_taken_back": 107,
    "moves_wait_without_an_end": 77,
    "request_of_a_dead_source_is_also_computed_again": 17,
    "results_before_the_switch_are_used": 107,
    "results_of_the_former_owner_are_used": 11,
    "source_does_not_go_on": 107,
}
"""Bug -> seed of a world that finds it, where the search begins: earlier worlds hold, or take long with the bug."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="chairlift")


@pytest.mark.planted
@pytest.mark.parametrize("name", sorted(MOVE_MUTANTS))
def test_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MOVE_MUTANTS[name](monkeypatch.setattr)
    check_some_world_finds(run_world, _MOST, [_SEEN_AT[name]] if name in _SEEN_AT else [])


def test_worlds_hold_and_reach_what_they_are_for() -> None:
    seen = collections.Counter[str]()
    for seed in range(60):
        seen += run_world(seed)
    assert all(seen[name] >= 3 for name in ("answers", "kv", "failed", "replay", "faults")), seen


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(10))
def test_many_worlds_hold(part: int) -> None:
    seen = collections.Counter[str]()
    for seed in range(1000 * part, 1000 * part + 1000):
        seen += run_world(seed)
    wanted = {f"{trouble} at {stage}" for trouble in TROUBLES if trouble != "nothing" for stage in STAGES}
    assert len(wanted - seen.keys()) <= _FEW, wanted - seen.keys()


def test_one_seed_is_one_execution() -> None:
    assert run_world(3) == run_world(3)
