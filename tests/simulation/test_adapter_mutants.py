"""Worlds with adapters hold, reach what they are for, and find bugs: each known one, planted, fails in one of them."""

from __future__ import annotations

import collections

import pytest

from chairlift_lab.sim.simulator import run_world
from chairlift_lab.sim.world import make_world
from tests.simulation.adapter_mutants import ADAPTER_MUTANTS
from tests.simulation.planted import check_is_found

SEEDS = [seed for seed in range(40_000) if seed % 100 in (54, 94)]


@pytest.mark.planted
@pytest.mark.parametrize("name", sorted(ADAPTER_MUTANTS))
def test_planted_bug_is_found(name: str) -> None:
    check_is_found(name, ADAPTER_MUTANTS[name], SEEDS)


def test_worlds_with_adapters_hold_and_reach_what_they_are_for() -> None:
    seen = collections.Counter[str]()
    for seed in SEEDS[:60]:
        simulation = run_world(make_world(seed))
        adapters = simulation.engine.core.preparers.adapters
        seen["adapted"] += simulation.num_adapted
        seen["reloaded"] += simulation.num_reloads
        seen["evicted"] += adapters.num_evictions
        seen["hits"] += adapters.num_hits
        seen["several in a step"] += simulation.model.max_step_adapters > 1
        seen["held up"] += sum(record.held_up_by == "adapter" for record in simulation.engine.step_log)
    assert all(
        seen[name] >= 3 for name in ("adapted", "reloaded", "evicted", "hits", "several in a step", "held up")
    ), seen
