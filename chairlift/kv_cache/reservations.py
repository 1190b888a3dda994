"""Blocks of sliding-window groups that are reserved for requests that may not be preempted."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.kv_cache.block_pool import BlockPool
from chairlift.kv_cache.layout import CacheLayout
from chairlift.request import Request

__all__ = ["Reservations"]


class Reservations:
    """A guaranteed request may reacquire blocks that its sliding window released. No other request may take them."""

    def __init__(self, layout: CacheLayout, pools: Sequence[BlockPool]) -> None:
        self._layout, self._pools = layout, pools
        self.reserved = [0] * len(pools)
        """Number of blocks per group that guaranteed requests hold or may still take."""
        self.unheld = [0] * len(pools)
        """Number of blocks per group that are reserved and not held now."""

    def fits(self, group: int, request: Request, free: int, want: int, watermark: float) -> bool:
        """Whether a request that joins may take ``want`` of ``free`` blocks, with ``watermark`` of the pool left free.

        A block that guaranteed requests share counts once for each, because it stays in use when one releases it.
        """
        capacity = self._pools[group].capacity
        kind = self._layout.kinds[group]
        to_reserve = 0  # in a group that releases nothing a guaranteed request has all its blocks from the beginning
        if request.is_guaranteed and kind.releases:
            to_reserve = self._layout.blocks_for(group, request.limit)
        spare = min(free - want - self.unheld[group], capacity - self.reserved[group] - to_reserve)
        return spare >= (watermark * capacity if kind.grows else 0)

    def withheld(self, group: int, request: Request) -> int:
        """Number of free blocks that a running request may not take."""
        return 0 if request.is_guaranteed else self.unheld[group]

    def update(self, group: int, request: Request) -> bool:
        """Update the reservation after the request's table or its number of uncomputed tokens has changed.

        A guaranteed request reserves the blocks that it holds and those that its window and next step need. The next
        step has the rest of the known tokens, later one token. True if others may take more blocks than before.
        """
        kind = self._layout.kinds[group]
        if not kind.releases or not request.is_guaranteed:
            return False
        held = len(request.block_ids[group]) - request.num_out_of_reach[group]
        step = min(self._layout.max_step_tokens, request.num_tokens - request.num_computed_tokens)
        left = kind.num_entries(request.limit) - len(request.block_ids[group])
        unheld = max(0, min(left, kind.most_entries(request.limit, step) - held))
        return self.reserve(group, request, held + unheld, unheld)

    def reserve(self, group: int, request: Request, reserved: int, unheld: int) -> bool:
        """Reserve ``reserved`` blocks for the request, ``unheld`` of which it does not hold. Returns as
        :meth:`update`."""
        before = request.reserved[group]
        self.reserved[group] += reserved - before[0]
        self.unheld[group] += unheld - before[1]
        request.reserved[group] = reserved, unheld
        return reserved < before[0] or unheld < before[1]
