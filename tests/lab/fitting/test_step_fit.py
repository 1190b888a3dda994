"""Known costs come back from noisy steps, and terms that the steps do not determine are named."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from chairlift.core.scheduler.cost_model import CostModel, StepFeatures
from chairlift.errors import ConfigError
from chairlift_lab.fitting.run import TimedStep
from chairlift_lab.fitting.step_fit import constant_model, fit_cost, step_errors
from chairlift_lab.replay.padding import padded, vllm_capture_sizes
from tests.lab.fitting.known_machine import SHEET, NoisyCost

PRIOR = SHEET.cost.prior


def steps(count: int, cost: NoisyCost, *, seed: int = 1, lengths: tuple[int, int] = (50, 2000)) -> Iterator[TimedStep]:
    """Steps with 1 to 32 rows; a third of them with prompt tokens."""
    rng = random.Random(seed)
    for _ in range(count):
        rows = rng.randint(1, 32)
        context = sum(rng.randint(*lengths) for _ in range(rows))
        prompt = rng.randint(16, 500) if rng.random() < 1 / 3 else 0
        step = StepFeatures(rows, context, prompt, prompt * rng.uniform(1, 900))
        yield step, cost.step_seconds(step)


def test_known_costs_come_back() -> None:
    cost = NoisyCost(0.03)
    fit = fit_cost(list(steps(3000, cost)), PRIOR)
    assert not any(term.reason for term in fit.terms)
    unseen = [(step, cost.exact(step)) for step, _ in steps(400, cost, seed=2)]
    errors = step_errors(fit.cost, unseen)
    assert errors.median < 0.01 and errors.p90 < 0.03 and abs(errors.total) < 0.01
    assert step_errors(constant_model(PRIOR, 0.03), unseen).median > 0.1
    assert step_errors(CostModel(PRIOR), unseen).median > 0.5


def test_rare_slow_steps_do_little_harm() -> None:
    cost, rng = NoisyCost(0.02), random.Random(5)
    slow = [(step, seconds * (8 if rng.random() < 0.03 else 1)) for step, seconds in steps(2000, cost)]
    unseen = [(step, cost.exact(step)) for step, _ in steps(400, cost, seed=2)]
    assert abs(step_errors(fit_cost(slow, PRIOR).cost, unseen).total) < 0.03


def test_padding_explains_a_sawtooth() -> None:
    """The machine computes 8, 16, 24 or 32 rows."""
    cost, sizes = NoisyCost(0.0), (8, 16, 24, 32)
    plain = [step for step, _ in steps(1500, cost) if not step.prefill_tokens]
    real = [(step, cost.exact(padded(step, sizes)._replace(context_tokens=step.context_tokens))) for step in plain]
    with_sizes, without = fit_cost(real, PRIOR, sizes), fit_cost(real, PRIOR)
    assert with_sizes.errors.p90 < 0.01 < without.errors.p90


def test_padding_rounds_up_to_captured_sizes() -> None:
    assert padded(StepFeatures(5, 100), (4, 8)) == StepFeatures(8, 100)
    assert padded(StepFeatures(2, 10, 3, 6.0), (4, 8)) == StepFeatures(2, 10, 6, 6.0)
    for same in (StepFeatures(4, 9), StepFeatures(9, 9)):
        assert padded(same, (4, 8)) == same and padded(same, ()) == same
    assert vllm_capture_sizes(8) == (1, 2, 4, 8, 16)
    assert vllm_capture_sizes(256)[-3:] == (480, 496, 512)


def test_rows_of_equal_length_do_not_determine_positions() -> None:
    cost = NoisyCost(0.02)
    fit = fit_cost(list(steps(1500, cost, lengths=(400, 410))), PRIOR)
    reasons = {term.name: term.reason for term in fit.terms}
    assert "the number of positions read follows from the rest of the step" in reasons["context"]
    assert not reasons["row"] and not reasons["prompt"]
    # Their price stays that of the data sheet, times the typical ratio of the machine to the data sheet.
    term = next(term for term in fit.terms if term.name == "context")
    assert 1 < term.seconds / term.sheet < 1000
    assert fit.errors.median < 0.03


def test_absent_features_are_named() -> None:
    cost = NoisyCost(0.01)
    decodes = [step._replace(context_tokens=0, prefill_tokens=0, prefill_context=0.0) for step, _ in steps(200, cost)]
    fit = fit_cost([(step, cost.exact(step)) for step in decodes], PRIOR)
    reasons = {term.name: term.reason for term in fit.terms}
    assert not reasons.pop("row") and all(
        "0 steps have any, and a fit needs 8" in reason for reason in reasons.values()
    )
    assert next(term.seconds for term in fit.terms if term.name == "context") == 0


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 16 steps that took time, and there are 3; record more"):
        fit_cost(list(steps(3, NoisyCost(0.0))), PRIOR)


def test_coefficients_make_a_model_and_are_checked() -> None:
    model = CostModel(PRIOR)
    doubled = model.with_coefficients([2 * value for value in model.coefficients])
    step = StepFeatures(3, 500, 40, 900.0)
    assert doubled.step_seconds(step) == pytest.approx(2 * model.step_seconds(step))
    assert CostModel.from_dict(doubled.to_dict()).coefficients == doubled.coefficients
    with pytest.raises(ConfigError, match="a cost model has 18 coefficients, got 2"):
        model.with_coefficients([1.0, 2.0])
    with pytest.raises(ConfigError, match="out of range"):
        model.with_coefficients([-1.0, *model.coefficients[1:]])
