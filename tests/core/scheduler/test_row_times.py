"""Corrected step times: stairs between knots, noise, neighbours, and what is left alone."""

from __future__ import annotations

import random

import pytest

from chairlift.core.scheduler.cost_model import CostModel, StepFeatures
from chairlift.core.scheduler.row_times import RowTimes


def stairs(rows: int) -> float:
    """Seconds of a step of a kernel that computes 16 rows at a time."""
    return 0.02 * -(-rows // 16)


def learnt(sizes: range, steps: int, noise: float = 0.0) -> tuple[CostModel, RowTimes]:
    model, rng = CostModel(), random.Random(0)
    times = RowTimes(model)
    for _ in range(steps):
        step = StepFeatures(rng.choice(sizes), 100)
        seconds = stairs(step.num_decodes) * rng.lognormvariate(0, noise)
        times.observe(step, seconds)
        model.observe(step, seconds)
    return model, times


def test_a_stair_between_two_knots_is_found() -> None:
    model, times = learnt(range(14, 20), 400, noise=0.05)
    errors = {rows: times.seconds(StepFeatures(rows, 100)) / stairs(rows) - 1 for rows in (15, 18)}
    smooth = {rows: model.step_seconds(StepFeatures(rows, 100)) / stairs(rows) - 1 for rows in (15, 18)}
    assert max(map(abs, errors.values())) < 0.65 * max(map(abs, smooth.values())), (errors, smooth)


def test_sizes_that_were_never_seen_are_as_the_model_says() -> None:
    model, times = learnt(range(14, 20), 100)
    for step in (StepFeatures(1, 10), StepFeatures(30, 10), StepFeatures(2000, 10), StepFeatures(16, 10, 5, 5.0)):
        assert times.seconds(step) == model.step_seconds(step)


def test_neighbours_of_a_size_learn_a_part_of_its_error() -> None:
    model = CostModel()
    times = RowTimes(model)
    for _ in range(50):
        times.observe(StepFeatures(20), 1.2 * model.step_seconds(StepFeatures(20)))
    factors = [times.seconds(StepFeatures(rows)) / model.step_seconds(StepFeatures(rows)) for rows in range(17, 24)]
    assert factors[3] == pytest.approx(1.2, rel=0.02)
    assert factors[0] == factors[6] == 1.0
    assert 1.0 < factors[1] < factors[2] < factors[3] > factors[4] > factors[5] > 1.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_times_that_cannot_be_are_ignored(seconds: float) -> None:
    model = CostModel()
    times = RowTimes(model)
    times.observe(StepFeatures(20), seconds)
    assert times.seconds(StepFeatures(20)) == model.step_seconds(StepFeatures(20))


def test_one_interruption_changes_little() -> None:
    model = CostModel()
    times, step = RowTimes(model), StepFeatures(20)
    for _ in range(20):
        times.observe(step, model.step_seconds(step))
    times.observe(step, 50 * model.step_seconds(step))
    assert times.seconds(step) < 1.05 * model.step_seconds(step)
