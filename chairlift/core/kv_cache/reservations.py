"""Reserves blocks of sliding-window groups for requests that may not be preempted."""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.core.kv_cache.block_pool import BlockPool
from chairlift.core.kv_cache.layout import CacheLayout
from chairlift.core.request import Request

__all__ = ["Reservations"]


class Reservations:
    """Counts the blocks reserved for guaranteed requests. Such a request may reacquire blocks that its sliding window
    released; no other request may take them."""

    def __init__(self, layout: CacheLayout, pools: Sequence[BlockPool]) -> None:
        self._layout = layout
        self._pools = pools
        self.reserved = [0] * len(pools)
        """Per group: number of blocks that guaranteed requests hold or may still take."""
        self.unheld = [0] * len(pools)
        """Per group: number of blocks that guaranteed requests may still take, because the blocks are reserved for them
        and not held now."""

    def fits(self, group: int, request: Request, free: int, want: int, watermark: float) -> bool:
        """Whether a joining request may take ``want`` of the ``free`` blocks. A fraction ``watermark`` of the pool must
        stay free.

        A block that several guaranteed requests share counts once for each of them, because it stays in use when one of
        them releases it.
        """
        capacity = self._pools[group].capacity
        kind = self._layout.kinds[group]
        to_reserve = 0  # in a group that releases no blocks, a guaranteed request gets all its blocks at once
        if request.is_guaranteed and kind.releases:
            to_reserve = self._layout.blocks_for(group, request.limit)
        spare = min(free - want - self.unheld[group], capacity - self.reserved[group] - to_reserve)
        return spare >= (watermark * capacity if kind.grows else 0)

    def withheld(self, group: int, request: Request) -> int:
        """Number of free blocks that this running request may not take, because they are reserved for guaranteed
        requests."""
        return 0 if request.is_guaranteed else self.unheld[group]

    def update(self, group: int, request: Request) -> bool:
        """Update the request's reservation after its table or its number of uncomputed tokens has changed.

        A guaranteed request reserves the blocks that it holds, and the blocks that its window and its next step need.
        (The next step computes the rest of the known tokens; later steps compute one token.) Returns whether other
        requests may take more blocks than before.
        """
        kind = self._layout.kinds[group]
        if not kind.releases or not request.is_guaranteed:
            return False
        num_held = len(request.block_ids[group]) - request.num_out_of_reach[group]
        step = min(self._layout.max_step_tokens, request.num_tokens - request.num_computed_tokens)
        remaining = kind.num_entries(request.limit) - len(request.block_ids[group])
        unheld = max(0, min(remaining, kind.max_entries(request.limit, step) - num_held))
        return self.reserve(group, request, num_held + unheld, unheld)

    def reserve(self, group: int, request: Request, reserved: int, unheld: int) -> bool:
        """Reserve ``reserved`` blocks for the request, of which it does not hold ``unheld`` blocks now. Returns whether
        other requests may take more blocks than before."""
        before = request.reserved[group]
        self.reserved[group] += reserved - before[0]
        self.unheld[group] += unheld - before[1]
        request.reserved[group] = reserved, unheld
        return reserved < before[0] or unheld < before[1]
