"""The simulator finds bugs: each known one, planted, fails within the seeds it is given."""

from __future__ import annotations

import pytest

from chairlift.sim.minimise import failure_of
from chairlift.sim.world import make_world
from tests.simulation.mutants import MUTANTS

MOST_SEEDS = 2_000


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](lambda owner, attribute, value: monkeypatch.setattr(owner, attribute, value))
    found = next((seed for seed in range(MOST_SEEDS) if failure_of(make_world(seed)) is not None), None)
    assert found is not None, f"{MOST_SEEDS} seeds did not notice: {name}"
