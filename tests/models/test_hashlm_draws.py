"""HashLM's tokens depend on the same parameters as those of a real sampler."""

from __future__ import annotations

from chairlift.base.sampling_params import PARAMETERS
from chairlift.models.hashlm import DRAWN


def test_tokens_depend_on_all_parameters_that_draw() -> None:
    assert set(DRAWN) == {name for name, each in PARAMETERS.items() if each.draws}
