"""Measures how much of this machine other programs use, while something is measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from chairlift.base.processors import allowed_processors

__all__ = ["OtherLoad"]


class OtherLoad:
    """Measures the share of this machine's processors that other programs use, over any time."""

    def __init__(
        self, stat: Path = Path("/proc/stat"), own_seconds: Callable[[], float] = time.process_time, hertz: int = 0
    ) -> None:
        """Begin to measure. ``hertz`` is the number of ticks of ``stat`` in a second. 0: as the system says."""
        self._stat = stat
        self._own_seconds = own_seconds
        self._hertz = hertz or (os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100)
        self._names = _processor_names()
        self._before = self._read()

    def share(self) -> float:
        """Share from 0 to 1 since the previous call. 0.0 if the system does not say it.

        Only the processors that this process may use count. The time of this process itself does not count.
        """
        before = self._before
        self._before = self._read()
        idle, total, own = (after - value for after, value in zip(self._before, before, strict=True))
        return min(1.0, max(0.0, 1 - (idle + own) / total)) if total > 0 else 0.0

    def _read(self) -> tuple[float, float, float]:
        """(idle ticks, all ticks, ticks of this process) so far."""
        try:
            lines = self._stat.read_text().splitlines()
        except OSError:
            lines = []
        idle = total = 0
        for name, *fields in (line.split() for line in lines if line.startswith("cpu")):
            if name in self._names:
                ticks = [int(field) for field in fields[:8]]
                idle = idle + sum(ticks[3:5])
                total = total + sum(ticks)
        return idle, total, self._own_seconds() * self._hertz


def _processor_names() -> frozenset[str]:
    """Names in ``/proc/stat`` of the processors that this process may use."""
    return frozenset(f"cpu{number}" for number in allowed_processors())
