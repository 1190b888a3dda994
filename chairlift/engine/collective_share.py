"""The share of step time in which the processes of a divided model wait for each other."""

from __future__ import annotations

import math
from collections.abc import Callable

__all__ = ["CollectiveShare"]

_SECONDS = 10.0
"""Time constant of the moving average, in seconds of work."""


class CollectiveShare:
    """Moving average of the time waited for other processes, divided by the time of the steps. ``waited`` returns the
    seconds waited since the start."""

    def __init__(self, waited: Callable[[], float]) -> None:
        self._waited = waited
        self._before = waited()
        self._waiting = self._spent = 0.0

    def landed(self, seconds: float) -> None:
        """Add a step that took ``seconds``."""
        now = self._waited()
        if seconds > 0:
            decay = math.exp(-seconds / _SECONDS)
            self._waiting = self._waiting * decay + now - self._before
            self._spent = self._spent * decay + seconds
        self._before = now

    @property
    def share(self) -> float | None:
        """Time waited divided by the time of the recent steps; None before the first step."""
        return min(1.0, self._waiting / self._spent) if self._spent > 0 else None
