"""Seeded predictions have the stated rank correlation, and change nothing else."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from chairlift.errors import ConfigError
from chairlift_lab.replay.traced_request import TracedRequest
from chairlift_lab.workload.predictions import with_predictions

LENGTHS = random.Random(1).sample(range(1, 4000), 400)
TRACE = [TracedRequest(arrival=0.1 * i, prompt_tokens=10, output_tokens=n) for i, n in enumerate(LENGTHS)]


def measured_tau(trace: list[TracedRequest]) -> float:
    pairs = [(each.output_tokens, each.predicted_tokens or 0) for each in trace]
    signs = [(a - c) * (b - d) > 0 for (a, b), (c, d) in itertools.combinations(pairs, 2)]
    return 2 * sum(signs) / len(signs) - 1


@pytest.mark.parametrize("tau", [0.0, 0.5, 0.8, 1.0])
def test_predictions_have_the_stated_rank_correlation(tau: float) -> None:
    predicted = with_predictions(TRACE, tau, seed=3)
    assert measured_tau(predicted) == pytest.approx(tau, abs=0.07 if tau < 1 else 0)
    assert sorted(each.predicted_tokens or 0 for each in predicted) == sorted(LENGTHS)
    assert [dataclasses.replace(each, predicted_tokens=None) for each in predicted] == TRACE


def test_equal_seeds_give_equal_predictions() -> None:
    assert with_predictions(TRACE, 0.5, 3) == with_predictions(TRACE, 0.5, 3) != with_predictions(TRACE, 0.5, 4)
    assert with_predictions([], 0.5, 3) == []


@pytest.mark.parametrize("tau", [-0.1, 1.1, float("nan")])
def test_a_correlation_out_of_range_is_refused(tau: float) -> None:
    with pytest.raises(ConfigError, match="tau must be from 0"):
        with_predictions(TRACE, tau, 0)
