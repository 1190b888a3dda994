"""The simulator finds bugs of speculative decoding: each known one, planted, fails in a world with drafts."""

from __future__ import annotations

import pytest

from tests.simulation.draft_mutants import DRAFT_MUTANTS
from tests.simulation.planted import check_is_found

SEEDS = [seed for seed in range(2_000) if seed % 10 in (2, 6)]


@pytest.mark.planted
@pytest.mark.parametrize("name", sorted(DRAFT_MUTANTS))
def test_planted_bug_is_found(name: str) -> None:
    check_is_found(name, DRAFT_MUTANTS[name], SEEDS)
