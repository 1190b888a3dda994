"""Fits a cost model to steps.

The model is t = base + W(tokens) + row price * rows + prompt price * prompt tokens + context price * positions that
rows read + pair price * positions that prompt tokens attend to, see :mod:`chairlift.core.scheduler.cost_model`. ``W``
is a rising line through knots, and tokens are counted after padding. The regression is that of the engine: errors are
relative, outliers are damped (Huber, 1964), and no coefficient is negative. Prices of positions that the steps do not
determine keep the value of the data sheet, multiplied by the typical ratio of measured to predicted step times. Prices
of rows and prompt tokens that the steps do not determine are near 0, and ``W`` has the whole cost of tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from chairlift.core.scheduler.cost_model import PRICES, CostModel, Roofline
from chairlift.errors import ConfigError
from chairlift_lab.fitting.identify import FEATURES, unidentified
from chairlift_lab.fitting.run import TimedStep
from chairlift_lab.replay.padding import padded

__all__ = ["StepErrors", "StepFit", "Term", "constant_model", "fit_cost", "step_errors"]

_FEWEST: Final = 16
_OF_POSITIONS: Final = {"context": "context_tokens", "pair": "prefill_context"}
"""Name of a price of positions -> its feature."""
_MOST: Final = 20_000
"""Largest number of steps that a fit uses. From longer logs it takes evenly spaced steps."""


@dataclasses.dataclass(frozen=True, slots=True)
class Term:
    """A price of the cost model."""

    name: str
    seconds: float
    sheet: float
    """The value that follows from the data sheet."""
    reason: str
    """Why the steps do not determine the price; empty if they do."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepErrors:
    """How well a cost model predicts steps. All values are fractions."""

    steps: int
    total: float
    """Predicted time of all steps together divided by the measured time, minus 1."""
    median: float
    """Median size of the error of a step."""
    p90: float


@dataclasses.dataclass(frozen=True, slots=True)
class StepFit:
    """A fitted cost model and what is known about it."""

    cost: CostModel
    terms: Sequence[Term]
    errors: StepErrors
    """Errors on the steps of the fit itself."""


def fit_cost(
    steps: Sequence[TimedStep], prior: Roofline, sizes: Sequence[int] = (), unknown: Mapping[str, str] | None = None
) -> StepFit:
    """Fit a cost model to steps. ``sizes``: capture sizes to which the machine pads. ``unknown``: prices that the steps
    cannot determine, with the reason.

    Raises ConfigError when there are too few steps.
    """
    steps = [(padded(step, sizes), seconds) for step, seconds in steps if seconds > 0]
    if len(steps) < _FEWEST:
        raise ConfigError(
            f"a fit needs at least {_FEWEST} steps that took time, and there are {len(steps)}; record more"
        )
    steps = steps[:: -(-len(steps) // _MOST)]
    sheet = CostModel(prior)
    prices = dict(zip(PRICES, sheet.coefficients[-len(PRICES) :], strict=True))
    scale = float(np.exp(np.median([np.log(seconds / sheet.step_seconds(step)) for step, seconds in steps])))
    reasons = unidentified(steps, unknown or {})
    held = {name: prices[name] * scale for name in reasons if name in _OF_POSITIONS}
    if not any(step.context_tokens for step, _ in steps):
        held["context"] = 0.0  # the log has no positions, so the prices of rows contain them
    model = CostModel(prior)
    model.fit([_without(step, held) for step in steps])
    coefficients = list(model.coefficients)
    for name, price in held.items():
        coefficients[PRICES.index(name) - len(PRICES)] = price
    cost = model.with_coefficients(coefficients)
    found = dict(zip(PRICES, coefficients[-len(PRICES) :], strict=True))
    terms = [Term(name, found[name], prices[name], reasons.get(name, "")) for name in FEATURES]
    return StepFit(cost, terms, step_errors(cost, steps))


def _without(step: TimedStep, held: Mapping[str, float]) -> TimedStep:
    """The step without the terms whose prices are fixed, and its time without their time."""
    features, seconds = step
    for name, price in held.items():
        field = _OF_POSITIONS[name]
        seconds -= price * getattr(features, field)
        features = features._replace(**{field: 0})
    return features, seconds


def step_errors(cost: CostModel, steps: Sequence[TimedStep], sizes: Sequence[int] = ()) -> StepErrors:
    """Errors of a cost model on steps."""
    predicted = np.asarray([cost.step_seconds(padded(step, sizes)) for step, _ in steps])
    measured = np.asarray([seconds for _, seconds in steps])
    sizes_of_errors = np.abs(predicted / measured - 1)
    median, p90 = np.percentile(sizes_of_errors, [50, 90]).tolist()
    return StepErrors(len(steps), float(predicted.sum() / measured.sum() - 1), median, p90)


def constant_model(prior: Roofline, seconds: float) -> CostModel:
    """A cost model in which every step takes ``seconds``: a baseline."""
    model = CostModel(prior)
    return model.with_coefficients([seconds, *[0.0] * (len(model.coefficients) - 1)])
