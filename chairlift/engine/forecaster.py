"""Keeps the forecast of the queue up to date: after each step of the engine, it simulates a few steps on a copy of the
scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from chairlift.core.scheduler.answer_lengths import AnswerLengths
from chairlift.core.scheduler.costs import Costs
from chairlift.core.scheduler.forecast import Forecast, foresee
from chairlift.core.scheduler.scheduler import Scheduler

__all__ = ["Forecaster"]

_log = logging.getLogger(__name__)

_STEPS_PER_STEP: Final = 8
"""Number of simulated steps per step of the engine. Together these simulated steps take about half a millisecond."""
_PAUSE: Final = 0.5
"""Seconds between the end of one forecast and the beginning of the next."""
_PAUSE_OF_LOADS: Final = 0.1
"""Seconds between two forecasts while requests wait for nothing but their KV from files."""
_PAUSE_OF_THE_FAILED: Final = 60.0


class Forecaster:
    """Updates the forecast of the waiting queue, a few simulated steps at a time."""

    def __init__(
        self,
        scheduler: Scheduler,
        costs: Costs,
        lengths: AnswerLengths,
        priorities: Mapping[str, int],
        depth: int = 0,
        loads: Callable[[float], dict[str, float]] = lambda now: {},
    ) -> None:
        """``loads`` maps the time to the requests that wait for KV from files, and when it should be there."""
        self._scheduler = scheduler
        self._costs = costs
        self._priorities = dict(priorities)
        self._lengths = lengths
        self._depth = depth
        self._loads = loads
        self._ahead: Iterator[Forecast | None] | None = None
        self._queue = False
        """Whether the waiting queue had requests at the last check."""
        self._not_before = 0.0

    def advance(self, now: float) -> Forecast | None:
        """Continue the forecast; call it after each step. Returns a forecast when one is complete. For an empty queue
        the forecast is complete at once."""
        scheduler = self._scheduler
        if self._ahead is None:
            if not scheduler.waiting and scheduler.batch.open_rows:
                loads = self._loads(now)
                had = self._queue
                if loads and now < self._not_before:
                    return None
                self._queue = bool(loads)
                self._not_before = now + _PAUSE_OF_LOADS if loads else self._not_before
                made = Forecast(now, {}, dict.fromkeys(self._priorities, now), 0.0)
                return made.with_loads(loads) if had or loads else None
            if now < self._not_before:
                return None
            self._queue = True
            self._ahead = foresee(
                scheduler, self._costs.wall_seconds, self._lengths, now, self._priorities, depth=self._depth
            )
        try:
            for _ in range(_STEPS_PER_STEP):
                forecast = next(self._ahead)
                if forecast is not None:
                    self._ahead = None
                    self._not_before = now + _PAUSE
                    return forecast.with_loads(self._loads(now))
        except Exception:  # a custom policy that cannot be copied must not stop the engine
            name = scheduler.policy.name
            _log.exception("the queue could not be forecast, with policy %r; the next try is in a minute", name)
            self._ahead = None
            self._not_before = now + _PAUSE_OF_THE_FAILED
        return None
