"""Block tables of all requests over a list of cache groups.

A *group* is a set of layers that keep the same positions: ``full`` keeps all of them, ``window(W)`` the last W. Every
group has a pool of its own; a request has one table per group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from chairlift.config import CacheGroup
from chairlift.errors import ConfigError, InvariantError
from chairlift.kv_cache.block_pool import NULL_BLOCK, BlockPool
from chairlift.kv_cache.prefix_cache import NEVER, PrefixCache, PrefixNode
from chairlift.kv_cache.swap import Swapped, SwapPool
from chairlift.kv_cache.tables import BlockCounts, NewBlocks, TableChange
from chairlift.request import Request

__all__ = ["BlockTables"]

_NO_LIMIT = 1 << 40


class BlockTables:
    """The blocks of every group and the tables that name them: how they grow, shrink and are given back.

    ``max_step_tokens`` is the most tokens one step computes for one request: a window group must hold a window and a
    step of new tokens at once. With ``prefix_offload`` the host blocks that no preempted request needs keep what the
    prefix cache evicts.
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
    ) -> None:
        if block_size not in {1, 2, 4, 8, 16, 32, 64, 128, 256}:
            raise ConfigError(f"block_size must be a power of two from 1 to 256, got {block_size}")
        if not groups:
            raise ConfigError("a KV cache needs at least one cache group")
        self.groups = tuple(groups)
        self.block_size = block_size
        self.max_step_tokens = max_step_tokens
        self.pools = [BlockPool(group.num_blocks) for group in groups]
        seam: dict[str, Any] = {} if hash_function is None else {"hash_function": hash_function}
        self.swap_pool = SwapPool([group.num_host_blocks for group in groups])
        self.prefix_cache: PrefixCache | None = None
        if enable_prefix_caching:
            self.prefix_cache = PrefixCache(block_size, self.pools, secret, host_pool=self.swap_pool, **seam)
        self.prefix_offload = prefix_offload and enable_prefix_caching
        self.num_offloaded = self.num_brought_back = 0
        """Blocks that the prefix cache evicted and host memory kept, and those that were copied back."""
        self._offloaded: list[tuple[int, int, int]] = []  # (group, block, host block) for the next step to copy
        self._scheduled_step = 0
        self.swapped: dict[str, Swapped] = {}
        """What host memory keeps of preempted requests, by request id."""
        self.held_blocks = 0
        """Table entries of all requests, shared ones counted once per table."""
        self._deferred: deque[tuple[int, int, list[int]]] = deque()  # (last step that reads them, group, blocks)
        self._num_deferred = [0] * len(self.pools)
        self._entitled = [0] * len(self.pools)  # of window groups: what guaranteed requests hold or have a right to
        self._pledged = [0] * len(self.pools)  # of that, what they do not hold now, and nobody else may take
        self._done_step = 0  # steps count from 1
        self.journal: list[TableChange] | None = None  # every change of a table, while somebody watches
        self._num_changes = 0  # counts what may let a request in that did not fit: blocks given back, blocks published

    # -- sizes -------------------------------------------------------------------------------------------------

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

    # -- life of a table ---------------------------------------------------------------------------------------

    def extend(self, request: Request, num_tokens: int, in_flight: int) -> list[NewBlocks] | None:
        """Make room for the request's first ``num_tokens`` positions, giving back what a window has left behind.

        ``in_flight`` is the last step that was scheduled before this one. None when a pool is short; nothing is
        taken then.
        """
        for group, cache_group in enumerate(self.groups):
            if cache_group.window is not None:
                self._leave_behind(group, request, in_flight)
        wants: list[int] = []
        for group, pool in enumerate(self.pools):
            want = max(0, -(-num_tokens // self.block_size) - len(request.block_ids[group]))
            if want and want > pool.num_free - self._withheld(group, request):
                return None
            wants.append(want)
        grown = []
        for group, want in enumerate(wants):
            if want:
                table = request.block_ids[group]
                first = len(table)
                table.extend(self._take(group, want))
                self.held_blocks += want
                self._pledge(group, request)
                grown.append(NewBlocks(group, first, table[first:]))
                if self.journal is not None:
                    self.journal.append((request.request_id, group, first, table[first:], []))
        return grown

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Blocks, in the shortest pool, for want of which :meth:`extend` will still fail when every deferred release
        has happened; 0 when it will not."""
        want = -(-num_tokens // self.block_size)
        gaps = [
            want - len(table) - max(0, pool.num_free + self._num_deferred[group] - self._withheld(group, request))
            for group, (pool, table) in enumerate(zip(self.pools, request.block_ids, strict=True))
        ]
        return max(0, *gaps)

    def free(self, request: Request, in_flight: int) -> None:
        """Take all blocks of the request back, after step ``in_flight``, the last one that may read or write them.

        The end of the table goes first, so that the prefix cache keeps the beginnings, which more requests share.
        """
        for group in range(len(request.block_ids)):
            self._cut(group, request, 0, in_flight)
            self._promise(group, request, 0, 0)
        request.block_ids = []
        request.num_out_of_reach = []
        request.num_published = 0
        request.last_node = None

    def shrink(self, request: Request, num_tokens: int, in_flight: int) -> bool:
        """Keep the blocks of the first ``num_tokens`` positions, whole blocks, and take the rest back as :meth:`free`.

        False, and nothing changed, when a sliding window has given back what the token after them attends to. The
        caller computes the rest again: ``num_computed_tokens`` must go down to ``num_tokens``, and ``progress_mark``
        up to the known tokens, so that nothing beyond is published or forked before a new token proves it computed.
        """
        if num_tokens % self.block_size:
            raise InvariantError(f"{request!r} cannot keep {num_tokens} positions: blocks have {self.block_size}")
        if not self._resumable(request, num_tokens):
            return False
        end = num_tokens // self.block_size
        for group in range(len(request.block_ids)):
            self._cut(group, request, end, in_flight)
            request.num_out_of_reach[group] = min(request.num_out_of_reach[group], end)
        path: list[PrefixNode] = []
        node = request.last_node
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        if len(path) > end:
            request.last_node = path[-end] if end else None
        if request.num_published != NEVER:
            request.num_published = min(request.num_published, end)
        return True

    def step_done(self, step: int) -> None:
        """Step ``step`` has run: what waited for it is released."""
        self._done_step = max(self._done_step, step)
        self.swap_pool.step_done(step)
        while self._deferred and self._deferred[0][0] <= step:
            _, group, blocks = self._deferred.popleft()
            self._num_deferred[group] -= len(blocks)
            self._num_changes += 1
            for block in blocks:
                self.pools[group].release(block)

    # -- inside ------------------------------------------------------------------------------------------------

    def _wants(
        self, request: Request, tables: Sequence[Sequence[int | None]], known: int, reserve: int, watermark: float
    ) -> list[int] | None:
        """How many new blocks of each group the request needs beside those in ``tables``; None if they do not fit."""
        wants: list[int] = []
        for group, (pool, shared) in enumerate(zip(self.pools, tables, strict=True)):
            kept = [block for block in shared if block is not None]
            idle = sum(1 for block in kept if block != NULL_BLOCK and pool.ref_counts[block] == 0)
            want = self._admission_blocks(group, known, reserve) - len(kept)
            if not self._fits(group, request, pool.num_free - idle, want, watermark):
                if request.source is None or request.source.is_finished:  # else it may find more to share next time
                    request.refused_at = (self._num_changes, reserve, watermark)
                return None
            wants.append(want)
        return wants

    def _fits(self, group: int, request: Request, free: int, want: int, watermark: float) -> bool:
        """Whether a request that joins may take ``want`` of ``free`` blocks: what others have a right to stays theirs.

        Blocks that guaranteed requests share count for each of them: when one leaves them behind, nothing comes free.
        """
        capacity = self.pools[group].capacity
        spare = min(free - want - self._pledged[group], capacity - self._entitled[group] - self._most(group, request))
        return spare >= watermark * capacity

    def _most(self, group: int, request: Request) -> int:
        """The most blocks of a window group that a guaranteed request ever has a right to; elsewhere it has them all
        from the beginning."""
        guaranteed = request.is_guaranteed and self.groups[group].window is not None
        return self.blocks_for(group, request.limit) if guaranteed else 0

    def _withheld(self, group: int, request: Request) -> int:
        """Free blocks that a request that runs may not take."""
        return 0 if request.is_guaranteed else self._pledged[group]

    def _pledge(self, group: int, request: Request) -> None:
        """Its table has changed, or what it has left to compute: so has what a guaranteed request has a right to.

        That is what it holds, and as much more as its window and its next step need: of what is known, then a token.
        """
        window = self.groups[group].window
        if window is None or not request.is_guaranteed:
            return
        held = len(request.block_ids[group]) - request.num_out_of_reach[group]
        step = min(self.max_step_tokens, request.num_tokens - request.num_computed_tokens)
        left = -(-request.limit // self.block_size) - len(request.block_ids[group])
        pledged = max(0, min(left, -(-(window - 1 + step) // self.block_size) + 1 - held))
        self._promise(group, request, held + pledged, pledged)

    def _promise(self, group: int, request: Request, entitled: int, pledged: int) -> None:
        before = request.promised[group]
        self._num_changes += entitled < before[0] or pledged < before[1]
        self._entitled[group] += entitled - before[0]
        self._pledged[group] += pledged - before[1]
        request.promised[group] = entitled, pledged

    def _occupy(
        self,
        request: Request,
        tables: Sequence[Sequence[int | None]],
        wants: list[int],
        known: int,
        path: list[PrefixNode] | None,
    ) -> None:
        """Make ``tables`` the request's: their blocks are shared, new ones stand for None and for what is missing. With
        ``path`` None it offers none of its blocks to others."""
        request.block_ids, request.promised = [], [(0, 0)] * len(tables)
        request.num_out_of_reach = [self._first_in_reach(group, known) for group in range(len(tables))]
        for group, (pool, shared, want) in enumerate(zip(self.pools, tables, wants, strict=True)):
            for block in shared:
                if block:  # neither missing nor the null block
                    pool.share(block)
            new = iter(self._take(group, want))
            table = [next(new) if block is None else block for block in shared]
            table.extend(new)
            request.block_ids.append(table)
            self.held_blocks += len(table)
            self._pledge(group, request)
            if self.journal is not None:
                self.journal.append((request.request_id, group, 0, list(table), []))
        request.num_published = NEVER if path is None else len(path)
        request.last_node = path[-1] if path else None

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
            if self.journal is not None:
                self.journal.append((request.request_id, group, -first, [], [table[i] for i in passed]))
            self._give_back(group, request, [table[i] for i in passed], in_flight)
            for i in passed:
                table[i] = NULL_BLOCK
        request.num_out_of_reach[group] = max(first, request.num_out_of_reach[group])
        self._pledge(group, request)

    def _resumable(self, request: Request, position: int) -> bool:
        """Whether every block that the token at ``position`` attends to is still the request's."""
        end = -(-position // self.block_size)
        return all(
            NULL_BLOCK not in table[self._first_in_reach(group, position) : end]
            for group, table in enumerate(request.block_ids)
        )

    def _cut(self, group: int, request: Request, end: int, in_flight: int) -> None:
        """Take back the request's table in ``group`` from entry ``end`` on, the last entry first."""
        table = request.block_ids[group]
        if self.journal is not None:
            self.journal.append((request.request_id, group, end, [], table[end:]))
        self.held_blocks -= max(0, len(table) - end)
        self._give_back(group, request, [block for block in reversed(table[end:]) if block != NULL_BLOCK], in_flight)
        request.block_ids[group] = table[:end]

    def _give_back(self, group: int, request: Request, blocks: list[int], in_flight: int) -> None:
        if request.retention:
            for block in blocks:
                self.pools[group].retain(block, request.retention)
        self._release(group, blocks, in_flight)

    def _take(self, group: int, count: int) -> list[int]:
        pool = self.pools[group]
        taken = []
        for _ in range(count):
            block, evicted = pool.allocate()
            if evicted is not None and self.prefix_cache is not None:
                if self.prefix_offload:
                    self._offload(group, block, evicted)
                self.prefix_cache.evicted(group, evicted)
            taken.append(block)
        return taken

    def _offload(self, group: int, block: int, node: PrefixNode) -> None:
        """A block with what ``node`` stands for is given out again: keep a copy in host memory, if there is room."""
        step, host = self._scheduled_step + 1, node.hosts[group]
        if host is not None:
            self.swap_pool.touch(group, host, step)  # while the block was there, nobody used the copy
            return
        host = node.hosts[group] = self.swap_pool.keep(group, node, step)
        if host is not None:
            self.num_offloaded += 1
            self._offloaded.append((group, block, host))

    def _release(self, group: int, blocks: list[int], in_flight: int) -> None:
        if in_flight <= self._done_step:
            self._num_changes += 1
            for block in blocks:
                self.pools[group].release(block)
        elif blocks:
            self._deferred.append((in_flight, group, blocks))
            self._num_deferred[group] += len(blocks)
