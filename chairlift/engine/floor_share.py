"""Utilisation: the minimum time that this machine would need for the steps, divided by the time they took."""

from __future__ import annotations

import math
from collections.abc import Callable

from chairlift.core.scheduler.cost_model import StepFeatures

__all__ = ["FloorShare"]

_SECONDS = 10.0
"""Time constant of the moving average of utilisation, in seconds of work."""


class FloorShare:
    """Moving average of minimum step time divided by actual step time."""

    def __init__(self, least_seconds: Callable[[StepFeatures, int], float]) -> None:
        """``least_seconds(features, number of sampled rows)`` returns the minimum time of a step in seconds."""
        self._least_seconds = least_seconds
        self._floor = self._spent = 0.0

    def landed(self, step: StepFeatures, sampled: int, held: int, seconds: float) -> None:
        """Add a step that took ``seconds``, including the host time before it.

        ``held`` is the number of rows that have ended and wait for the end of their static batch. These rows do not
        count as work.
        """
        if seconds <= 0:
            return
        if held and step.num_decodes:
            useful = max(0, step.num_decodes - held)
            context = step.context_tokens * useful // step.num_decodes
            shared = step.shared_tokens * useful // step.num_decodes
            step = step._replace(num_decodes=useful, context_tokens=context, shared_tokens=shared)
            sampled = max(0, sampled - held)
        decay = math.exp(-seconds / _SECONDS)
        idle = step.num_decodes + step.prefill_tokens == 0
        self._floor = self._floor * decay + (0.0 if idle else self._least_seconds(step, sampled))
        self._spent = self._spent * decay + seconds

    @property
    def share(self) -> float | None:
        """Minimum time divided by actual time, over the recent steps; None before the first step."""
        return self._floor / self._spent if self._spent > 0 else None
