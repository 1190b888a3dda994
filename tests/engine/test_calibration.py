"""What is said of forecasts is what became of the last of them."""

from __future__ import annotations

import random

import pytest

from chairlift.engine.calibration import SHORTEST_WAIT, Calibration
from chairlift.metrics.stats import FORECAST_RATIOS, LATENCY_BUCKETS, Histogram


def test_figures_are_those_of_the_newest_waits() -> None:
    calibration, rng = Calibration(capacity=100), random.Random(1)
    waits = [(rng.uniform(0.1, 20), rng.uniform(0.05, 30)) for _ in range(350)]
    for predicted, actual in waits:
        calibration.add(predicted, actual)
    newest = waits[-100:]
    ratios = sorted(actual / predicted for predicted, actual in newest)
    assert len(calibration) == 100
    assert [calibration.quantile(share) for share in (0.0, 0.1, 0.5, 0.9, 1.0)] == [
        ratios[index] for index in (0, 10, 50, 90, 99)
    ]
    for ratio in FORECAST_RATIOS:
        assert calibration.within(ratio) == sum(each <= ratio for each in ratios) / 100
    assert calibration.mean_error() == pytest.approx(sum(abs(a - p) for p, a in newest) / 100)


def test_too_few_waits_say_nothing() -> None:
    calibration = Calibration()
    for _ in range(19):
        calibration.add(1.0, 1.0)
    assert [calibration.quantile(0.5), calibration.within(1.0), calibration.mean_error()] == [None] * 3
    calibration.add(1.0, 1.0)
    assert [calibration.quantile(0.5), calibration.within(1.0), calibration.mean_error()] == [1.0, 1.0, 0.0]
    calibration.clear()
    assert (len(calibration), calibration.quantile(0.5)) == (0, None)


def test_what_is_due_at_once_is_not_judged() -> None:
    errors = Histogram(LATENCY_BUCKETS)
    calibration = Calibration(errors)
    calibration.add(0.0, 5.0)
    calibration.add(SHORTEST_WAIT / 2, 5.0)
    assert len(calibration) == sum(errors.counts) == 0
    calibration.add(SHORTEST_WAIT, 2.0)
    assert (len(calibration), sum(errors.counts), errors.total) == (1, 1, pytest.approx(1.95))
