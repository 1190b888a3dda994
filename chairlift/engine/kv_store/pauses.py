"""Conversations that pause, on an engine whose KV blocks are also in files.

The rule of eviction gives up the blocks of a long pause at once, because loading them costs little (see
:mod:`chairlift.core.kv_cache.eviction.lease`). Two things are done for such a pause here. At its begin, blocks that
were not written yet are written before others. Shortly before the first of such pauses usually end, the blocks that
were evicted are read back, and get a lease. (CachedAttention, USENIX ATC 2024, and KVFlow fetch by the order of a
queue; here only the pauses of the tool are known.)

A fetch has no rights. It takes blocks within the budget of leases, and displaces no lease. It reads a few blocks at a
time, and none while a request waits for its own. Requests can take its blocks like any other unused ones. A fetch that
was wrong has read some bytes, and is counted.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import weakref
from collections import deque
from typing import Any, Final

from chairlift.core.kv_cache.eviction.lease import LeaseRule
from chairlift.core.kv_cache.eviction.turns import EndedTurn, path_of
from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.kv_cache.prefix_node import PrefixNode
from chairlift.core.kv_cache.stored import find_missing_of, restore_path
from chairlift.core.request import Request
from chairlift.engine.clock import POLL_SECONDS, Clock
from chairlift.engine.kv_blocks import KVBlocks
from chairlift.engine.kv_store.store import BlockLoad, KVStore

__all__ = ["KVPauses"]

_PIECE_BYTES: Final = 8 << 20
"""Number of bytes that are read at once, so that a request waits little for its own blocks; also the number that is
copied for writing between two steps."""
_RETRY_SECONDS: Final = 0.25
"""Seconds until a fetch for which there was no room is tried again."""
_MOST_WRITES: Final = 8192
"""Number of blocks of pauses that may wait to be written."""


@dataclasses.dataclass(slots=True)
class _Fetch:
    """A piece of a turn's blocks that is being read."""

    turn: EndedTurn
    path: list[PrefixNode]
    load: BlockLoad
    places: list[tuple[int, int]]
    """(block index, group) of each block of the load."""


class KVPauses:
    """Writes and fetches the blocks of pauses. A :class:`~chairlift.engine.preparers.Preparer` for which no request
    waits. Without a store, or with another rule of eviction than leases, it does nothing."""

    def __init__(self, blocks: KVBlocks | None = None, kv: KVCacheManager | None = None, clock: Clock | None = None):
        self._blocks = blocks
        self._kv = kv
        self._clock = clock
        self._rule: LeaseRule | None = None
        self._due: list[tuple[float, int, EndedTurn, list[PrefixNode]]] = []
        """Heap of (time, number of the turn, turn, its nodes) of the pauses whose blocks were given up."""
        self._writes: deque[PrefixNode] = deque()
        self._fetch: _Fetch | None = None
        self.num_tokens = 0
        """Number of tokens whose KV was fetched."""
        if blocks is not None and blocks.is_used and kv is not None and isinstance(kv.eviction, LeaseRule):
            self._rule = kv.eviction
            known = weakref.ref(blocks)  # the rule must not keep the engine alive
            self._rule.prices.load_seconds = lambda num_tokens: _load_seconds(known(), num_tokens)

    @property
    def _store(self) -> KVStore | None:
        return None if self._blocks is None else self._blocks.store

    def before_step(self) -> None:
        """Go on with all pauses. Called between two steps."""
        rule, clock = self._rule, self._clock
        if rule is None or clock is None or not (rule.given_up or self._writes or self._due or self._fetch):
            return
        given_up, rule.given_up = rule.given_up, []
        for turn in given_up:
            path = [node for _, node in path_of(turn.node)][::-1]
            heapq.heappush(self._due, (turn.due, turn.number, turn, path))
            self._writes += path
        while len(self._writes) > _MOST_WRITES:
            self._writes.popleft()
        self._write()
        if self._fetch is not None and not self._fetched(rule, self._fetch):
            return
        while self._fetch is None and self._due and self._due[0][0] <= clock.now():
            _, _, turn, path = heapq.heappop(self._due)
            if not turn.next_id and not self._begin(rule, turn, path):
                heapq.heappush(self._due, (clock.now() + _RETRY_SECONDS, turn.number, turn, path))

    def _write(self) -> None:
        """Hand blocks of pauses over for writing."""
        room = _PIECE_BYTES
        while self._writes and room > 0 and self._blocks is not None:
            node = self._writes[0]
            accepted = [self._blocks.put_now(group, node) for group in range(len(node.blocks))]
            if None in accepted:
                return
            room -= sum(filter(None, accepted))
            self._writes.popleft()

    def _begin(self, rule: LeaseRule, turn: EndedTurn, path: list[PrefixNode]) -> bool:
        """Begin to read blocks of a turn, or give it its lease if all are there. Returns False if it is to be tried
        again."""
        store, kv, blocks = self._store, self._kv, self._blocks
        if store is None or kv is None or blocks is None or turn.ended_at + rule.hold(turn) <= rule.now:
            return True
        missing = find_missing_of(kv, path, lambda group, key: store.find(group, key) is not None)
        if missing is None:
            rule.keep(turn)
            return True
        wanted = [sum(group == each for _, each, _ in missing.blocks) for group in range(len(kv.pools))]
        rooms = [min(order.room, pool.num_free) for order, pool in zip(rule.orders, kv.pools, strict=True)]
        if blocks.is_loading or any(count > room for count, room in zip(wanted, rooms, strict=True)):
            return False
        nbytes = 0
        piece = []
        for index, group, key in missing.blocks:
            stored = store.find(group, key)
            if stored is None or nbytes >= _PIECE_BYTES:
                break
            nbytes += blocks.block_bytes[group]
            piece.append(((index, group), stored))
        if not piece:
            return True
        load = store.load([stored for _, stored in piece])
        self._fetch = _Fetch(turn, path, load, [place for place, _ in piece])
        return True

    def _fetched(self, rule: LeaseRule, fetch: _Fetch) -> bool:
        """Put what was read into the cache. Returns False while it is being read."""
        store, kv, blocks = self._store, self._kv, self._blocks
        turn = fetch.turn
        if turn.next_id:
            fetch.load.is_cancelled = True
        if not (fetch.load.is_done or turn.next_id):
            return False
        self._fetch = None
        if store is None or kv is None or blocks is None:
            return True
        store.loaded(fetch.load)
        content = dict(zip(fetch.places, fetch.load.blocks, strict=False))
        rooms = [order.room for order in rule.orders]
        if (
            turn.next_id
            or not content
            or any(sum(group == each for _, each in content) > room for group, room in enumerate(rooms))
        ):
            return True
        last = restore_path(kv, fetch.path, content, blocks.write)
        if last is not None and last.parent is not None:
            rule.num_fetched += not turn.is_fetched
            turn.is_fetched = True
            self.num_tokens += sum(group == 0 for _, group in content) * kv.block_size
            turn.node = last
            rule.keep(turn)
            heapq.heappush(self._due, (rule.now, turn.number, turn, fetch.path))  # the next piece
        return True

    # -- the preparer --------------------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        return False

    def take_ready(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        return [], []

    def waits(self, request: Request) -> bool:
        return False

    def next_event(self, now: float) -> float | None:
        """Time at which blocks may have been read; None if none are. (While nothing else happens, nothing is evicted,
        so no time is needed for pauses alone.)"""
        return None if self._fetch is None else now + POLL_SECONDS

    def forget(self, request: Request) -> None:
        pass

    def weights_changed(self) -> None:
        """Write and fetch nothing any more, because the files belong to the old weights."""
        self._end()

    def counts(self) -> dict[str, Any]:
        rule = self._rule
        return (
            {} if rule is None else {"num_kv_fetches": rule.num_fetched, "num_kv_fetches_used": rule.num_fetched_used}
        )

    def shutdown(self) -> None:
        self._end()

    def _end(self) -> None:
        if self._fetch is not None:
            self._fetch.load.is_cancelled = True
            if self._store is not None:
                self._store.loaded(self._fetch.load)
        self._fetch = None
        self._due.clear()
        self._writes.clear()


def _load_seconds(blocks: KVBlocks | None, num_tokens: int) -> float:
    """Seconds to load the KV of a number of tokens; infinite if the files cannot be used."""
    store = None if blocks is None else blocks.store
    if blocks is None or store is None or store.stopped:
        return math.inf
    return num_tokens * blocks.bytes_per_token / store.bytes_per_second
