"""Block tables of all requests, and the pools of their blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from chairlift.base.outputs import FinishReason
from chairlift.core.kv_cache.block_pool import NULL_BLOCK, BlockPool
from chairlift.core.kv_cache.eviction.lru import LRU
from chairlift.core.kv_cache.eviction.rule import EvictionRule
from chairlift.core.kv_cache.layout import CacheLayout
from chairlift.core.kv_cache.prefix_cache import NEVER
from chairlift.core.kv_cache.prefix_node import PrefixNode
from chairlift.core.kv_cache.reservations import Reservations
from chairlift.core.kv_cache.tables import NewBlocks, TableChange
from chairlift.core.request import Request
from chairlift.errors import InvariantError

__all__ = ["BlockTables"]

_ENDED_WELL: Final = (FinishReason.STOP, FinishReason.LENGTH)


class BlockTables:
    """Makes, extends, shrinks and frees the block tables of requests.

    ``evicted`` is called with (group, block, node) when the block of a prefix-cache node is allocated for other
    content. ``eviction`` says which cached block is evicted next (default: the least recently used).
    """

    def __init__(
        self,
        layout: CacheLayout,
        evicted: Callable[[int, int, PrefixNode], None],
        eviction: EvictionRule | None = None,
    ) -> None:
        self.layout = layout
        self.block_size = layout.block_size
        self.eviction = eviction or LRU()
        self.pools = [BlockPool(group.num_blocks, self.eviction) for group in layout.groups]
        self.reservations = Reservations(layout, self.pools)
        # The attributes of each cache kind that every new block needs are looked up once, here.
        self._spans = [kind.span for kind in layout.kinds]
        self._counts = [int(kind.stores_positions) for kind in layout.kinds]
        self._num_counted = max(1, sum(self._counts))
        self._releasing = [group for group, kind in enumerate(layout.kinds) if kind.releases]
        self._evicted = evicted
        self.held_blocks = 0
        """Number of entries in all block tables of groups with K and V. A shared block counts once per table."""
        self.deferred: deque[tuple[int, int, list[int]]] = deque()
        """One entry per release that must wait: (index of the last step that uses the blocks, cache group, blocks). The
        blocks are released when that step has ended."""
        self.num_deferred = [0] * len(self.pools)
        self.spares: dict[str, list[tuple[int, int, int]]] = {}
        """Request id -> (cache group, table entry, spare block) of requests whose states a step saves; see
        :class:`~chairlift.core.kv_cache.state_backups.StateBackups`."""
        self.done_step = 0  # steps count from 1
        self.journal: list[TableChange] | None = None
        """Changes of block tables, oldest first; None while no code reads them."""
        self.num_changes = 0
        """Counter of events after which a refused request may fit: released blocks and smaller reservations."""

    @property
    def num_shares(self) -> int:
        """Number of blocks with K and V that sharing saves: a block in three tables saves two."""
        return sum(pool.num_shares * count for pool, count in zip(self.pools, self._counts, strict=True))

    def num_positions(self, num_blocks: int) -> int:
        """Number of positions in this number of blocks, if a position counts as the part of the groups with K and V
        that have its block."""
        return num_blocks * self.block_size // self._num_counted

    def occupy(
        self,
        request: Request,
        tables: Sequence[Sequence[int | None]],
        wants: list[int],
        known: int,
        path: list[PrefixNode] | None,
    ) -> None:
        """Give the request one block table per group.

        ``tables`` has the shared blocks, with None in place of missing blocks. ``wants`` is the number of new blocks
        per group. New blocks replace the Nones first; the remaining new blocks are appended. ``known`` is the number of
        shared positions. ``path`` has the prefix-cache nodes of the shared blocks; None means that the request's blocks
        are never published.
        """
        request.block_ids = []
        request.reserved = [(0, 0)] * len(tables)
        request.num_out_of_reach = [self.layout.first_in_reach(group, known) for group in range(len(tables))]
        shares = self.num_shares
        for group, (pool, shared, want) in enumerate(zip(self.pools, tables, wants, strict=True)):
            for block in shared:
                if block:  # neither missing nor the null block
                    pool.share(block)
            new = iter(self.take(group, want))
            table = [next(new) if block is None else block for block in shared]
            table.extend(new)
            request.block_ids.append(table)
            self._count_held(group, len(table))
            self._update_reservation(group, request)
            if self.journal is not None:
                self.journal.append((request.request_id, group, 0, list(table), []))
        request.num_shared_blocks = self.num_shares - shares
        request.num_published = NEVER if path is None else len(path)
        request.last_node = path[-1] if path else None

    def adopt(self, request: Request, original: Request, twins: Sequence[dict[int, int]]) -> None:
        """Give ``request``, the copy of a request in another cache of the same sizes, as many blocks as ``original``
        has there.

        ``twins`` has, per group, a map from block ids of the other cache to block ids here, so that blocks shared in
        the other cache are also shared here. The copies are never published to the prefix cache.
        """
        request.block_ids = []
        request.reserved = [(0, 0)] * len(twins)
        request.num_out_of_reach = list(original.num_out_of_reach)
        request.num_published = NEVER
        shares = self.num_shares
        for group, (found, theirs) in enumerate(zip(twins, original.block_ids, strict=True)):
            request.block_ids.append([])
            for block in theirs:
                if block in found:
                    self.pools[group].share(found[block])
                elif block != NULL_BLOCK:
                    (found[block],) = self.take(group, 1)
                request.block_ids[group].append(found.get(block, NULL_BLOCK))
            self._count_held(group, len(theirs))
            self._update_reservation(group, request)
        request.num_shared_blocks = self.num_shares - shares

    def extend(self, request: Request, num_tokens: int, in_flight: int) -> list[NewBlocks] | None:
        """Append blocks for the request's first ``num_tokens`` positions, and release blocks that its sliding windows
        have passed.

        ``in_flight`` is the last step that was scheduled before this one. Returns the new blocks. If a pool has too few
        blocks, returns None and takes none.
        """
        for group in self._releasing:
            self._release_passed(group, request, in_flight)
        if not self.has_room(request, num_tokens):
            return None
        grown = []
        for group in range(len(self.pools)):
            want = self._num_wanted(group, request, num_tokens)
            if want:
                table = request.block_ids[group]
                first = len(table)
                table.extend(self.take(group, want))
                self._count_held(group, want)
                self._update_reservation(group, request)
                grown.append(NewBlocks(group, first, table[first:]))
                if self.journal is not None:
                    self.journal.append((request.request_id, group, first, table[first:], []))
        return grown

    def _num_wanted(self, group: int, request: Request, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self._spans[group]) - len(request.block_ids[group]))

    def has_room(self, request: Request, num_tokens: int) -> bool:
        """Whether there are enough blocks now for the request's first ``num_tokens`` positions."""
        for group, pool in enumerate(self.pools):
            want = self._num_wanted(group, request, num_tokens)
            if want and want > pool.num_free - self.reservations.withheld(group, request):
                return False
        return True

    def num_positions_in(self, request: Request) -> int:
        """Number of leading positions for which the request has blocks."""
        return min(len(table) * span for table, span in zip(request.block_ids, self._spans, strict=True))

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Number of blocks that :meth:`extend` will lack after all deferred releases. The result is the number for the
        pool that lacks most; 0 if no pool lacks blocks."""
        gaps = [
            self.layout.kinds[group].num_entries(num_tokens)
            - len(table)
            - max(0, free - self.reservations.withheld(group, request))
            for group, (table, free) in enumerate(zip(request.block_ids, self.num_free_soon(), strict=True))
        ]
        return max([0, *gaps])

    def num_remaining(self, request: Request, num_blocks: int, limit: int) -> int:
        """If each group lost the last ``num_blocks`` blocks of the request's table: number of leading positions, at
        most ``limit``, that would still have their KV. A multiple of the block size; 0 or negative if there are
        none."""
        kinds = self.layout.kinds
        ends = [(len(t) - num_blocks) * kind.span for t, kind in zip(request.block_ids, kinds, strict=True)]
        unit = max(self.block_size, self.layout.share_unit)
        return min([limit, *ends]) // unit * unit

    def num_free_soon(self) -> list[int]:
        """One entry per cache group: number of blocks that are free after all deferred releases."""
        return [pool.num_free + deferred for pool, deferred in zip(self.pools, self.num_deferred, strict=True)]

    def releases_to_come(self, group: int) -> Iterator[int]:
        """Blocks of one cache group whose releases wait for the end of a step. A shared block may come several
        times."""
        return (block for _, each, blocks in self.deferred if each == group for block in blocks)

    def free(self, request: Request, in_flight: int) -> None:
        """Release all blocks of the request after step ``in_flight``, which is the last step that may read or write
        them.

        The last blocks of the table are released first, so that they are also evicted first: more requests share the
        first blocks of a prompt.
        """
        if request.finish_reason in _ENDED_WELL:
            self.eviction.ended(request)
        if self.eviction.marks:
            self.eviction.releasing(request)
        for group in range(len(request.block_ids)):
            self._cut(group, request, 0, in_flight)
            self.num_changes += self.reservations.reserve(group, request, 0, 0)
        request.block_ids = []
        request.num_out_of_reach = []
        request.num_published = 0
        request.num_shared_blocks = 0
        request.last_node = None

    def shrink(self, request: Request, num_tokens: int, in_flight: int) -> bool:
        """Keep the blocks of the first ``num_tokens`` positions (a multiple of the block size), and release the rest
        after step ``in_flight``.

        Returns False, and changes nothing, if a sliding window has released a block that the next token attends to. The
        caller must compute the rest again. It must set ``num_computed_tokens`` to ``num_tokens`` and ``progress_mark``
        to the number of known tokens, so that no later block is published or forked before it is computed again.
        """
        if num_tokens % self.block_size:
            raise InvariantError(f"{request!r} cannot keep {num_tokens} positions: blocks have {self.block_size}")
        if not self.resumable(request, num_tokens):
            return False
        for group, kind in enumerate(self.layout.kinds):
            remaining = kind.num_entries(num_tokens)
            self._cut(group, request, remaining, in_flight)
            request.num_out_of_reach[group] = min(request.num_out_of_reach[group], remaining)
        end = num_tokens // self.block_size
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
        """Release the blocks that waited for the end of ``step``."""
        self.done_step = max(self.done_step, step)
        while self.deferred and self.deferred[0][0] <= step:
            _, group, blocks = self.deferred.popleft()
            self.num_deferred[group] -= len(blocks)
            self.num_changes += 1
            for block in blocks:
                self.pools[group].release(block)

    def resumable(self, request: Request, position: int) -> bool:
        """Whether the request still has every block that the token at ``position`` reads, with the content from just
        before that token."""
        return all(
            kind.continues_at(position, request.num_computed_tokens)
            and NULL_BLOCK not in table[self.layout.first_in_reach(group, position) : kind.num_entries(position)]
            for group, (kind, table) in enumerate(zip(self.layout.kinds, request.block_ids, strict=True))
        )

    def _count_held(self, group: int, count: int) -> None:
        self.held_blocks += count * self._counts[group]

    def take(self, group: int, count: int) -> list[int]:
        """Allocate ``count`` blocks from the pool, which must have them."""
        blocks = []
        for _ in range(count):
            block, node = self.pools[group].allocate()
            if node is not None:
                self._evicted(group, block, node)
            blocks.append(block)
        return blocks

    def replace(self, group: int, request: Request, entry: int, block: int) -> None:
        """Put ``block`` into the request's table in place of the block at ``entry``, which is released. No step in
        flight may use that block."""
        table = request.block_ids[group]
        before = list(table[entry:])
        table[entry] = block
        if self.journal is not None:
            self.journal.append((request.request_id, group, entry, [], before))
            self.journal.append((request.request_id, group, entry, table[entry:], []))
        self.release(group, before[0])

    def release(self, group: int, block: int) -> None:
        """Release a block that no step in flight uses."""
        self._release(group, [block], self.done_step)

    def _release_passed(self, group: int, request: Request, in_flight: int) -> None:
        """Release the blocks of the request's table that the group's sliding window has passed."""
        first = min(self.layout.first_in_reach(group, request.num_computed_tokens), len(request.block_ids[group]))
        table = request.block_ids[group]
        passed = [i for i in range(request.num_out_of_reach[group], first) if table[i] != NULL_BLOCK]
        if passed:
            if self.journal is not None:
                self.journal.append((request.request_id, group, -first, [], [table[i] for i in passed]))
            self._give_back(group, request, passed, in_flight)
            for i in passed:
                table[i] = NULL_BLOCK
        request.num_out_of_reach[group] = max(first, request.num_out_of_reach[group])
        self._update_reservation(group, request)

    def _update_reservation(self, group: int, request: Request) -> None:
        self.num_changes += self.reservations.update(group, request)

    def _cut(self, group: int, request: Request, end: int, in_flight: int) -> None:
        """Release the entries of the request's table in ``group`` from index ``end`` on, last entry first."""
        table = request.block_ids[group]
        if self.journal is not None:
            self.journal.append((request.request_id, group, end, [], table[end:]))
        self._count_held(group, -max(0, len(table) - end))
        held = [entry for entry in range(len(table) - 1, end - 1, -1) if table[entry] != NULL_BLOCK]
        self._give_back(group, request, held, in_flight)
        request.block_ids[group] = table[:end]

    def _give_back(self, group: int, request: Request, entries: list[int], in_flight: int) -> None:
        """Release the blocks in these entries of the request's table, in this order."""
        table = request.block_ids[group]
        if self.eviction.marks:
            span = self._spans[group]
            nodes = self.pools[group].nodes
            known = [(entry * span, table[entry]) for entry in entries if nodes[table[entry]] is not None]
            self.eviction.leaving(request, group, known)
        self._release(group, [table[entry] for entry in entries], in_flight)

    def _release(self, group: int, blocks: list[int], in_flight: int) -> None:
        """Release the blocks when step ``in_flight`` has ended."""
        if in_flight <= self.done_step:
            self.num_changes += 1
            for block in blocks:
                self.pools[group].release(block)
        elif blocks:
            self.deferred.append((in_flight, group, blocks))
            self.num_deferred[group] += len(blocks)
