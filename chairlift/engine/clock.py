"""Where the engine gets its time from: a seam, so that tests and the simulator own it."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock", "VirtualClock"]


class Clock(Protocol):
    """Seconds since an arbitrary start, never going back."""

    def now(self) -> float: ...

    def wait_until(self, when: float) -> None:
        """Return when ``now() >= when``."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, when: float) -> None:
        while (left := when - time.monotonic()) > 0:
            time.sleep(left)


class VirtualClock:
    """A clock that stands still until it is told otherwise."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds

    def wait_until(self, when: float) -> None:
        self._now = max(self._now, when)
