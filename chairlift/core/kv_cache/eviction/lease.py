"""The rule of eviction with leases: a conversation keeps its blocks while its tool runs.

The length of a lease follows from the pauses after calls of the same tools, as in Continuum (arXiv 2511.02230), and
from what the blocks would save otherwise. Unlike Continuum's pins, a lease never keeps a request waiting.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Final

from chairlift.base.turn_cache import TurnCache
from chairlift.core.kv_cache.eviction.asked import ASKED_LEVEL, AskedLeases
from chairlift.core.kv_cache.eviction.gaps import best_hold
from chairlift.core.kv_cache.eviction.leases import Lease, LeaseOrder
from chairlift.core.kv_cache.eviction.lru import LRU
from chairlift.core.kv_cache.eviction.rule import LeaseCounts
from chairlift.core.kv_cache.eviction.turns import EndedTurn, path_of
from chairlift.core.kv_cache.prefix_node import PrefixNode
from chairlift.core.request import Request

__all__ = ["LeaseRule"]

_PAUSE_LEVEL: Final = ASKED_LEVEL
"""Level of the leases of pauses, above the retention levels of classes."""
_QUEUE_SECONDS: Final = 60.0
"""Seconds for which the blocks of a conversation are kept when its next turn has arrived and waits."""
_MEMORY_SECONDS: Final = 60.0
"""Time constant of the price of blocks."""
_MOST_LIFETIMES: Final = 2
"""Longest lease after calls of unknown tools, in lifetimes of an ordinary block. (If other blocks are worth as much as
these, holding them for one lifetime costs what they save.)"""
_SECONDS_PER_TOKEN: Final = 0.001
"""Price of a computed token while the costs are not known."""


class LeaseRule(LRU):
    """A turn that ends with calls of tools begins a pause: its blocks get a lease until the next turn probably arrives.
    The blocks of a prompt for which its client asks for a lease have it from their last use on.
    A request whose class has a retention level leaves its blocks with a lease of this level, which does not end.
    Everything else is evicted as by :class:`~chairlift.core.kv_cache.eviction.lru.LRU`.

    A subclass may choose other leases in :meth:`hold`.
    """

    name = "lease"
    marks = True

    def __init__(self) -> None:
        super().__init__()
        self.orders: list[LeaseOrder] = []
        self._saved = 0.0
        """Seconds that hits saved in blocks that were soon to be evicted. Older hits count less."""
        self._saved_at = -math.inf

    def order(self, capacity: int) -> LeaseOrder:
        self.orders.append(LeaseOrder(capacity, self))
        return self.orders[-1]

    def leases(self) -> LeaseCounts:
        levels = range(1, _PAUSE_LEVEL + 1)
        num_by_level = {level: sum(order.num_by_level[level] for order in self.orders) for level in levels}
        ended = sum((order.num_ended for order in self.orders), Counter[TurnCache]())
        return LeaseCounts(num_by_level, sum(order.limit for order in self.orders), ended)

    # -- requests ------------------------------------------------------------------------------------------------------

    def releasing(self, request: Request) -> None:
        if not request.service.leases:
            return
        asked = AskedLeases(request, self.prices, self.now)
        for index, node in path_of(request.last_node):
            for group, block in enumerate(node.blocks):
                if block is not None and (lease := asked.of(group, index)) is not None:
                    self.orders[group].lease(block, lease)

    def leaving(self, request: Request, group: int, entries: Sequence[tuple[int, int]]) -> None:
        if request.retention:
            lease = Lease(request.retention, tenant=request.service.tenant)
            for _, block in entries:
                self.orders[group].lease(block, lease)
        if request.service.leases:  # for blocks that a sliding window passes; all others have their lease already
            asked = AskedLeases(request, self.prices, self.now)
            for first, block in entries:
                if (found := asked.of(group, first // self.prices.block_size)) is not None:
                    self.orders[group].lease(block, found)

    def began(self, turn: EndedTurn) -> None:
        seconds = self.hold(turn)
        if seconds > 0:
            self.num_leases += 1
            self._lease(turn, turn.ended_at + seconds)

    def returned(self, turn: EndedTurn, request: Request) -> None:
        if turn.until:
            self._lease(turn, max(turn.until, self.now + _QUEUE_SECONDS, request.arrival_time + _QUEUE_SECONDS))

    def joining(self, request: Request, path: Sequence[PrefixNode]) -> None:
        self._count_saved(path)
        super().joining(request, path)

    def resumed(self, turn: EndedTurn, path: Sequence[PrefixNode]) -> TurnCache:
        self._release_branch(turn, {id(node) for node in path})
        ends = [how for order in self.orders if (how := order.how_ended(turn.number)) is not None]
        if ends:
            return ends[0]
        return TurnCache.EXPIRED if turn.until else TurnCache.NO_LEASE

    # -- leases --------------------------------------------------------------------------------------------------------

    def hold(self, turn: EndedTurn) -> float:
        """Seconds from the end of a turn that called tools until its lease ends; 0 for no lease."""
        num_blocks = turn.num_tokens // self.prices.block_size
        gaps = self.gaps.of(turn.tenant, turn.tools)
        seconds = best_hold(gaps, self.saving(turn), self.price() * num_blocks)
        return seconds if gaps else min(seconds, _MOST_LIFETIMES * self.orders[0].lifetime)

    def saving(self, turn: EndedTurn) -> float:
        """Seconds that the next turn saves if all blocks of this turn are still there: the time to compute or to load
        them, whichever is shorter."""
        compute = self.prices.compute_seconds
        seconds = turn.num_tokens * _SECONDS_PER_TOKEN if compute is None else compute(turn.num_tokens, 0)
        load = self.prices.load_seconds
        return seconds if load is None else min(seconds, load(turn.num_tokens))

    def price(self) -> float:
        """Seconds that others lose per second for which one block is kept from them.

        A block that is kept shortens the queue of ordinary blocks by one. What this costs is seen from the hits in the
        older half of the queue: those blocks would have been evicted if the queue were half as long.
        """
        order = self.orders[0]
        if self.now - order.evicted_at > _MEMORY_SECONDS:  # there is room for all
            return 0.0
        saved = self._saved * math.exp((self._saved_at - self.now) / _MEMORY_SECONDS)
        return saved / _MEMORY_SECONDS / max(1.0, order.num_ordinary / 2)

    def _count_saved(self, path: Sequence[PrefixNode]) -> None:
        if not path:  # models without KV have no order
            return
        order = self.orders[0]
        if self.now - order.evicted_at > _MEMORY_SECONDS:
            return
        old = sum(order.is_old(block) for node in path if (block := node.blocks[0]) is not None)
        if old:
            tokens = old * self.prices.block_size
            compute = self.prices.compute_seconds
            seconds = tokens * _SECONDS_PER_TOKEN if compute is None else compute(tokens, 0)
            passed = max(0.0, self.now - self._saved_at)
            self._saved = self._saved * math.exp(-passed / _MEMORY_SECONDS) + seconds
            self._saved_at = self.now

    def _lease(self, turn: EndedTurn, until: float) -> None:
        """Give the blocks of a turn that its next turn needs a lease, the last block first."""
        turn.until = until
        lease = Lease(_PAUSE_LEVEL, until, turn.tenant, turn.number)
        for index, node in path_of(turn.node):
            for group, block in enumerate(node.blocks):
                if block is not None and self.prices.is_needed(group, index, turn.num_tokens):
                    self.orders[group].lease(block, lease)

    def _release_branch(self, turn: EndedTurn, kept: set[int]) -> None:
        """End the lease of the blocks that the next turn does not have, up to the first one that others continue."""
        for _, node in path_of(turn.node):
            if id(node) in kept or node.num_children > (node is not turn.node):
                return
            for group, block in enumerate(node.blocks):
                if block is not None:
                    self.orders[group].end(block, turn.number)
