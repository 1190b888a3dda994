"""Leases that clients ask for, such as those of ``cache_control`` in Anthropic's API."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from chairlift.base.turn_cache import TurnCache
from chairlift.core.kv_cache.eviction.leases import Lease, LeaseOrder
from chairlift.core.kv_cache.eviction.lru import LRU
from chairlift.core.kv_cache.eviction.rule import LeaseCounts, Prices
from chairlift.core.kv_cache.eviction.turns import path_of
from chairlift.core.request import Request

__all__ = ["ASKED_LEVEL", "AskedLeases", "AskedRule"]

ASKED_LEVEL: Final = 3
"""Level of leases that clients ask for, above the retention levels of classes. Leases of pauses have the same level. So
of two leases of a block the longer one holds, and the end of a pause takes nothing from its client."""


class AskedLeases:
    """The leases that a request asks for, counted from ``now``. A lease covers whole blocks only."""

    def __init__(self, request: Request, prices: Prices, now: float) -> None:
        unit = max(prices.block_size, prices.share_unit)
        self._ends = [(num_tokens // unit * unit, seconds) for num_tokens, seconds in request.service.leases]
        self._payer = request.service.payer
        self._prices = prices
        self._now = now

    def of(self, group: int, index: int) -> Lease | None:
        """The longest lease of block ``index`` in a cache group; None if no lease covers it."""
        end = (index + 1) * self._prices.block_size
        asked = [seconds for last, seconds in self._ends if end <= last and self._prices.is_needed(group, index, last)]
        if not asked:
            return None
        seconds = max(asked)
        return Lease(ASKED_LEVEL, self._now + seconds, self._payer, seconds=seconds)


class AskedRule(LRU):
    """The blocks of a prompt for which its client asks for a lease have it from their last use on. Everything else is
    evicted as by :class:`~chairlift.core.kv_cache.eviction.lru.LRU`.
    """

    name = "asked"
    marks = True

    def __init__(self) -> None:
        super().__init__()
        self.orders: list[LeaseOrder] = []

    def order(self, capacity: int) -> LeaseOrder:
        self.orders.append(LeaseOrder(capacity, self))
        return self.orders[-1]

    def leases(self) -> LeaseCounts:
        levels = range(1, ASKED_LEVEL + 1)
        num_by_level = {level: sum(order.num_by_level[level] for order in self.orders) for level in levels}
        ended = sum((order.num_ended for order in self.orders), Counter[TurnCache]())
        return LeaseCounts(num_by_level, sum(order.limit for order in self.orders), ended)

    def releasing(self, request: Request) -> None:
        if not request.service.leases:
            return
        asked = AskedLeases(request, self.prices, self.now)
        for index, node in path_of(request.last_node):
            for group, block in enumerate(node.blocks):
                if block is not None and (lease := asked.of(group, index)) is not None:
                    self.orders[group].lease(block, lease)

    def leaving(self, request: Request, group: int, entries: Sequence[tuple[int, int]]) -> None:
        """Give the blocks that a sliding window passes their lease. All others have it already."""
        if not request.service.leases:
            return
        asked = AskedLeases(request, self.prices, self.now)
        for first, block in entries:
            if (lease := asked.of(group, first // self.prices.block_size)) is not None:
                self.orders[group].lease(block, lease)
