"""Simulates measured runs on a machine, and compares latencies and throughput with the measured ones.

Errors are signed: above 0, the simulation is slower (or has more throughput) than the machine was.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift_lab.fitting.run import Run
from chairlift_lab.replay.machines import Deployment
from chairlift_lab.replay.replay import RequestTiming, serve_trace, simulated_core

__all__ = ["FIGURES", "SimulatedRun", "compare", "orderings", "simulate"]

FIGURES: Final = ("ttft p50", "ttft p99", "tpot p50", "tpot p99", "e2e p50", "e2e p99", "tokens/s")
"""Names of the compared values, in the order of reports."""
_TOO_CLOSE: Final = 0.02
"""Relative difference of two measured values below which their order is left open."""


@dataclasses.dataclass(frozen=True, slots=True)
class SimulatedRun:
    """Measured and simulated values of a run. Times are seconds."""

    name: str
    measured: Mapping[str, float]
    simulated: Mapping[str, float]

    @property
    def errors(self) -> dict[str, float]:
        """Name of a value -> simulated / measured - 1. Values that the run does not have are missing."""
        return {key: self.simulated[key] / value - 1 for key, value in self.measured.items() if value > 0}


def simulate(run: Run, settings: Mapping[str, Any], deployment: Deployment) -> list[RequestTiming]:
    """Serve the requests of a run, sent at the same times, on a simulated machine. Returns a timing per request.

    ``settings``: settings of the engine by name; those of the run win. Raises ConfigError if the simulated engine
    refuses requests that the real one served.
    """
    config = EngineConfig.from_flat({**settings, **run.settings})
    core, limits = simulated_core(deployment, config)
    timings: list[RequestTiming] = []
    served = serve_trace(
        core,
        run.trace(),
        limits,
        timings,
        max_concurrency=run.max_concurrency,
        request_seconds=deployment.request_seconds,
    )
    if served.refused or served.requests < len(run.requests):
        raise ConfigError(
            f"{run.name}: the simulated engine refuses {len(run.requests) - served.requests:,} of"
            f" {len(run.requests):,} requests that the real one served; check max_model_len and the KV cache"
        )
    return sorted(timings, key=lambda timing: timing.index)


def compare(run: Run, settings: Mapping[str, Any], deployment: Deployment) -> SimulatedRun:
    """Simulate a run and compare it with the measurement."""
    timings = simulate(run, settings, deployment)
    measured = _figures(
        [(each.start, each.times[0], each.times[-1], each.tpot, each.output_tokens) for each in run.requests]
    )
    simulated = _figures([(each.request.arrival, each.first, each.last, each.tpot, each.tokens) for each in timings])
    return SimulatedRun(run.name, measured, simulated)


def _figures(requests: Sequence[tuple[float, float, float, float, int]]) -> dict[str, float]:
    """Values of :data:`FIGURES` from (sent, first token, last token, seconds per token, tokens) of each request."""
    sent, first, last, tpot, tokens = np.asarray(requests, float).T
    several = tokens > 1
    found = {}
    for name, values in (("ttft", first - sent), ("tpot", tpot[several]), ("e2e", last - sent)):
        p50, p99 = np.percentile(values, [50, 99]).tolist() if len(values) else (0.0, 0.0)
        found[f"{name} p50"], found[f"{name} p99"] = p50, p99
    found["tokens/s"] = float(tokens.sum() / max(last.max() - sent.min(), 1e-9))
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Ordering:
    """Whether the simulation orders two runs of the same traffic, with different settings, as the machine did."""

    runs: tuple[str, str]
    figure: str
    measured: float
    """Second run's value divided by the first's."""
    simulated: float

    @property
    def verdict(self) -> str:
        """``same``, ``other``, or ``too close`` if the measured values hardly differ."""
        if abs(self.measured - 1) < _TOO_CLOSE:
            return "too close"
        return "same" if (self.measured > 1) == (self.simulated > 1) else "other"


def orderings(runs: Sequence[Run], compared: Sequence[SimulatedRun]) -> list[Ordering]:
    """One entry for each pair of runs with equal requests and different settings, and for throughput, median TTFT and
    median TPOT."""
    found = []
    for (one, first), (other, second) in itertools.combinations(zip(runs, compared, strict=True), 2):
        if one.settings == other.settings or sorted(one.lengths) != sorted(other.lengths):
            continue
        for figure in ("tokens/s", "ttft p50", "tpot p50"):
            pairs = ((first.measured, second.measured), (first.simulated, second.simulated))
            if all(before[figure] > 0 for before, _ in pairs):
                measured, simulated = (after[figure] / before[figure] for before, after in pairs)
                found.append(Ordering((first.name, second.name), figure, measured, simulated))
    return found
