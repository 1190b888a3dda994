"""The least recently used block is evicted first."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from chairlift.base.turn_cache import ResumedTurn, TurnCache
from chairlift.core.kv_cache.eviction.gaps import Gaps
from chairlift.core.kv_cache.eviction.rule import BlockOrder, LeaseCounts, Prices
from chairlift.core.kv_cache.eviction.turns import EndedTurn, EndedTurns
from chairlift.core.kv_cache.prefix_node import PrefixNode
from chairlift.core.request import Request

__all__ = ["LRU", "LRUOrder"]


class LRUOrder:
    """Blocks in the order in which they were released."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self.remove = self._blocks.__delitem__

    def add(self, block: int) -> None:
        self._blocks[block] = None

    def pop(self) -> int:
        return self._blocks.popitem(last=False)[0]

    def forget(self, block: int) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def check_invariants(self) -> None:
        pass


class LRU:
    """Base class of rules. Request and class of service make no difference here.

    The rule also notes which conversations pause while a tool runs, and what the pause left of their cache. This costs
    nothing while no answer calls tools. A subclass may act on it in :meth:`began` and :meth:`resumed`.
    """

    name = "lru"
    marks = False

    def __init__(self) -> None:
        self.prices = Prices()
        self.now = 0.0
        self.gaps = Gaps()
        self.turns = EndedTurns()
        self.num_pauses = self.num_leases = self.num_returns = 0
        """Counters: turns that ended with calls of tools, those of them that got a lease, and those whose next turn
        came."""
        self.found: Counter[TurnCache] = Counter()
        """What a next turn found of the cache -> number of such turns. They are counted when they join."""

    def order(self, capacity: int) -> BlockOrder:
        return LRUOrder()

    def releasing(self, request: Request) -> None:
        pass

    def leaving(self, request: Request, group: int, entries: Sequence[tuple[int, int]]) -> None:
        pass

    def ended(self, request: Request) -> None:
        self.turns.add(request, self.now)

    def paused(self, request_id: str, tools: Sequence[str]) -> EndedTurn | None:
        turn = self.turns.pause(request_id, tools, self.prices.block_size) if tools else None
        if turn is not None:
            self.num_pauses += 1
            self.began(turn)
        return turn

    def arrived(self, request: Request, keys: Iterable[bytes]) -> None:
        turn = self.turns.arrived(request, keys)
        if turn is None:
            return
        self.num_returns += 1
        if request.arrival_time >= turn.ended_at:  # the clock was not set back
            self.gaps.observe(turn.tenant, turn.tools, request.arrival_time - turn.ended_at)
        self.returned(turn, request)

    def joining(self, request: Request, path: Sequence[PrefixNode]) -> None:
        turn = self.turns.joined(request.request_id)
        if turn is None:
            return
        unit = max(1, self.prices.share_unit // self.prices.block_size)
        most = (len(request.token_ids) - 1) // self.prices.block_size
        is_kept = len(path) >= min(turn.num_matched, most) // unit * unit
        how = self.resumed(turn, path)
        found = TurnCache.KEPT if is_kept else how
        self.found[found] += 1
        request.resumed = ResumedTurn(turn.request_id, turn.tools, request.arrival_time - turn.ended_at, found)

    def leases(self) -> LeaseCounts | None:
        return None

    # -- what a subclass may do with a turn ----------------------------------------------------------------------------

    def began(self, turn: EndedTurn) -> None:
        """The pause of a turn has begun. Here its nodes are forgotten, so that evicted ones are freed."""
        turn.forget_path()

    def returned(self, turn: EndedTurn, request: Request) -> None:
        """The next turn has arrived."""

    def resumed(self, turn: EndedTurn, path: Sequence[PrefixNode]) -> TurnCache:
        """The next turn is about to use the blocks of ``path``. Returns how the turn would have lost its cache."""
        return TurnCache.NO_LEASE
