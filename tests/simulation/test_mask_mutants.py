"""Worlds with late masks hold, reach what they are for, and find bugs: each known one, planted, fails in one."""

from __future__ import annotations

import collections

import pytest

from chairlift.models.hashlm import STATE
from chairlift_lab.sim.simulator import run_world
from chairlift_lab.sim.world import make_world
from tests.simulation.mask_mutants import MASK_MUTANTS
from tests.simulation.planted import check_is_found

SEEDS = [seed for seed in range(40_000) if seed % 100 in (39, 59, 79) or seed % 200 == 99]


@pytest.mark.planted
@pytest.mark.parametrize("name", sorted(MASK_MUTANTS))
def test_planted_bug_is_found(name: str) -> None:
    check_is_found(name, MASK_MUTANTS[name], SEEDS)


def test_worlds_with_late_masks_hold_and_reach_what_they_are_for() -> None:
    seen = collections.Counter[str]()
    for seed in [*SEEDS[:80], *range(2099, 4000, 400)]:
        simulation = run_world(make_world(seed))
        late = simulation.engine.core.preparers.grammars.num_late
        seen["late"] += late
        seen["preempted"] += bool(late and simulation.engine.scheduler.num_preemptions)
        seen["look-ahead"] += bool(late and simulation.engine.core.num_lookahead_steps)
        seen["drafts"] += bool(late and simulation.world.drafts)
        seen["limits"] += bool(simulation.num_limited)
        seen["states"] += bool(late and STATE in simulation.world.windows)
        closed = simulation.engine.scheduler.membership.closed
        seen["dynamic batches"] += bool(late and closed and not simulation.engine.scheduler.membership.held)
        seen["several answers"] += bool(late and any(event.args.get("n", 1) > 1 for event in simulation.world.events))
    names = "late", "preempted", "look-ahead", "drafts", "limits", "states", "dynamic batches", "several answers"
    assert all(seen[name] >= 3 for name in names), seen
