"""Worlds with images hold, reach what they are for, and find bugs: each known one, planted, fails in one of them."""

from __future__ import annotations

import collections

import pytest

from chairlift.workbench.sim.minimise import failure_of
from chairlift.workbench.sim.simulator import run_world
from chairlift.workbench.sim.world import make_world
from tests.simulation.image_mutants import IMAGE_MUTANTS

SEEDS = [seed for seed in range(40_000) if seed % 100 in (14, 32, 74)]
SEEN_AT = {
    "blocks_of_positions_without_rows_lost": 77_414,
    "placeholders_alone_identify_a_block": 874,
    "image_that_must_be_whole_waits_for_ever": 1_414,
    "lost_blocks_begin_inside_an_image_that_must_be_whole": 319_732,
    "saved_blocks_end_inside_an_image_that_must_be_whole": 141_714,
}
"""Seed with which the search begins for bugs that few worlds notice."""


@pytest.mark.parametrize("name", sorted(IMAGE_MUTANTS))
def test_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = SEEN_AT.get(name, SEEDS[0]), *SEEDS
    with monkeypatch.context() as planted:
        IMAGE_MUTANTS[name](lambda owner, attribute, value: planted.setattr(owner, attribute, value))
        found = next((seed for seed in seeds if failure_of(make_world(seed)) is not None), None)
    assert found is not None, f"{len(SEEDS)} worlds did not notice: {name}"
    assert failure_of(make_world(found)) is None, f"world {found} also fails without the planted bug"


def test_worlds_with_images_hold_and_reach_what_they_are_for() -> None:
    seen = collections.Counter[str]()
    for seed in SEEDS[:30]:
        simulation = run_world(make_world(seed))
        images = simulation.engine.core.images
        seen["encoded"] += images.num_encoded
        seen["hits"] += images.num_hits
        seen["given up"] += images.num_given_up
        seen["encoded again"] += images.num_reencoded
        seen["cached"] += simulation.num_cached_tokens
        seen["preempted"] += simulation.engine.scheduler.num_preemptions
        seen["held up"] += sum(record.held_up_by == "image" for record in simulation.engine.step_log)
    names = "encoded", "hits", "cached", "preempted", "held up", "given up", "encoded again"
    assert all(seen[name] >= 3 for name in names), seen
