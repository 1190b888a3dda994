"""Worlds in which prompts with common beginnings arrive together hold, reach what they are for, and find bugs."""

from __future__ import annotations

import collections

import pytest

from chairlift.core.scheduler import prompts_in_flight
from chairlift_lab.sim.simulator import run_world
from chairlift_lab.sim.world import make_world
from tests.simulation.planted import check_is_found
from tests.simulation.prompt_mutants import PROMPT_MUTANTS

SEEDS = [seed for seed in range(40_000) if seed % 100 in (60, 61, 90)]


@pytest.mark.planted
@pytest.mark.parametrize("name", sorted(PROMPT_MUTANTS))
def test_planted_bug_is_found(name: str) -> None:
    check_is_found(name, PROMPT_MUTANTS[name], SEEDS)


def test_worlds_with_common_beginnings_hold_and_reach_what_they_are_for() -> None:
    seen = collections.Counter[str]()
    for seed in SEEDS[:60]:
        simulation = run_world(make_world(seed))
        seen["followed"] += simulation.engine.core.scheduler.batch.in_flight.num_followed
        seen["held up"] += sum(record.held_up_by == "prefix" for record in simulation.engine.step_log)
    assert seen["followed"] >= 20 and seen["held up"] >= 5, seen


def test_worlds_hold_if_released_requests_are_queued_only_by_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts_in_flight, "LEAST_MOVES", 0)
    followed = 0
    for seed in SEEDS[:60]:
        simulation = run_world(make_world(seed))
        followed += simulation.engine.core.scheduler.batch.in_flight.num_followed
    assert followed >= 20
