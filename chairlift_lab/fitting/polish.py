"""Adjusts a fitted machine to the latencies of requests, by simulating the same arrivals.

Steps that were recovered from token times have errors: prompts are placed by assumption, and a request also waits for
client, network and front end. Five numbers are adjusted: factors of the base time, of the time per token, of decode
rows with their positions, and of prompts with theirs, and the seconds per request. The loss is the mean squared
logarithm of simulated to measured quantiles of TTFT and TPOT. The search changes one number at a time, and halves its
steps when no change helps.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from chairlift.core.scheduler.cost_model import PRICES, CostModel
from chairlift_lab.fitting.run import Run
from chairlift_lab.fitting.validate import simulate
from chairlift_lab.replay.machines import Deployment

__all__ = ["polish", "scaled"]

_QUANTILES: Final = (0.1, 0.25, 0.5, 0.75, 0.9)
_GROUPS: Final = ("base", "tokens", "decode", "prompt")
_MEMBERS: Final = {"row": "decode", "context": "decode", "shared": "decode", "prompt": "prompt", "pair": "prompt"}
"""Price -> group of coefficients that share a factor."""
_FIRST_STEP: Final = 0.08
_LAST_STEP: Final = 0.02
_MOST_SIMULATIONS: Final = 60
_STRAYING: Final = 0.5
"""Weight of the squared logarithms of the factors in the loss. The steps were measured, so factors stay near 1."""


def scaled(cost: CostModel, factors: Mapping[str, float]) -> CostModel:
    """A cost model whose coefficients are multiplied by the factor of their group: ``base``, ``tokens``, ``decode`` or
    ``prompt``."""
    groups = ["base", *["tokens"] * (len(cost.coefficients) - 1 - len(PRICES)), *(_MEMBERS.get(p, "") for p in PRICES)]
    pairs = zip(cost.coefficients, groups, strict=True)
    return cost.with_coefficients([value * factors.get(group, 1.0) for value, group in pairs])


def polish(
    runs: Sequence[Run],
    settings: Mapping[str, Any],
    deployment: Deployment,
    progress: Callable[[int, float], None] | None = None,
) -> Deployment:
    """A deployment with adjusted coefficients and ``request_seconds``. The runs must have requests.

    ``progress`` is called after each simulated set of runs, with their number and the smallest loss.
    """
    targets = [_quantiles_measured(run) for run in runs]
    seen = 0

    def loss(candidate: Deployment, logs: Sequence[float]) -> float:
        nonlocal seen
        seen += 1
        errors = []
        for run, target in zip(runs, targets, strict=True):
            simulated = _quantiles_simulated(run, settings, candidate)
            errors += [math.log(ours / theirs) ** 2 for ours, theirs in zip(simulated, target, strict=True) if theirs]
        return statistics.fmean(errors) + _STRAYING * statistics.fmean(each**2 for each in logs[: len(_GROUPS)])

    first = dataclasses.replace(deployment, request_seconds=_delay(runs, settings, deployment))
    logs = [0.0] * len(_GROUPS)
    delay_unit = max(first.request_seconds, 0.1 * _usual_ttft(runs))

    def candidate(values: Sequence[float]) -> Deployment:
        factors = dict(zip(_GROUPS, map(math.exp, values), strict=False))
        delay = max(0.0, first.request_seconds + values[-1] * delay_unit)
        return dataclasses.replace(first, cost=scaled(deployment.cost, factors), request_seconds=delay)

    best = [*logs, 0.0]
    smallest = loss(first, best)
    step = _FIRST_STEP
    while step >= _LAST_STEP and seen < _MOST_SIMULATIONS:
        improved = False
        for at in range(len(best)):
            for change in (step, -step):
                tried = [*best]
                tried[at] += change
                found = loss(candidate(tried), tried)
                if progress is not None:
                    progress(seen, min(found, smallest))
                if found < smallest:
                    best, smallest, improved = tried, found, True
                    break
        step = step if improved else step / 2
    return candidate(best)


def _quantiles_measured(run: Run) -> list[float]:
    ttft = [request.ttft for request in run.requests]
    tpot = [request.tpot for request in run.requests if len(request.times) > 1]
    return _quantiles(ttft, tpot)


def _quantiles_simulated(run: Run, settings: Mapping[str, Any], deployment: Deployment) -> list[float]:
    timings = simulate(run, settings, deployment)
    ttft = [timing.first - timing.request.arrival for timing in timings]
    tpot = [timing.tpot for timing in timings if timing.tokens > 1]
    return _quantiles(ttft, tpot)


def _quantiles(ttft: Sequence[float], tpot: Sequence[float]) -> list[float]:
    found: list[float] = np.quantile(ttft, _QUANTILES).tolist()
    found += np.quantile(tpot, _QUANTILES).tolist() if tpot else [0.0] * len(_QUANTILES)
    return found


def _delay(runs: Sequence[Run], settings: Mapping[str, Any], deployment: Deployment) -> float:
    """Typical difference of measured and simulated TTFT among the fastest quarter of requests, which hardly waited."""
    found = []
    for run in runs:
        simulated = simulate(run, settings, dataclasses.replace(deployment, request_seconds=0.0))
        pairs = zip(run.requests, simulated, strict=True)
        differences = sorted((each.ttft, each.ttft - (timing.first - timing.request.arrival)) for each, timing in pairs)
        found += [late for _, late in differences[: max(1, len(differences) // 4)]]
    return max(0.0, statistics.median(found))


def _usual_ttft(runs: Sequence[Run]) -> float:
    return statistics.median(request.ttft for run in runs for request in run.requests)
