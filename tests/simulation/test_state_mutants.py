"""The simulator finds bugs of recurrent states: each known one, planted, fails within the worlds that have states."""

from __future__ import annotations

import collections

import pytest

from chairlift.models.hashlm import STATE
from chairlift_lab.sim.minimise import failure_of
from chairlift_lab.sim.simulator import run_world
from chairlift_lab.sim.world import make_world
from tests.simulation.planted import check_is_found
from tests.simulation.state_mutants import STATE_MUTANTS

WORLDS = [seed for seed in range(4_000) if seed % 20 in (4, 15)]


@pytest.mark.planted
@pytest.mark.parametrize("name", sorted(STATE_MUTANTS))
def test_planted_bug_is_found(name: str) -> None:
    check_is_found(name, STATE_MUTANTS[name], WORLDS)


def test_worlds_with_states_reach_what_they_are_for() -> None:
    seen = collections.Counter[str]()
    for seed in WORLDS[:60]:
        world = make_world(seed)
        assert STATE in world.windows
        simulation = run_world(world)
        preemptor = simulation.engine.scheduler.preemptor
        seen["preempted"] += preemptor.num_preemptions
        seen["swapped"] += preemptor.num_swaps
        seen["cached"] += simulation.num_cached_tokens
        seen["brought back"] += simulation.engine.kv.num_brought_back
        seen["late"] += simulation.engine.scheduler.num_late
        seen["alone"] += world.windows == (STATE,)
    names = ("preempted", "swapped", "cached", "brought back", "late", "alone")
    assert all(seen[name] >= 3 for name in names), seen


@pytest.mark.nightly
def test_many_worlds_with_states_hold() -> None:
    for seed in range(4, 100_000, 20):
        assert failure_of(make_world(seed)) is None, seed
