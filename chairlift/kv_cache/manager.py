"""Block tables of all requests over a list of cache groups.

A *group* is a set of layers that keep the same positions: ``full`` keeps all of them, ``window(W)`` the last W. Every
group has a pool of its own; a request has one table per group.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from chairlift.config import CacheGroup
from chairlift.errors import ConfigError, InvariantError
from chairlift.kv_cache.block_pool import NULL_BLOCK, BlockPool
from chairlift.kv_cache.prefix_cache import NEVER, PrefixCache, PrefixNode
from chairlift.request import Request, RequestStatus

__all__ = ["Admission", "BlockCounts", "KVCacheManager", "NewBlocks"]


_NO_LIMIT = 1 << 40


@dataclasses.dataclass(frozen=True, slots=True)
class NewBlocks:
    """Blocks appended to one table, from entry ``first`` on."""

    group: int
    first: int
    block_ids: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """What a request starts with."""

    num_computed_tokens: int
    """Leading positions whose KV is already there."""
    copies: list[tuple[int, int, int]]
    """(group, source block, destination block) to copy before the step's first write."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks of all groups together: ``free + used + cached`` is the whole."""

    free: int
    used: int
    cached: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Shared:
    """Leading positions whose KV somebody else computed: along a prefix-cache path, or in a fork's source."""

    num_tokens: int
    path: list[PrefixNode] = dataclasses.field(default_factory=list)
    source: Request | None = None


class KVCacheManager:
    """Gives blocks to requests and takes them back. Raises InvariantError from ``check_invariants`` only.

    ``max_step_tokens`` is the most tokens one step computes for one request: a window group must hold a window and a
    step of new tokens at once.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        block_size: int,
        *,
        max_step_tokens: int,
        enable_prefix_caching: bool = True,
        secret: bytes = b"",
        hash_function: Callable[[bytes], bytes] | None = None,
    ) -> None:
        if block_size not in {1, 2, 4, 8, 16, 32, 64, 128, 256}:
            raise ConfigError(f"block_size must be a power of two from 1 to 256, got {block_size}")
        if not groups:
            raise ConfigError("a KV cache needs at least one cache group")
        self.groups = tuple(groups)
        self.block_size = block_size
        self.max_step_tokens = max_step_tokens
        self.pools = [BlockPool(group.num_blocks) for group in groups]
        seam = {} if hash_function is None else {"hash_function": hash_function}
        self.prefix_cache = PrefixCache(block_size, self.pools, secret, **seam) if enable_prefix_caching else None
        self.held_blocks = 0
        """Table entries of all requests, shared ones counted once per table."""
        self._deferred: deque[tuple[int, int, list[int]]] = deque()  # (last step that reads them, group, blocks)
        self._num_deferred = [0] * len(self.pools)
        self._done_step = -1
        self._num_changes = 0  # counts what may let a request in that did not fit: blocks given back, blocks published

    # -- sizes ---------------------------------------------------------------------------------------------------

    def blocks_for(self, group: int, num_tokens: int) -> int:
        """The most blocks a request of ``num_tokens`` positions ever holds at once in ``group``."""
        whole = -(-num_tokens // self.block_size)
        window = self.groups[group].window
        if window is None:
            return whole
        return min(whole, -(-(window - 1 + self.max_step_tokens) // self.block_size) + 1)

    def fits_when_empty(self, num_tokens: int) -> bool:
        """Whether a request of this many positions could be served if it had the whole cache to itself."""
        return all(self.blocks_for(g, num_tokens) <= pool.capacity for g, pool in enumerate(self.pools))

    @property
    def capacity_tokens(self) -> int:
        """The most positions one request alone can have; a window group large enough for its window sets no limit."""
        limits = [
            pool.capacity * self.block_size
            for group, pool in enumerate(self.pools)
            if self.groups[group].window is None or self.blocks_for(group, _NO_LIMIT) > pool.capacity
        ]
        return min(limits, default=_NO_LIMIT)

    def counts(self) -> BlockCounts:
        free = sum(pool.num_free for pool in self.pools)
        cached = sum(pool.num_cached for pool in self.pools)
        return BlockCounts(free - cached, sum(pool.num_used for pool in self.pools), cached)

    # -- life of a table -----------------------------------------------------------------------------------------

    def admit(self, request: Request, reserve: int, watermark: float = 0.0, *, share: bool = True) -> Admission | None:
        """Give the request blocks for its first ``reserve`` positions, or nothing at all.

        Blocks come from the request it forks from (``n > 1``), from the prefix cache, or from the free list.
        ``watermark`` is the share of each pool that must stay free afterwards. ``share=False`` gives the request
        blocks of its own only. None when it does not fit now.
        """
        if request.refused_at == (self._num_changes, reserve):
            return None  # as before: no need to hash its whole prompt again
        shared = self._find_shared(request) if share and request.may_share else _Shared(0)
        known = shared.num_tokens
        tables: list[list[int]] = []
        wants: list[int] = []
        for group, pool in enumerate(self.pools):
            table = self._shared_table(group, shared)
            idle = sum(1 for block in table if block != NULL_BLOCK and pool.ref_counts[block] == 0)
            want = self._admission_blocks(group, known, reserve) - len(table)
            if pool.num_free - idle - want < watermark * pool.capacity:
                request.refused_at = (self._num_changes, reserve)
                return None
            tables.append(table)
            wants.append(want)
        copies: list[tuple[int, int, int]] = []
        for group, (pool, table, want) in enumerate(zip(self.pools, tables, wants, strict=True)):
            for block in table:
                if block != NULL_BLOCK:
                    pool.share(block)
            tail = len(table)
            table.extend(self._take(group, want))
            if shared.source is not None and known % self.block_size:
                copies.append((group, shared.source.block_ids[group][tail], table[tail]))
            self.held_blocks += len(table)
        request.block_ids = tables
        request.num_out_of_reach = [self._first_in_reach(group, known) for group in range(len(tables))]
        path = shared.path[: known // self.block_size]
        request.num_published = len(path) if share else NEVER
        request.last_node = path[-1] if path else None
        return Admission(known, copies)

    def extend(self, request: Request, num_tokens: int, in_flight: int) -> list[NewBlocks] | None:
        """Make room for the request's first ``num_tokens`` positions, giving back what a window has left behind.

        ``in_flight`` is the last step that was scheduled before this one. None when a pool is short; nothing is
        taken then.
        """
        wants: list[int] = []
        for group, pool in enumerate(self.pools):
            if self.groups[group].window is not None:
                self._leave_behind(group, request, in_flight)
            want = max(0, -(-num_tokens // self.block_size) - len(request.block_ids[group]))
            if want > pool.num_free:
                return None
            wants.append(want)
        grown = []
        for group, want in enumerate(wants):
            if want:
                table = request.block_ids[group]
                first = len(table)
                table.extend(self._take(group, want))
                self.held_blocks += want
                grown.append(NewBlocks(group, first, table[first:]))
        return grown

    def missing(self, request: Request, num_tokens: int) -> bool:
        """Whether :meth:`extend` will still fail when every deferred release has happened."""
        return any(
            -(-num_tokens // self.block_size) - len(request.block_ids[group])
            > pool.num_free + self._num_deferred[group]
            for group, pool in enumerate(self.pools)
        )

    def free(self, request: Request, in_flight: int) -> None:
        """Take all blocks of the request back, after step ``in_flight``, the last one that may read or write them.

        The end of the table goes first, so that the prefix cache keeps the beginnings, which more requests share.
        """
        for group, table in enumerate(request.block_ids):
            self.held_blocks -= len(table)
            self._release(group, [block for block in reversed(table) if block != NULL_BLOCK], in_flight)
        request.block_ids = []
        request.num_out_of_reach = []
        request.num_published = 0
        request.last_node = None

    def publish(self, request: Request, num_confirmed: int) -> None:
        """Let others share the request's full blocks among its first ``num_confirmed`` positions."""
        if self.prefix_cache is not None and num_confirmed // self.block_size > request.num_published:
            self._num_changes += 1
            self.prefix_cache.publish(request, num_confirmed)

    def forget(self, request: Request) -> None:
        """The request failed: nothing that stands in its blocks may be shared any more."""
        if self.prefix_cache is not None:
            self.prefix_cache.forget(request)

    def step_done(self, step: int) -> None:
        """Step ``step`` has run: what waited for it is released."""
        self._done_step = max(self._done_step, step)
        while self._deferred and self._deferred[0][0] <= step:
            _, group, blocks = self._deferred.popleft()
            self._num_deferred[group] -= len(blocks)
            self._num_changes += 1
            for block in blocks:
                self.pools[group].release(block)

    # -- inside --------------------------------------------------------------------------------------------------

    def _find_shared(self, request: Request) -> _Shared:
        """How many leading positions can be shared, and with whom."""
        known, path = 0, []
        if self.prefix_cache is not None:
            path = self.prefix_cache.walk(request, (len(request.token_ids) - 1) // self.block_size)
            known = self._agreed(path) * self.block_size
        source = request.source
        forked = request.num_prompt_tokens - 1
        if source is not None and forked > known and self._can_fork(source, forked):
            return _Shared(forked, path, source)
        return _Shared(known, path)

    def _can_fork(self, source: Request, forked: int) -> bool:
        """Whether ``source`` still has the KV that a continuation of its first ``forked`` tokens attends to."""
        # A token since it was admitted proves that its prompt was computed by a step before this one.
        if source.status is not RequestStatus.RUNNING or len(source.token_ids) <= source.progress_mark:
            return False
        end = -(-forked // self.block_size)
        return all(
            NULL_BLOCK not in table[self._first_in_reach(group, forked) : end]
            for group, table in enumerate(source.block_ids)
        )

    def _agreed(self, path: list[PrefixNode]) -> int:
        """The most leading blocks of ``path`` that every group still has as far as it needs them."""
        hit = len(path)
        for group, cache_group in enumerate(self.groups):
            if cache_group.window is None:
                hit = next((i for i, node in enumerate(path[:hit]) if node.blocks[group] is None), hit)
        while hit and not all(
            node.blocks[group] is not None
            for group in range(len(self.groups))
            for node in path[self._first_in_reach(group, hit * self.block_size) : hit]
        ):
            hit -= 1
        return hit

    def _shared_table(self, group: int, shared: _Shared) -> list[int]:
        """The full blocks of the shared positions; the null block where a window has passed."""
        num_full = shared.num_tokens // self.block_size
        first = self._first_in_reach(group, shared.num_tokens)
        if shared.source is not None:
            blocks: Sequence[int | None] = shared.source.block_ids[group]
        else:
            blocks = [node.blocks[group] for node in shared.path]
        return [NULL_BLOCK if i < first else blocks[i] or NULL_BLOCK for i in range(num_full)]

    def _admission_blocks(self, group: int, known: int, reserve: int) -> int:
        """Entries the table has after admission."""
        whole = -(-max(reserve, known + 1) // self.block_size)
        return min(whole, self._first_in_reach(group, known) + self.blocks_for(group, reserve))

    def _first_in_reach(self, group: int, position: int) -> int:
        """The first table entry that the token at ``position`` may still attend to."""
        window = self.groups[group].window
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def _leave_behind(self, group: int, request: Request, in_flight: int) -> None:
        first = min(self._first_in_reach(group, request.num_computed_tokens), len(request.block_ids[group]))
        table = request.block_ids[group]
        passed = [i for i in range(request.num_out_of_reach[group], first) if table[i] != NULL_BLOCK]
        if passed:
            self._release(group, [table[i] for i in passed], in_flight)
            for i in passed:
                table[i] = NULL_BLOCK
        request.num_out_of_reach[group] = max(first, request.num_out_of_reach[group])

    def _take(self, group: int, count: int) -> list[int]:
        pool = self.pools[group]
        taken = []
        for _ in range(count):
            block, evicted = pool.allocate()
            if evicted is not None and self.prefix_cache is not None:
                self.prefix_cache.evicted(group, evicted)
            taken.append(block)
        return taken

    def _release(self, group: int, blocks: list[int], in_flight: int) -> None:
        if in_flight <= self._done_step:
            self._num_changes += 1
            for block in blocks:
                self.pools[group].release(block)
        elif blocks:
            self._deferred.append((in_flight, group, blocks))
            self._num_deferred[group] += len(blocks)

    def check_invariants(self, requests: Iterable[Request]) -> None:
        """Compare every count with the tables of the live requests; raises InvariantError on the first that differs."""
        references: list[dict[int, int]] = [{} for _ in self.pools]
        held = 0
        for request in requests:
            for group, table in enumerate(request.block_ids):
                held += len(table)
                if len(table) * self.block_size < request.num_computed_tokens:
                    raise InvariantError(f"{request!r} computed beyond its {len(table)} blocks in group {group}")
                for block in table:
                    if block != NULL_BLOCK:
                        references[group][block] = references[group].get(block, 0) + 1
                first = self._first_in_reach(group, request.num_computed_tokens)
                if any(block == NULL_BLOCK for block in table[first:]):
                    raise InvariantError(f"{request!r} has the null block within reach in group {group}")
                tail = request.num_computed_tokens // self.block_size
                self._check_writable(group, request, table[tail:])
        for _, group, blocks in self._deferred:
            for block in blocks:
                references[group][block] = references[group].get(block, 0) + 1
        for pool, named in zip(self.pools, references, strict=True):
            pool.check_invariants(named)
        if held != self.held_blocks:
            raise InvariantError(f"block tables hold {held} entries, but {self.held_blocks} are counted")
        if self.prefix_cache is not None:
            self.prefix_cache.check_invariants()

    def _check_writable(self, group: int, request: Request, tail: list[int]) -> None:
        """What a request is still going to write must be its own and unknown to the prefix cache."""
        pool = self.pools[group]
        for block in tail:
            if pool.ref_counts[block] != 1 or pool.nodes[block] is not None:
                raise InvariantError(
                    f"{request!r} is about to write block {block} of group {group}, which others can read"
                )
