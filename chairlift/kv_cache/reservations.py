"""Blocks of sliding-window groups that are reserved for requests that may not be preempted."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.kv_cache.block_pool import BlockPool
from chairlift.kv_cache.layout import CacheLayout
from chairlift.request import Request

__all__ = ["Reservations"]


class Reservations:
    """A guaranteed request may reacquire the blocks that its window released: nobody else may take them meanwhile."""

    def __init__(self, layout: CacheLayout, pools: Sequence[BlockPool]) -> None:
        self._layout, self._pools = layout, pools
        self.reserved = [0] * len(pools)
        """Per group: blocks that guaranteed requests hold or may still take."""
        self.unheld = [0] * len(pools)
        """Per group: those of them that they do not hold now."""

    def fits(self, group: int, request: Request, free: int, want: int, watermark: float) -> bool:
        """Whether a request that joins may take ``want`` of ``free`` blocks.

        Blocks that guaranteed requests share count for each of them: when one leaves them behind, nothing comes free.
        """
        capacity = self._pools[group].capacity
        most = 0  # in a group without a window a guaranteed request has all its blocks from the beginning
        if request.is_guaranteed and self._layout.groups[group].window is not None:
            most = self._layout.blocks_for(group, request.limit)
        spare = min(free - want - self.unheld[group], capacity - self.reserved[group] - most)
        return spare >= watermark * capacity

    def withheld(self, group: int, request: Request) -> int:
        """Free blocks that a request that runs may not take."""
        return 0 if request.is_guaranteed else self.unheld[group]

    def update(self, group: int, request: Request) -> bool:
        """The request's table has changed, or what it has left to compute. A guaranteed request has reserved what it
        holds, and as much more as its window and its next step need: of what is known, then a token. True when
        others may take more blocks than before."""
        window, size = self._layout.groups[group].window, self._layout.block_size
        if window is None or not request.is_guaranteed:
            return False
        held = len(request.block_ids[group]) - request.num_out_of_reach[group]
        step = min(self._layout.max_step_tokens, request.num_tokens - request.num_computed_tokens)
        left = -(-request.limit // size) - len(request.block_ids[group])
        unheld = max(0, min(left, -(-(window - 1 + step) // size) + 1 - held))
        return self.reserve(group, request, held + unheld, unheld)

    def reserve(self, group: int, request: Request, reserved: int, unheld: int) -> bool:
        """Reserve so many blocks for the request, and so many beside those it holds. Returns as :meth:`update`."""
        before = request.reserved[group]
        self.reserved[group] += reserved - before[0]
        self.unheld[group] += unheld - before[1]
        request.reserved[group] = reserved, unheld
        return reserved < before[0] or unheld < before[1]
