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
from chairlift.kv_cache.invariants import check_manager
from chairlift.kv_cache.prefix_cache import NEVER, PrefixCache, PrefixNode
from chairlift.kv_cache.swap import Swapped, SwapPool
from chairlift.kv_cache.tables import Admission, BlockCounts, NewBlocks, TableChange
from chairlift.request import Request, RequestStatus

__all__ = ["Admission", "BlockCounts", "KVCacheManager", "NewBlocks", "TableChange"]

_NO_LIMIT = 1 << 40


@dataclasses.dataclass(frozen=True, slots=True)
class _Shared:
    """Leading positions whose KV somebody else computed: along a prefix-cache path, or in a fork's source."""

    num_tokens: int
    path: list[PrefixNode] = dataclasses.field(default_factory=list)
    source: Request | None = None


class KVCacheManager:
    """Gives blocks to requests and takes them back. Raises InvariantError for what a scheduler must never ask.

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
        self.swap_pool = SwapPool([group.num_host_blocks for group in groups])
        self.swapped: dict[str, Swapped] = {}
        """What host memory keeps of preempted requests, by request id."""
        self.held_blocks = 0
        """Table entries of all requests, shared ones counted once per table."""
        self._deferred: deque[tuple[int, int, list[int]]] = deque()  # (last step that reads them, group, blocks)
        self._num_deferred = [0] * len(self.pools)
        self._done_step = 0  # steps count from 1
        self.journal: list[TableChange] | None = None  # every change of a table, while somebody watches
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
        shared = self._find_shared(request) if share else _Shared(0)
        known = shared.num_tokens
        path = shared.path[: known // self.block_size]
        tables = [self._shared_table(group, shared) for group in range(len(self.pools))]
        stale = shared.source is not None and shared.source.num_published == NEVER  # and so is what is forked from it
        if not self._occupy(request, tables, known, reserve, watermark, path if share and not stale else None):
            return None
        copies: list[tuple[int, int, int]] = []
        if shared.source is not None and known % self.block_size:
            tail = known // self.block_size
            for group, (source, table) in enumerate(zip(shared.source.block_ids, request.block_ids, strict=True)):
                copies.append((group, source[tail], table[tail]))
        return Admission(known, copies)

    def num_shared(self, request: Request) -> int:
        """Leading positions that would not have to be computed if the request were let in now."""
        swapped = self.swapped.get(request.request_id)
        return self._find_shared(request).num_tokens if swapped is None else swapped.num_tokens

    def lacks(self, request: Request, reserve: int, watermark: float, leaving: Iterable[Request] = ()) -> bool:
        """Whether :meth:`admit` will still fail when every deferred release has happened and ``leaving`` have left."""
        tables = [each.block_ids for each in leaving]
        for group, pool in enumerate(self.pools):
            gain = self._num_deferred[group] + sum(pool.ref_counts[b] == 1 for table in tables for b in table[group])
            if pool.num_free + gain - self._admission_blocks(group, 0, reserve) < watermark * pool.capacity:
                return True
        return False

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
                if self.journal is not None:
                    self.journal.append((request.request_id, group, first, table[first:], []))
        return grown

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Blocks, in the shortest pool, for want of which :meth:`extend` will still fail when every deferred release
        has happened; 0 when it will not."""
        want = -(-num_tokens // self.block_size)
        gaps = [
            want - len(request.block_ids[group]) - pool.num_free - self._num_deferred[group]
            for group, pool in enumerate(self.pools)
        ]
        return max(0, *gaps)

    def free(self, request: Request, in_flight: int) -> None:
        """Take all blocks of the request back, after step ``in_flight``, the last one that may read or write them.

        The end of the table goes first, so that the prefix cache keeps the beginnings, which more requests share.
        """
        for group in range(len(request.block_ids)):
            self._cut(group, request, 0, in_flight)
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

    # -- host memory ---------------------------------------------------------------------------------------------

    def swap_out(self, request: Request, num_tokens: int, in_flight: int) -> list[tuple[int, int, int]] | None:
        """Keep the KV of the request's first ``num_tokens`` computed positions in host memory, and free its blocks.

        Returns (group, block, host block) to copy in step ``in_flight + 1``, before that writes anything; what no
        later position can reach is left out. None, and nothing changed, when host memory is short or a sliding window
        has given back what the next position attends to; and for KV that may not be shared, which nobody would know
        when it comes back.
        """
        if request.request_id in self.swapped or not 0 < num_tokens <= request.num_computed_tokens:
            raise InvariantError(f"{request!r} cannot save {num_tokens} positions: not computed, or saved before")
        if request.num_published == NEVER or not self._resumable(request, num_tokens):
            return None
        end = -(-num_tokens // self.block_size)
        firsts = [self._first_in_reach(group, num_tokens) for group in range(len(self.groups))]
        if any(end - first > self.swap_pool.num_free(group) for group, first in enumerate(firsts)):
            return None
        hosts = [self.swap_pool.allocate(group, max(0, end - first)) for group, first in enumerate(firsts)]
        self.swapped[request.request_id] = Swapped(num_tokens, hosts, in_flight + 1)
        copies = [
            (group, block, host)
            for group, first in enumerate(firsts)
            for block, host in zip(request.block_ids[group][first:end], hosts[group], strict=True)
        ]
        self.free(request, in_flight)
        return copies

    def swap_in(
        self, request: Request, reserve: int, watermark: float, step: int, *, share: bool = True
    ) -> Admission | None:
        """Give a swapped request blocks for its first ``reserve`` positions, and say what step ``step`` copies back.

        Blocks that the prefix cache still has are shared instead of copied. The host blocks are free once ``step`` has
        run. ``watermark``, ``share`` and None are as in :meth:`admit`; None also while steps in flight, which may
        fail, compute or save what is to come back.
        """
        saved = self.swapped.get(request.request_id)
        if saved is None:
            raise InvariantError(f"{request!r} has nothing in host memory")
        reserve = max(reserve, saved.num_tokens + 1)
        safe = saved.step <= self._done_step or saved.step == step == self._done_step + 1
        if not safe or request.refused_at == (self._num_changes, reserve):
            return None
        known, path = saved.num_tokens, []
        if share and request.may_share and self.prefix_cache is not None:
            path = self.prefix_cache.walk(request, known // self.block_size)
        tables: list[list[int | None]] = []
        for group, hosts in enumerate(saved.blocks):
            first = self._first_in_reach(group, known)
            end = first + len(hosts)
            cached = [node.blocks[group] for node in path[first:end]]
            tables.append([NULL_BLOCK] * first + cached + [None] * (len(hosts) - len(cached)))
        if not self._occupy(request, tables, known, reserve, watermark, path if share else None):
            return None
        copies: list[tuple[int, int, int]] = []
        for group, (hosts, before, table) in enumerate(zip(saved.blocks, tables, request.block_ids, strict=True)):
            first = len(before) - len(hosts)
            copies += [(group, hosts[i - first], table[i]) for i, block in enumerate(before) if block is None]
            self.swap_pool.release(group, hosts, step)
        del self.swapped[request.request_id]
        return Admission(known, [], copies)

    def drop_swapped(self, request: Request) -> None:
        """Forget what host memory keeps of the request, if anything: it has ended, or is to be computed again."""
        saved = self.swapped.pop(request.request_id, None)
        if saved is not None:
            request.refused_at = (-1, -1)
            for group, hosts in enumerate(saved.blocks):
                self.swap_pool.release(group, hosts, saved.step)

    def swapped_since(self, step: int) -> list[str]:
        """Ids of requests swapped out in step ``step`` or while it was in flight: when it fails, their KV is lost."""
        return [request_id for request_id, saved in self.swapped.items() if saved.step >= step]

    # -- what others may share -----------------------------------------------------------------------------------

    def publish(self, request: Request, num_confirmed: int) -> None:
        """Let others share the request's full blocks among its first ``num_confirmed`` positions."""
        if self.prefix_cache is not None and num_confirmed // self.block_size > request.num_published:
            self._num_changes += 1
            self.prefix_cache.publish(request, num_confirmed)

    def forget(self, request: Request) -> None:
        """The request failed: nothing that stands in its blocks may be shared any more."""
        if self.prefix_cache is not None:
            self.prefix_cache.forget(request)

    def forget_all(self, requests: Iterable[Request]) -> None:
        """Nothing computed so far, nor computed on top of it by ``requests``, which run, may be shared any more."""
        self._num_changes += 1
        for request in requests:
            request.num_published, request.last_node = NEVER, None
        if self.prefix_cache is not None:
            self.prefix_cache.clear()

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

    # -- inside --------------------------------------------------------------------------------------------------

    def _find_shared(self, request: Request) -> _Shared:
        """How many leading positions can be shared, and with whom."""
        if not request.may_share:
            return _Shared(0)
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
        return self._resumable(source, forked) and all(len(table) >= end for table in source.block_ids)

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

    def _occupy(
        self,
        request: Request,
        tables: Sequence[Sequence[int | None]],
        known: int,
        reserve: int,
        watermark: float,
        path: list[PrefixNode] | None,
    ) -> bool:
        """Make ``tables`` the request's: their blocks are shared, new ones stand for None and for what is missing.

        False, and nothing changed, when that does not fit. ``path`` None: it offers none of its blocks to others.
        """
        wants: list[int] = []
        for group, (pool, shared) in enumerate(zip(self.pools, tables, strict=True)):
            kept = [block for block in shared if block is not None]
            idle = sum(1 for block in kept if block != NULL_BLOCK and pool.ref_counts[block] == 0)
            want = self._admission_blocks(group, known, reserve) - len(kept)
            if pool.num_free - idle - want < watermark * pool.capacity:
                request.refused_at = (self._num_changes, reserve)
                return False
            wants.append(want)
        request.block_ids = []
        for group, (pool, shared, want) in enumerate(zip(self.pools, tables, wants, strict=True)):
            for block in shared:
                if block:  # neither missing nor the null block
                    pool.share(block)
            new = iter(self._take(group, want))
            table = [next(new) if block is None else block for block in shared]
            table.extend(new)
            request.block_ids.append(table)
            self.held_blocks += len(table)
            if self.journal is not None:
                self.journal.append((request.request_id, group, 0, list(table), []))
        request.num_out_of_reach = [self._first_in_reach(group, known) for group in range(len(tables))]
        request.num_published = NEVER if path is None else len(path)
        request.last_node = path[-1] if path else None
        return True

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
            if self.journal is not None:
                self.journal.append((request.request_id, group, -first, [], [table[i] for i in passed]))
            self._give_back(group, request, [table[i] for i in passed], in_flight)
            for i in passed:
                table[i] = NULL_BLOCK
        request.num_out_of_reach[group] = max(first, request.num_out_of_reach[group])

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
        check_manager(self, requests)
