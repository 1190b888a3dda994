"""Blocks of one cache group: reference counts, and a free list (PagedAttention; Kwon et al., SOSP 2023)."""

from __future__ import annotations

from chairlift.core.kv_cache.eviction.block_times import BlockTimes
from chairlift.core.kv_cache.eviction.lru import LRU
from chairlift.core.kv_cache.eviction.rule import EvictionRule
from chairlift.core.kv_cache.prefix_node import PrefixNode
from chairlift.errors import ConfigError, InvariantError

__all__ = ["NULL_BLOCK", "BlockPool"]

NULL_BLOCK = 0
"""Entry of a block table at positions that a sliding window has passed. This block is never allocated and never
read."""


class BlockPool:
    """``num_blocks`` blocks with ids ``0 .. num_blocks - 1``; block 0 is the null block.

    A block is *used* while its reference count is above zero. An unused block is *cached* if the prefix cache knows its
    content; then it can be shared again. When the pool has no other block, a cached block is evicted. ``eviction`` says
    which one (default: the least recently used).
    """

    def __init__(self, num_blocks: int, eviction: EvictionRule | None = None) -> None:
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
        self._blank = list(range(num_blocks - 1, 0, -1))
        """Unused blocks without content. The last one is allocated next."""
        self.times = BlockTimes(num_blocks)
        self._rule = eviction or LRU()
        self._cached = self._rule.order(self.capacity)

    @property
    def capacity(self) -> int:
        """Number of blocks without the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated now, including cached blocks."""
        return len(self._blank) + self.num_cached

    @property
    def num_used(self) -> int:
        return self.capacity - self.num_free

    def allocate(self) -> tuple[int, PrefixNode | None]:
        """Allocate one block. Returns (block, prefix-cache node that was evicted for it or None). ``num_free`` must be
        above 0."""
        if self._blank:
            block = self._blank.pop()
            self.ref_counts[block] = 1
            return block, None
        block = self._cached.pop()
        self.times.evicted(block, self._rule.now)
        self.ref_counts[block] = 1
        evicted = self.nodes[block]
        self.nodes[block] = None
        self.num_cached -= 1
        return block, evicted

    def share(self, block: int) -> None:
        """Count one more block table that contains this block."""
        if self.ref_counts[block] == 0:
            self._cached.remove(block)
            self.times.reused(block, self._rule.now)
            self.num_cached -= 1
        else:
            self.num_shares += 1
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        """Count one block table less that contains this block. When no table contains it, it becomes cached if it has
        content, otherwise free."""
        count = self.ref_counts[block] - 1
        if count < 0 or block == NULL_BLOCK:
            raise InvariantError(f"block {block} was released more often than it was taken")
        self.ref_counts[block] = count
        if count == 0:
            if self.nodes[block] is None:
                self._blank.append(block)
            else:
                self.num_cached += 1
                self.times.released(block, self._rule.now)
                self._cached.add(block)
        else:
            self.num_shares -= 1

    def attach(self, block: int, node: PrefixNode) -> None:
        """Note that the prefix cache knows the content of this used block."""
        self.nodes[block] = node
        self.times.filled(block, self._rule.now)

    def detach(self, block: int) -> None:
        """Note that the prefix cache no longer knows the content of this block."""
        self.nodes[block] = None
        if self.ref_counts[block] == 0:
            self.num_cached -= 1
            self._cached.remove(block)
            self._blank.append(block)
        self._cached.forget(block)

    def check_invariants(self, references: dict[int, int]) -> None:
        """Compare all counts with ``references``: block -> number of block tables and deferred releases that contain
        it.

        Raises InvariantError.
        """
        cached = list(self._cached)
        free = [*self._blank, *cached]
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
        if len(cached) != self.num_cached or any(self.nodes[block] is None for block in cached):
            raise InvariantError(f"{len(cached)} free blocks may be evicted, but {self.num_cached} have cached content")
        if any(self.nodes[block] is not None for block in self._blank):
            raise InvariantError(f"blocks {self._blank} are free without content, but one of them has some")
        self._cached.check_invariants()
