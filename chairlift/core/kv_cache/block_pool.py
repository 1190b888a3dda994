"""Blocks of one cache group: reference counts, and a free list in LRU order (PagedAttention; Kwon et al., SOSP
2023)."""

from __future__ import annotations

from collections import OrderedDict

from chairlift.core.kv_cache.prefix_node import PrefixNode
from chairlift.errors import ConfigError, InvariantError

__all__ = ["NULL_BLOCK", "BlockPool"]

NULL_BLOCK = 0
"""Entry of a block table at positions that a sliding window has passed. This block is never allocated and never
read."""


class BlockPool:
    """``num_blocks`` blocks with ids ``0 .. num_blocks - 1``; block 0 is the null block.

    A block is *used* while its reference count is above zero. An unused block is *cached* if the prefix cache knows its
    content; then it can be shared again. When the pool has no other block, the least recently used cached block is
    evicted.

    Cached blocks with a retention level above 0 are *protected*: they are evicted after all blocks of lower levels. At
    most half of the pool is protected. If there are more, the least recently used protected block gets level 0, so that
    no tenant can fill the whole cache for ever.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(f"a block pool needs at least 2 blocks (one is the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.nodes: list[PrefixNode | None] = [None] * num_blocks
        """Per block: the prefix-cache node that knows the block's content, or None."""
        self.num_cached = 0
        self.num_shares = 0
        """Number of block tables that contain a used block, minus the number of used blocks: the blocks that sharing
        saves."""
        # The first block is allocated next. Blocks without content are put at the front, cached blocks at the back.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._levels = [0] * num_blocks
        # Retention level -> {protected block -> number of its release}, in the order in which the blocks were released.
        self._protected: dict[int, OrderedDict[int, int]] = {1: OrderedDict(), 2: OrderedDict()}
        self._num_releases = 0

    @property
    def capacity(self) -> int:
        """Number of blocks without the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated now, including cached blocks."""
        return len(self._free) + self.num_protected

    @property
    def num_protected(self) -> int:
        return len(self._protected[1]) + len(self._protected[2])

    @property
    def num_used(self) -> int:
        return self.capacity - self.num_free

    def allocate(self) -> tuple[int, PrefixNode | None]:
        """Allocate one block. Returns (block, prefix-cache node that was evicted for it or None). ``num_free`` must be
        above 0."""
        if self._free:
            block, _ = self._free.popitem(last=False)
        else:
            block, _ = (self._protected[1] or self._protected[2]).popitem(last=False)
        self.ref_counts[block] = 1
        self._levels[block] = 0
        evicted = self.nodes[block]
        if evicted is not None:
            self.nodes[block] = None
            self.num_cached -= 1
        return block, evicted

    def share(self, block: int) -> None:
        """Count one more block table that contains this block."""
        if self.ref_counts[block] == 0:
            self._withdraw(block)
            self.num_cached -= 1
        else:
            self.num_shares += 1
        self.ref_counts[block] += 1

    def retain(self, block: int, level: int) -> None:
        """Give a used block a retention level of 0 to 2. If it already has a level, the higher one is kept while it is
        cached."""
        self._levels[block] = max(self._levels[block], level)

    def release(self, block: int) -> None:
        """Count one block table less that contains this block. When no table contains it, it becomes cached if it has
        content, otherwise free."""
        count = self.ref_counts[block] - 1
        if count < 0 or block == NULL_BLOCK:
            raise InvariantError(f"block {block} was released more often than it was taken")
        self.ref_counts[block] = count
        if count == 0:
            if self.nodes[block] is None:
                self._queue_first(block)
            else:
                self.num_cached += 1
                self._queue_cached(block)
        else:
            self.num_shares -= 1

    def attach(self, block: int, node: PrefixNode) -> None:
        """Note that the prefix cache knows the content of this used block."""
        self.nodes[block] = node

    def detach(self, block: int) -> None:
        """Note that the prefix cache no longer knows the content of this block."""
        self.nodes[block] = None
        if self.ref_counts[block] == 0:
            self.num_cached -= 1
            self._withdraw(block)
            self._queue_first(block)

    def _queue_first(self, block: int) -> None:
        self._free[block] = None
        self._free.move_to_end(block, last=False)

    def _queue_cached(self, block: int) -> None:
        """Put a cached block at the end of the queue of its retention level."""
        level = self._levels[block]
        if level == 0:
            self._free[block] = None
            return
        self._num_releases += 1
        self._protected[level][block] = self._num_releases
        if self.num_protected > self.capacity // 2:
            levels = [blocks for blocks in self._protected.values() if blocks]
            oldest, _ = min(levels, key=lambda blocks: next(iter(blocks.values()))).popitem(last=False)
            self._levels[oldest] = 0
            self._free[oldest] = None

    def _withdraw(self, block: int) -> None:
        """Remove an unused block from the queue that contains it."""
        if block in self._free:
            del self._free[block]
        else:
            del self._protected[self._levels[block]][block]

    def check_invariants(self, references: dict[int, int]) -> None:
        """Compare all counts with ``references``: block -> number of block tables and deferred releases that contain
        it.

        Raises InvariantError.
        """
        free = [*self._free, *self._protected[1], *self._protected[2]]
        queued = set(free)
        for block, counted in enumerate(self.ref_counts):
            if block == NULL_BLOCK:
                continue
            named = references.get(block, 0)
            if counted != named:
                raise InvariantError(f"block {block} counts {counted} references, {named} tables name it")
            if (block in queued) != (not counted):
                raise InvariantError(f"block {block}: reference count {counted} contradicts the free list")
        shares = sum(count - 1 for count in self.ref_counts if count)
        if shares != self.num_shares:
            raise InvariantError(f"blocks are shared {shares} times, but {self.num_shares} are counted")
        if len(free) != len(queued):
            raise InvariantError("a block stands in the free list twice")
        if NULL_BLOCK in queued or self.ref_counts[NULL_BLOCK] or self.nodes[NULL_BLOCK] is not None:
            raise InvariantError("the null block was given out")
        cached = sum(1 for block in queued if self.nodes[block] is not None)
        if cached != self.num_cached:
            raise InvariantError(f"{cached} free blocks have cached content, but the pool counts {self.num_cached}")
        for level, blocks in self._protected.items():
            if any(self.nodes[block] is None or self._levels[block] != level for block in blocks):
                raise InvariantError(f"level {level} protects blocks without content or of another level: {blocks}")
        if self.num_protected > self.capacity // 2:
            raise InvariantError(f"{self.num_protected} of {self.capacity} blocks are protected, more than half")
