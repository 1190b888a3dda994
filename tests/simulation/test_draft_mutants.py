"""The simulator finds bugs of speculative decoding: each known one, planted, fails in a world with drafts."""

from __future__ import annotations

import pytest

from chairlift.workbench.sim.minimise import failure_of
from chairlift.workbench.sim.world import make_world
from tests.simulation.draft_mutants import DRAFT_MUTANTS

SEEDS = [seed for seed in range(2_000) if seed % 10 in (2, 6)]


@pytest.mark.parametrize("name", sorted(DRAFT_MUTANTS))
def test_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    DRAFT_MUTANTS[name](lambda owner, attribute, value: monkeypatch.setattr(owner, attribute, value))
    found = next((seed for seed in SEEDS if failure_of(make_world(seed)) is not None), None)
    assert found is not None, f"{len(SEEDS)} worlds did not notice: {name}"
