"""The simulator finds bugs: each known one, planted, fails within the seeds it is given."""

from __future__ import annotations

import pytest

from chairlift.workbench.sim.minimise import failure_of
from chairlift.workbench.sim.world import make_world
from tests.simulation.mutants import MUTANTS
from tests.tiers import one_in

MOST_SEEDS = 2_000
SEEN_AT = {
    "collision_taken_for_the_same_content": 1_378,
    "copy_of_a_failed_step_kept": 1_131,
    "grammar_does_not_go_back_with_a_dropped_token": 719,
    "token_that_the_grammar_refuses_is_delivered": 299,
    "mask_goes_to_the_row_that_was_there_before": 119,
    "request_joins_before_its_grammar_is_compiled": 99,
    "saved_kv_of_a_failed_row_is_kept": 27_945,
    "parts_of_a_failed_step_take_the_first_masks": 37,
    "host_copies_of_untrusted_content_kept": 1_131,
}
"""Where the search begins for what few seeds notice: it saves a minute; when worlds change, it takes longer."""


@pytest.mark.parametrize("name", one_in(4, sorted(MUTANTS)))
def test_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](lambda owner, attribute, value: monkeypatch.setattr(owner, attribute, value))
    seeds = (SEEN_AT.get(name, 0), *range(MOST_SEEDS))
    found = next((seed for seed in seeds if failure_of(make_world(seed)) is not None), None)
    assert found is not None, f"{MOST_SEEDS} seeds did not notice: {name}"
