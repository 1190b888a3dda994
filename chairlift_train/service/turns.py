"""When training may run between two steps of the engine, and for how long.

While the engine has no work, training runs without pause. While it has, training takes at most ``share`` of the time,
in turns of at most ``gap`` seconds, which is what it adds to the time between two steps. A slice of work that is longer
than that runs alone, after a longer pause. So the share holds, and a gap is at most one slice longer than allowed.
"""

from __future__ import annotations

from typing import Final

__all__ = ["SliceTurns"]

_MEMORY: Final = 0.8
_IDLE_TURN: Final = 0.02
"""Seconds of a turn while the engine has no work. After them it looks at new requests."""


class SliceTurns:
    """Decides about slices from the measured seconds of earlier ones."""

    def __init__(self, gap: float, share: float) -> None:
        self._gap = gap
        self._share = share
        self._free_at = 0.0
        """When training may run again while the engine has work."""
        self.slice_seconds = 0.0
        """Mean duration of the newest slices."""
        self.longest = 0.0
        """Longest duration of a slice since it was last read."""

    def wait(self, now: float, busy: bool) -> float:
        """Seconds until training may run."""
        return max(0.0, self._free_at - now) if busy else 0.0

    def goes_on(self, since: float, now: float, busy: bool) -> bool:
        """Whether a turn that began at ``since`` has another slice."""
        if not busy:
            return now - since < _IDLE_TURN
        return now - since + self.slice_seconds <= self._gap

    def sliced(self, seconds: float) -> None:
        """Note the duration of a slice."""
        self.slice_seconds = seconds if not self.slice_seconds else self._mean(seconds)
        self.longest = max(self.longest, seconds)

    def _mean(self, seconds: float) -> float:
        return _MEMORY * self.slice_seconds + (1 - _MEMORY) * seconds

    def take_longest(self) -> float:
        """The longest duration of a slice since the last call."""
        longest, self.longest = self.longest, 0.0
        return longest

    def ended(self, since: float, now: float) -> None:
        """Note that a turn has ended. The engine has the rest of the time before the next one."""
        self._free_at = now + (now - since) * (1 - self._share) / self._share
