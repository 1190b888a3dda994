"""Clocks of the engine. Tests and the simulator use their own clock instead of the machine's."""

from __future__ import annotations

import time
from typing import Final, Protocol

__all__ = ["POLL_SECONDS", "Clock", "SystemClock", "VirtualClock"]

POLL_SECONDS: Final = 0.001
"""Seconds between two checks for results of other threads while the loop has nothing else to do."""


class Clock(Protocol):
    """A clock: seconds since an arbitrary start. The time never decreases."""

    def now(self) -> float: ...

    def wait_until(self, when: float) -> None:
        """Return as soon as ``now() >= when``."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, when: float) -> None:
        while (remaining := when - time.monotonic()) > 0:
            time.sleep(remaining)


class VirtualClock:
    """A clock that moves only through :meth:`advance`."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds

    def wait_until(self, when: float) -> None:
        self._now = max(self._now, when)
