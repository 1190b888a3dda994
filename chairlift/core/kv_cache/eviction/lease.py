"""The rule of eviction with leases: a conversation keeps its blocks while its tool runs.

The length of a lease follows from the pauses after calls of the same tools, as in Continuum (arXiv 2511.02230), and
from what the blocks would save otherwise. Unlike Continuum's pins, a lease never keeps a request waiting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from chairlift.base.turn_cache import TurnCache
from chairlift.core.kv_cache.eviction.asked import ASKED_LEVEL, AskedRule
from chairlift.core.kv_cache.eviction.gaps import best_hold
from chairlift.core.kv_cache.eviction.leases import Lease
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
_FEW_PAUSES: Final = 16
"""Number of pauses of a tool below which those that have not ended are counted, too. The short ones end first, so the
first ones that are known are too short."""
_LONG_PAUSE: Final = 2.0
"""Seconds from which on a pause is long enough to give up blocks that files have."""
_LONG_LOADS: Final = 10
"""The same as a multiple of the time of the load."""
_EARLY: Final = 0.9
"""Part of the shortest usual pause after which such blocks come back."""
_MOST_LIFETIMES: Final = 2
"""Longest lease after calls of unknown tools, in lifetimes of an ordinary block. (If other blocks are worth as much as
these, holding them for one lifetime costs what they save.)"""
_SECONDS_PER_TOKEN: Final = 0.001
"""Price of a computed token while the costs are not known."""


class LeaseRule(AskedRule):
    """A turn that ends with calls of tools begins a pause: its blocks get a lease until the next turn probably arrives.
    A request whose class has a retention level leaves its blocks with a lease of this level, which does not end.
    Everything else is evicted as by :class:`~chairlift.core.kv_cache.eviction.asked.AskedRule`.

    A subclass may choose other leases in :meth:`hold`.
    """

    name = "lease"

    def __init__(self) -> None:
        super().__init__()
        self._saved = 0.0
        """Seconds that hits saved in blocks that were soon to be evicted. Older hits count less."""
        self._saved_at = -math.inf
        self.num_fetched = self.num_fetched_used = 0
        """Counters: pauses before whose end blocks were read from files, and those of them after which all blocks were
        there."""
        self.given_up: list[EndedTurn] = []
        """Turns whose blocks can be evicted until :attr:`EndedTurn.due`, because files have them. The engine replaces
        the list."""

    # -- requests ------------------------------------------------------------------------------------------------------

    def leaving(self, request: Request, group: int, entries: Sequence[tuple[int, int]]) -> None:
        if request.retention:
            lease = Lease(request.retention, tenant=request.service.tenant)
            for _, block in entries:
                self.orders[group].lease(block, lease)
        super().leaving(request, group, entries)

    def began(self, turn: EndedTurn) -> None:
        turn.due = self.due(turn)
        if turn.due:
            self.given_up.append(turn)
        else:
            self.keep(turn)

    def keep(self, turn: EndedTurn) -> None:
        """Give the blocks of a turn that called tools a lease, if that pays."""
        seconds = self.hold(turn)
        if turn.ended_at + seconds > self.now:
            self.num_leases += not turn.until
            self._lease(turn, turn.ended_at + seconds, turn.ended_at + self.pause(turn, seconds))

    def returned(self, turn: EndedTurn, request: Request) -> None:
        if turn.until or turn.due:
            until = max(turn.until, self.now + _QUEUE_SECONDS, request.arrival_time + _QUEUE_SECONDS)
            self._lease(turn, until, self.now)

    def joining(self, request: Request, path: Sequence[PrefixNode]) -> None:
        self._count_saved(path)
        super().joining(request, path)

    def resumed(self, turn: EndedTurn, path: Sequence[PrefixNode]) -> TurnCache:
        self.num_fetched_used += turn.is_fetched and turn.keys[0] in {node.key for node in path}
        self._release_branch(turn, {id(node) for node in path})
        ends = [how for order in self.orders if (how := order.how_ended(turn.number)) is not None]
        if ends:
            return ends[0]
        return TurnCache.EXPIRED if turn.until else TurnCache.NO_LEASE

    # -- leases --------------------------------------------------------------------------------------------------------

    def hold(self, turn: EndedTurn) -> float:
        """Seconds from the end of a turn that called tools until its lease ends; 0 for no lease."""
        num_blocks = turn.num_tokens // self.prices.block_size
        gaps = self.pauses_of(turn)
        seconds = best_hold(gaps, self.saving(turn), self.price() * num_blocks)
        return seconds if gaps else min(seconds, _MOST_LIFETIMES * self.orders[0].lifetime)

    def due(self, turn: EndedTurn) -> float:
        """Time at which the blocks of a turn should be in the cache again, if its pause is so long that they should be
        evicted meanwhile; otherwise 0. It is shortly before the first tenth of the pauses has ended."""
        load = self.prices.load_seconds
        gaps = self.pauses_of(turn)
        if load is None or not gaps:
            return 0.0
        seconds = load(turn.num_tokens)
        first = gaps[len(gaps) // 10]
        if self._compute_seconds(turn.num_tokens) <= seconds or first < max(_LONG_PAUSE, _LONG_LOADS * seconds):
            return 0.0
        return turn.ended_at + _EARLY * first - 2 * seconds

    def pauses_of(self, turn: EndedTurn) -> list[float]:
        """Seconds of pauses after calls of the turn's tools, ascending; empty if none is known. While few are known, a
        pause that has not ended counts as one that takes as long again."""
        gaps = self.gaps.of(turn.tenant, turn.tools)
        if 0 < len(gaps) < _FEW_PAUSES:
            same = turn.tenant, turn.tools
            others = [each for each in self.turns.paused if (each.tenant, each.tools) == same and not each.next_id]
            gaps = sorted(gaps + [2 * (self.now - each.ended_at) for each in others if each is not turn])
        return gaps

    def saving(self, turn: EndedTurn) -> float:
        """Seconds that the next turn saves if all blocks of this turn are still there: the time to compute or to load
        them, whichever is shorter."""
        load = self.prices.load_seconds
        seconds = self._compute_seconds(turn.num_tokens)
        return seconds if load is None else min(seconds, load(turn.num_tokens))

    def _compute_seconds(self, num_tokens: int) -> float:
        compute = self.prices.compute_seconds
        return num_tokens * _SECONDS_PER_TOKEN if compute is None else compute(num_tokens, 0)

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
            seconds = self._compute_seconds(old * self.prices.block_size)
            passed = max(0.0, self.now - self._saved_at)
            self._saved = self._saved * math.exp(-passed / _MEMORY_SECONDS) + seconds
            self._saved_at = self.now

    def pause(self, turn: EndedTurn, hold: float) -> float:
        """Seconds from the end of a turn until its next turn probably arrives. ``hold`` is the length of the lease."""
        gaps = self.pauses_of(turn)
        return gaps[len(gaps) // 2] if gaps else hold

    def _lease(self, turn: EndedTurn, until: float, expected: float) -> None:
        """Give the blocks of a turn that its next turn needs a lease, the last block first."""
        turn.until = until
        lease = Lease(_PAUSE_LEVEL, until, turn.tenant, turn.number, expected)
        for index, node in path_of(turn.node):
            for group, block in enumerate(node.blocks):
                if block is not None and self.prices.is_needed(group, index, turn.num_tokens):
                    self.orders[group].lease(block, lease)

    def _release_branch(self, turn: EndedTurn, kept: set[int]) -> None:
        """End the lease of the blocks that the next turn does not have, up to the first one that others continue. If
        there is none, also of those that it is about to use; blocks that other turns lease keep their lease."""
        for _, node in path_of(turn.node):
            if id(node) not in kept and node.num_children > (node is not turn.node):
                return
            for group, block in enumerate(node.blocks):
                if block is not None:
                    self.orders[group].end(block, turn.number)
