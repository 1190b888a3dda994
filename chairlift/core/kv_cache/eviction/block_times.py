"""How long blocks of the prefix cache live, and how long they wait until they are used again."""

from __future__ import annotations

import bisect

from chairlift.base.turn_cache import BLOCK_TIME_BOUNDS

__all__ = ["BlockTimes", "Spread"]


class Spread:
    """Number of times per bucket of :data:`~chairlift.base.turn_cache.BLOCK_TIME_BOUNDS`, and their sum in seconds."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BLOCK_TIME_BOUNDS) + 1)
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Count a time. A negative time, after a clock was set back, counts as 0."""
        self.counts[bisect.bisect_left(BLOCK_TIME_BOUNDS, seconds)] += 1
        self.seconds += max(0.0, seconds)


class BlockTimes:
    """Times of the blocks of one pool. Times are noted when a block gets content, and when the last request has left
    it. So a step in which requests only decode costs nothing here. The times are those that vLLM also measures, for a
    sample of its blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.reuse_gap = Spread()
        """Seconds for which a block was unused until a request used its content again."""
        self.idle = Spread()
        """Seconds for which an evicted block had been unused."""
        self.lifetime = Spread()
        """Seconds from the time at which an evicted block got its content."""
        self._filled = [0.0] * num_blocks
        self._released = [0.0] * num_blocks

    def filled(self, block: int, now: float) -> None:
        self._filled[block] = now

    def released(self, block: int, now: float) -> None:
        self._released[block] = now

    def reused(self, block: int, now: float) -> None:
        self.reuse_gap.observe(now - self._released[block])

    def evicted(self, block: int, now: float) -> None:
        self.idle.observe(now - self._released[block])
        self.lifetime.observe(now - self._filled[block])
