"""Worlds with images hold, reach what they are for, and find bugs: each known one, planted, fails in one of them."""

from __future__ import annotations

import collections

import pytest

from chairlift_lab.sim.simulator import run_world
from chairlift_lab.sim.world import make_world
from tests.simulation.image_mutants import IMAGE_MUTANTS
from tests.simulation.planted import check_is_found

SEEDS = [seed for seed in range(40_000) if seed % 100 in (14, 32, 74)]


@pytest.mark.planted
@pytest.mark.parametrize("name", sorted(IMAGE_MUTANTS))
def test_planted_bug_is_found(name: str) -> None:
    check_is_found(name, IMAGE_MUTANTS[name], SEEDS)


def test_worlds_with_images_hold_and_reach_what_they_are_for() -> None:
    seen = collections.Counter[str]()
    for seed in SEEDS[:30]:
        simulation = run_world(make_world(seed))
        images = simulation.engine.core.preparers.images
        seen["encoded"] += images.num_encoded
        seen["hits"] += images.num_hits
        seen["given up"] += images.num_given_up
        seen["encoded again"] += images.num_reencoded
        seen["cached"] += simulation.num_cached_tokens
        seen["preempted"] += simulation.engine.scheduler.num_preemptions
        seen["held up"] += sum(record.held_up_by == "image" for record in simulation.engine.step_log)
    names = "encoded", "hits", "cached", "preempted", "held up", "given up", "encoded again"
    assert all(seen[name] >= 3 for name in names), seen
