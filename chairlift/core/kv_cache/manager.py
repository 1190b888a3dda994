"""Admits requests to the KV cache. Their blocks are shared, new, or copied back from host memory."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from chairlift.config import CacheGroup
from chairlift.core.kv_cache.block_pool import NULL_BLOCK
from chairlift.core.kv_cache.block_tables import BlockTables
from chairlift.core.kv_cache.eviction.rule import EvictionRule
from chairlift.core.kv_cache.invariants import check_manager
from chairlift.core.kv_cache.layout import CacheLayout
from chairlift.core.kv_cache.prefix_cache import NEVER, PrefixCache
from chairlift.core.kv_cache.prefix_node import PrefixNode
from chairlift.core.kv_cache.swap import Swapped, SwapPool
from chairlift.core.kv_cache.tables import Admission, BlockCounts, NewBlocks, TableChange
from chairlift.core.request import NOT_REFUSED, Request, RequestStatus
from chairlift.core.rows.kind import whole_before
from chairlift.errors import InvariantError

__all__ = ["Admission", "BlockCounts", "KVCacheManager", "NewBlocks", "TableChange"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Shared:
    """Leading positions of a request whose KV another request computed. The blocks come from a path of prefix-cache
    nodes, or from the request ``source`` that is forked."""

    num_tokens: int
    path: list[PrefixNode] = dataclasses.field(default_factory=list)
    source: Request | None = None


_NO_LIMIT = 1 << 40


class KVCacheManager:
    """Allocates and releases the blocks of requests. Raises InvariantError for calls that a scheduler must not make.

    ``max_step_tokens`` is the maximum number of tokens that one step computes for one request. With ``prefix_offload``,
    evicted blocks of the prefix cache are saved in host blocks that no preempted request needs. ``eviction`` says which
    block of the prefix cache is evicted next (default: the least recently used).
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        block_size: int,
        *,
        max_step_tokens: int,
        enable_prefix_caching: bool = True,
        prefix_offload: bool = False,
        secret: bytes = b"",
        hash_function: Callable[[bytes], bytes] | None = None,
        eviction: EvictionRule | None = None,
    ) -> None:
        self.layout = CacheLayout(groups, block_size, max_step_tokens)
        self.block_size = block_size
        self.tables = BlockTables(self.layout, self._evicted, eviction)
        self.eviction = self.tables.eviction
        self.eviction.prices.block_size = block_size
        self.eviction.prices.share_unit = self.layout.share_unit
        self.eviction.prices.step_tokens = max_step_tokens
        self.eviction.prices.is_needed = self._is_needed
        self.pools = self.tables.pools
        self.swap_pool = SwapPool([group.num_host_blocks for group in groups])
        seam: dict[str, Any] = {} if hash_function is None else {"hash_function": hash_function}
        self.prefix_cache: PrefixCache | None = None
        if enable_prefix_caching:
            kinds = self.layout.kinds
            self.prefix_cache = PrefixCache(
                block_size, self.pools, secret, host_pool=self.swap_pool, kinds=kinds, **seam
            )
        self.prefix_offload = prefix_offload and enable_prefix_caching
        self.num_offloaded = self.num_brought_back = 0
        """Counters: evicted blocks that were copied to host memory; blocks that were copied back from there."""
        self._offloaded: list[tuple[int, int, int]] = []  # (group, block, host block) that the next step must copy
        self._scheduled_step = 0
        self.swapped: dict[str, Swapped] = {}
        """Id of a preempted request -> its KV in host memory."""

    def fits_when_empty(self, num_tokens: int) -> bool:
        """Whether a request of ``num_tokens`` positions fits if no other request uses the cache."""
        return all(self.layout.blocks_for(g, num_tokens) <= pool.capacity for g, pool in enumerate(self.pools))

    @property
    def capacity_tokens(self) -> int:
        """Maximum number of positions of a single request. A group with a sliding window sets no limit if its pool can
        hold a whole window."""
        limits = [
            pool.capacity * kind.span
            for group, (pool, kind) in enumerate(zip(self.pools, self.layout.kinds, strict=True))
            if not kind.releases or self.layout.blocks_for(group, _NO_LIMIT) > pool.capacity
        ]
        return min(limits, default=_NO_LIMIT)

    def counts(self) -> BlockCounts:
        free = sum(pool.num_free for pool in self.pools)
        cached = sum(pool.num_cached for pool in self.pools)
        used = sum(pool.num_used for pool in self.pools)
        return BlockCounts(free - cached, used, cached, sum(pool.num_shares for pool in self.pools))

    def admit(self, request: Request, reserve: int, watermark: float = 0.0, *, share: bool = True) -> Admission | None:
        """Give the request blocks for its first ``reserve`` positions. Returns None, and gives no block, if they do not
        fit now.

        Blocks are shared with the request that it forks from (``n > 1``), shared through the prefix cache, or new.
        ``watermark`` is the fraction of each pool that must stay free afterwards. With ``share=False`` all blocks are
        new.
        """
        if request.refused_at == (self.tables.num_changes, reserve, watermark):
            return None  # nothing has changed since it was refused, so it does not fit now either
        shared = self._find_shared(request) if share else _Shared(0)
        known = shared.num_tokens
        path = shared.path[: known // self.block_size]
        tables = [self._shared_table(group, shared) for group in range(len(self.pools))]
        absent = [(group, i) for group, table in enumerate(tables) for i, block in enumerate(table) if block is None]
        if (wants := self._wants(request, tables, known, reserve, watermark)) is None:
            return None
        self.eviction.joining(request, path)
        ends = [self.layout.kinds[group].last_block(i, self.block_size) for group, i in absent]
        found = [(group, i, path[end].hosts[group]) for (group, i), end in zip(absent, ends, strict=True)]
        hosts = [(group, i, host) for group, i, host in found if host is not None]
        for group, _, host in hosts:
            self.swap_pool.touch(group, host, self._scheduled_step + 1)  # so that no eviction of this step takes it
        # Blocks that come back from host memory are published together with the request's own blocks, after the step
        # that copies them has ended.
        path = path[: min(ends, default=len(path))]
        stale = (
            shared.source is not None and shared.source.num_published == NEVER
        )  # then the fork's blocks must not be published either
        self.tables.occupy(request, tables, wants, known, path if share and not stale else None)
        copies: list[tuple[int, int, int]] = []
        if shared.source is not None and known % self.block_size:
            tail = known // self.block_size
            for group, (source, table) in enumerate(zip(shared.source.block_ids, request.block_ids, strict=True)):
                copies.append((group, source[tail], table[tail]))
        self.num_brought_back += len(hosts)
        return Admission(known, copies, [(group, host, request.block_ids[group][i]) for group, i, host in hosts])

    def num_shared(self, request: Request) -> int:
        """Number of leading positions whose KV exists already, if the request joins now."""
        swapped = self.swapped.get(request.request_id)
        return self._find_shared(request).num_tokens if swapped is None else swapped.num_tokens

    def arrived(self, request: Request) -> int:
        """Note that a request waits, so that its blocks are kept. Returns the number of leading positions whose KV
        exists already."""
        if self.prefix_cache is not None and request.may_share:
            self.eviction.arrived(request, self.prefix_cache.keys(request, len(request.token_ids) // self.block_size))
        return self.num_shared(request)

    def num_common(self, request: Request, other: Request, num_tokens: int) -> int:
        """Number of leading positions of ``request`` that have the same content in ``other``, among its first
        ``num_tokens`` positions. ``request`` could share them if ``other`` had published them. 0 without a prefix
        cache."""
        if self.prefix_cache is None:
            return 0
        unit = self.layout.share_unit
        limit = min(len(request.token_ids) - 1, num_tokens) // self.block_size
        return self.prefix_cache.num_common(request, other, limit) * self.block_size // unit * unit

    def lacks(self, request: Request, reserve: int, watermark: float, leaving: Iterable[Request] = ()) -> bool:
        """Whether :meth:`admit` will still fail after all deferred releases and after the requests ``leaving`` have
        left."""
        leaving = list(leaving)
        tables = [each.block_ids for each in leaving]
        shared = _Shared(0) if request.request_id in self.swapped else self._find_shared(request)
        if any(each is shared.source for each in leaving):
            shared = _Shared(0)  # nobody forks from a request that has left
        for group, pool in enumerate(self.pools):
            counts = pool.ref_counts
            # Several that leave may share a block, and a request that stays may have it too.
            released = Counter(block for table in tables for block in table[group])
            released.update(self.tables.releases_to_come(group))
            free = pool.num_free + sum(
                counts[block] == times for block, times in released.items() if block != NULL_BLOCK
            )
            kept = sum(
                block == NULL_BLOCK or (block is not None and counts[block] > released[block])
                for block in self._shared_table(group, shared)
            )
            want = self.layout.admission_blocks(group, shared.num_tokens, reserve) - kept
            if not self.tables.reservations.fits(group, request, free, want, watermark):
                return True
        return False

    def swap_out(self, request: Request, num_tokens: int, in_flight: int) -> list[tuple[int, int, int]] | None:
        """Save the KV of the request's first ``num_tokens`` computed positions in host memory, and free its blocks.

        Returns (group, block, host block) for the copies that step ``in_flight + 1`` must make before it writes
        anything. Blocks that no later position can read are not copied. Returns None, and changes nothing, if host
        memory has too little room, if a sliding window has released a block that the next position attends to, or if
        the KV may not be shared.
        """
        if request.request_id in self.swapped or not 0 < num_tokens <= request.num_computed_tokens:
            raise InvariantError(f"{request!r} cannot save {num_tokens} positions: not computed, or saved before")
        if request.num_published == NEVER or not self.tables.resumable(request, num_tokens):
            return None
        firsts = [self.layout.first_in_reach(group, num_tokens) for group in range(len(self.layout.groups))]
        ends = [kind.num_entries(num_tokens) for kind in self.layout.kinds]
        counts = [max(0, end - first) for first, end in zip(firsts, ends, strict=True)]
        if any(count > self.swap_pool.num_free(group) for group, count in enumerate(counts)):
            return None
        hosts = [self.swap_pool.allocate(group, count) for group, count in enumerate(counts)]
        self.swapped[request.request_id] = Swapped(num_tokens, hosts, in_flight + 1)
        copies = [
            (group, block, host)
            for group, (first, end) in enumerate(zip(firsts, ends, strict=True))
            for block, host in zip(request.block_ids[group][first:end], hosts[group], strict=True)
        ]
        self.tables.free(request, in_flight)
        return copies

    def swap_in(
        self, request: Request, reserve: int, watermark: float, step: int, *, share: bool = True
    ) -> Admission | None:
        """Give a swapped request blocks for its first ``reserve`` positions, and return the copies that step ``step``
        must make.

        Blocks that the prefix cache still has are shared instead of copied. The host blocks are free after ``step`` has
        ended. See :meth:`admit` for ``watermark`` and ``share``. Returns None, and gives no block, if the blocks do not
        fit now, or while a step in flight still computes or saves this KV (that step may fail).
        """
        saved = self.swapped.get(request.request_id)
        if saved is None:
            raise InvariantError(f"{request!r} has nothing in host memory")
        reserve = max(reserve, saved.num_tokens + 1)
        safe = saved.step <= self.tables.done_step or saved.step == step == self.tables.done_step + 1
        if not safe or request.refused_at == (self.tables.num_changes, reserve, watermark):
            return None
        known = saved.num_tokens
        path = []
        if share and request.may_share and self.prefix_cache is not None:
            path = self.prefix_cache.walk(request, known // self.block_size)
        tables: list[list[int | None]] = []
        for group, hosts in enumerate(saved.blocks):
            kind = self.layout.kinds[group]
            first = self.layout.first_in_reach(group, known)
            ends = [kind.last_block(entry, self.block_size) for entry in range(first, first + len(hosts))]
            cached = [path[end].blocks[group] for end in ends if end < len(path)]
            tables.append([NULL_BLOCK] * first + cached + [None] * (len(hosts) - len(cached)))
        if (wants := self._wants(request, tables, known, reserve, watermark)) is None:
            return None
        self.tables.occupy(request, tables, wants, known, path if share else None)
        copies: list[tuple[int, int, int]] = []
        for group, (hosts, before, table) in enumerate(zip(saved.blocks, tables, request.block_ids, strict=True)):
            first = len(before) - len(hosts)
            copies += [(group, hosts[i - first], table[i]) for i, block in enumerate(before) if block is None]
            self.swap_pool.release(group, hosts, step)
        del self.swapped[request.request_id]
        return Admission(known, [], copies)

    def drop_swapped(self, request: Request) -> None:
        """Drop the request's KV from host memory, if there is any, because the request has ended or will be
        recomputed."""
        saved = self.swapped.pop(request.request_id, None)
        if saved is not None:
            request.refused_at = NOT_REFUSED
            for group, hosts in enumerate(saved.blocks):
                self.swap_pool.release(group, hosts, saved.step)

    def scheduled(self, step: int) -> list[tuple[int, int, int]]:
        """Note that ``step`` was scheduled. Returns (group, block, host block) for the copies that it must make before
        it writes anything: blocks that the prefix cache evicted since the previous step."""
        self._scheduled_step = step
        offloaded = self._offloaded
        self._offloaded = []
        return offloaded

    def step_done(self, step: int) -> None:
        """Release the blocks and host blocks that waited for the end of ``step``."""
        self.tables.step_done(step)
        self.swap_pool.step_done(step)

    def copies_lost(self, step: int) -> None:
        """Drop the copies in host memory that ``step`` should have made, because it failed."""
        if self.prefix_cache is not None:
            for group, node in self.swap_pool.saved_in(step):
                self.prefix_cache.drop_copy(group, node)

    def swapped_since(self, step: int) -> list[str]:
        """Ids of requests that were swapped out in ``step`` or while it was in flight. If the step fails, their KV is
        lost."""
        return [request_id for request_id, saved in self.swapped.items() if saved.step >= step]

    def publish(self, request: Request, num_confirmed: int) -> None:
        """Publish the request's full blocks among its first ``num_confirmed`` positions in the prefix cache."""
        if self.prefix_cache is not None and num_confirmed // self.block_size > request.num_published:
            self.tables.num_changes += 1
            self.prefix_cache.publish(request, num_confirmed)

    def publish_confirmed(self, request: Request) -> None:
        """Publish the blocks that ended steps have computed. These are all positions but the newest token, if the
        request has a new token since it joined."""
        if request.block_ids and len(request.token_ids) > request.progress_mark:
            self.publish(request, len(request.token_ids) - 1)

    def fill_holes(self, request: Request) -> None:
        """Before a request releases its blocks: share its copies of blocks that others had published, and that were
        evicted since."""
        if request.has_copies and self.prefix_cache is not None:
            self.tables.num_changes += 1
            self.prefix_cache.fill_holes(request)

    def forget(self, request: Request) -> None:
        """Remove the blocks of a failed request from the prefix cache."""
        if self.prefix_cache is not None:
            self.prefix_cache.forget(request)

    def forget_all(self, requests: Iterable[Request]) -> None:
        """Remove all blocks from the prefix cache. The blocks that the running ``requests`` have, or compute later, are
        never published."""
        self.tables.num_changes += 1
        for request in requests:
            request.num_published = NEVER
            request.last_node = None
        if self.prefix_cache is not None:
            self.prefix_cache.clear()

    def _is_needed(self, group: int, index: int, num_tokens: int) -> bool:
        """Whether a request that goes on after ``num_tokens`` positions reads the group's block ``index``."""
        first = self.layout.first_in_reach(group, num_tokens) * self.layout.kinds[group].span
        return (index + 1) * self.block_size > first

    def _wants(
        self, request: Request, tables: Sequence[Sequence[int | None]], known: int, reserve: int, watermark: float
    ) -> list[int] | None:
        """Number of new blocks per group that the request needs in addition to those in ``tables``; None if they do not
        fit."""
        wants: list[int] = []
        for group, (pool, shared) in enumerate(zip(self.pools, tables, strict=True)):
            present = [block for block in shared if block is not None]
            idle = sum(1 for block in present if block != NULL_BLOCK and pool.ref_counts[block] == 0)
            want = self.layout.admission_blocks(group, known, reserve) - len(present)
            if not self.tables.reservations.fits(group, request, pool.num_free - idle, want, watermark):
                if request.source is None or request.source.is_finished:  # otherwise it may share more blocks next time
                    request.refused_at = (self.tables.num_changes, reserve, watermark)
                return None
            wants.append(want)
        return wants

    def _find_shared(self, request: Request) -> _Shared:
        """Find the leading positions whose KV the request can share."""
        if not request.may_share:
            return _Shared(0)
        known = 0
        path = []
        if self.prefix_cache is not None:
            path = self.prefix_cache.walk(request, (len(request.token_ids) - 1) // self.block_size)
            known = self._agreed(path) * self.block_size
            while (whole := whole_before(request, known)) < known:
                path = path[: whole // self.block_size]
                known = self._agreed(path) * self.block_size
        source = request.source
        forked = (request.num_prompt_tokens - 1) // self.layout.share_unit * self.layout.share_unit
        can_begin = source is not None and forked > known and whole_before(request, forked) == forked
        if source is not None and can_begin and self._can_fork(source, forked):
            return _Shared(forked, path, source)
        return _Shared(known, path)

    def _can_fork(self, source: Request, forked: int) -> bool:
        """Whether ``source`` still has the KV of its first ``forked`` positions that a fork must read."""
        # If ``source`` got a token since its admission, an earlier step has computed its prompt.
        if source.status is not RequestStatus.RUNNING or len(source.token_ids) <= source.progress_mark:
            return False
        ends = [kind.num_entries(forked) for kind in self.layout.kinds]
        return self.tables.resumable(source, forked) and all(
            len(table) >= end for table, end in zip(source.block_ids, ends, strict=True)
        )

    def _agreed(self, path: list[PrefixNode]) -> int:
        """Number of leading blocks of ``path`` that every group still has, in its pool or in host memory."""
        return self.layout.agreed(len(path), lambda group, index: self.has(group, path[index]))

    def has(self, group: int, node: PrefixNode) -> bool:
        """Whether the group has the node's block, in its pool or in host memory."""
        host = node.hosts[group]
        return node.blocks[group] is not None or (host is not None and self.swap_pool.is_readable(group, host))

    def _shared_table(self, group: int, shared: _Shared) -> list[int | None]:
        """Table of the shared positions in one group: full blocks, the null block where a window has passed, and None
        for blocks that are only in host memory."""
        kind = self.layout.kinds[group]
        source = shared.source
        first = self.layout.first_in_reach(group, shared.num_tokens)
        full: range = range(shared.num_tokens // kind.span)
        if source is not None:
            return [NULL_BLOCK if entry < first else source.block_ids[group][entry] for entry in full]
        ends = [kind.last_block(entry, self.block_size) for entry in full]
        return [NULL_BLOCK if i < first else shared.path[end].blocks[group] for i, end in enumerate(ends)]

    def _evicted(self, group: int, block: int, node: PrefixNode) -> None:
        """Called when the block of ``node`` is allocated for other content."""
        if self.prefix_cache is not None:
            if self.prefix_offload:
                self._offload(group, block, node)
            self.prefix_cache.evicted(group, node)

    def _offload(self, group: int, block: int, node: PrefixNode) -> None:
        """Save an evicted block in host memory, if there is room."""
        step = self._scheduled_step + 1
        host = node.hosts[group]
        if host is not None:
            self.swap_pool.touch(group, host, step)  # the copy exists already; it now counts as recently used
            return
        host = node.hosts[group] = self.swap_pool.keep(group, node, step)
        if host is not None:
            self.num_offloaded += 1
            self._offloaded.append((group, block, host))

    def check_invariants(self, requests: Iterable[Request]) -> None:
        """Compare every counter with the tables of the unfinished requests. Raises InvariantError for the first
        difference."""
        check_manager(self, requests)
