"""Latency targets that are fixed before a run: 5 and 10 times the median of an idle machine."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any, Final

from chairlift.core.scheduler.cost_model import CostModel, StepFeatures
from chairlift_lab.replay.traced_request import TracedRequest

__all__ = ["LOOSE", "STRICT", "AloneTimes", "LabTargets", "alone_times", "targets_of"]

STRICT: Final = 5
LOOSE: Final = 10
"""The two targets, as multiples of the idle median."""


@dataclasses.dataclass(frozen=True, slots=True)
class AloneTimes:
    """Times of a request that has the machine for itself and finds nothing in the prefix cache, in seconds."""

    ttft: float
    tpot: float
    """Seconds per token after the first; 0.0 for an answer of one token."""
    whole: float


def alone_times(request: TracedRequest, cost: CostModel, budget: int) -> AloneTimes:
    """Times of a request alone, by the cost model. ``budget``: prompt tokens of a step.

    The decode steps are those at the mean context; the cost model is linear in it.
    """
    ttft = 0.0
    for start in range(0, request.prompt_tokens, budget):
        ttft += cost.prefill_seconds(min(budget, request.prompt_tokens - start), start)
    more = request.output_tokens - 1
    mean = request.prompt_tokens + (more + 1) / 2
    tpot = cost.step_seconds(StepFeatures(1, round(mean))) if more else 0.0
    return AloneTimes(ttft, tpot, ttft + more * tpot)


@dataclasses.dataclass(frozen=True, slots=True)
class LabTargets:
    """Idle medians in seconds. A target is one of them times :data:`STRICT` or :data:`LOOSE`."""

    idle_ttft: float
    idle_tpot: float

    def met(self, ttft: float, tpot: float, times: int) -> bool:
        """Whether both times are within the targets."""
        return ttft <= times * self.idle_ttft and tpot <= times * self.idle_tpot

    def words(self) -> str:
        """The targets as text."""
        parts = [
            f"{name} {STRICT * idle * 1000:,.4g} / {LOOSE * idle * 1000:,.4g} ms"
            for name, idle in (("TTFT", self.idle_ttft), ("TPOT", self.idle_tpot))
        ]
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """The targets as data for JSON."""
        return dataclasses.asdict(self)


def targets_of(trace: Sequence[TracedRequest], cost: CostModel, budget: int) -> LabTargets:
    """Targets for a trace on a machine, from the medians of its requests when each runs alone."""
    alone = [alone_times(request, cost, budget) for request in trace]
    return LabTargets(
        statistics.median(each.ttft for each in alone),
        statistics.median([each.tpot for each in alone if each.tpot] or [0.0]),
    )
