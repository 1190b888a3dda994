"""The simulator finds bugs: each known one, planted, fails within the seeds it is given."""

from __future__ import annotations

import pytest

from tests.simulation.mutants import MUTANTS
from tests.simulation.planted import check_is_found


@pytest.mark.planted
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_planted_bug_is_found(name: str) -> None:
    check_is_found(name, MUTANTS[name], range(2_000))
