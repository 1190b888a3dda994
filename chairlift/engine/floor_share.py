"""Utilisation: how near steps come to the least time in which this machine could have done them."""

from __future__ import annotations

import math
from collections.abc import Callable

from chairlift.scheduler.cost_model import StepFeatures

__all__ = ["FloorShare"]

_SECONDS = 10.0
"""Seconds of work over which the share is a mean that forgets."""


class FloorShare:
    """Sums up steps and their floors, and forgets with time."""

    def __init__(self, least_seconds: Callable[[StepFeatures, int], float]) -> None:
        """``least_seconds`` gives the floor of a step: of its features, and the rows that it samples from."""
        self._least_seconds = least_seconds
        self._floor = self._spent = 0.0

    def landed(self, step: StepFeatures, sampled: int, held: int, seconds: float) -> None:
        """A step has taken so long, with what the loop did before it. Rows that are ``held``, since they have ended and
        their static batch has not, are no work that was asked for."""
        if seconds <= 0:
            return
        if held and step.num_decodes:
            useful = max(0, step.num_decodes - held)
            context = step.context_tokens * useful // step.num_decodes
            step, sampled = step._replace(num_decodes=useful, context_tokens=context), max(0, sampled - held)
        kept = math.exp(-seconds / _SECONDS)
        idle = step.num_decodes + step.prefill_tokens == 0
        self._floor = self._floor * kept + (0.0 if idle else self._least_seconds(step, sampled))
        self._spent = self._spent * kept + seconds

    @property
    def share(self) -> float | None:
        """Floor / time of the last steps; None before the first."""
        return self._floor / self._spent if self._spent > 0 else None
