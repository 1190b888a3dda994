"""Blocks of one cache group: reference counts and an LRU free list (PagedAttention; Kwon et al., SOSP 2023)."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from chairlift.errors import ConfigError, InvariantError

if TYPE_CHECKING:
    from chairlift.kv_cache.prefix_cache import PrefixNode

__all__ = ["NULL_BLOCK", "BlockPool"]

NULL_BLOCK = 0
"""Stands in a block table where a sliding window has passed. Never given out, never read."""


class BlockPool:
    """``num_blocks`` blocks with ids ``0 .. num_blocks - 1``; block 0 is the null block.

    A block is *used* while its reference count is above zero. A block that nobody uses but whose content the prefix
    cache knows is *cached*: it can be shared again, and is evicted, least recently used first, when the pool runs dry.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(f"a block pool needs at least 2 blocks (one is the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.nodes: list[PrefixNode | None] = [None] * num_blocks
        """The prefix-cache node that knows this block's content."""
        self.num_cached = 0
        # Front: next to be given out. Blocks without content go to the front, cached ones to the back.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def capacity(self) -> int:
        """Blocks that can be given out at all."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that can be given out now, cached ones included."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.capacity - len(self._free)

    def allocate(self) -> tuple[int, PrefixNode | None]:
        """Give out one block, and the prefix-cache node evicted for it, if any. The caller has checked ``num_free``."""
        block, _ = self._free.popitem(last=False)
        self.ref_counts[block] = 1
        evicted = self.nodes[block]
        if evicted is not None:
            self.nodes[block] = None
            self.num_cached -= 1
        return block, evicted

    def share(self, block: int) -> None:
        """One more block table names this block."""
        if self.ref_counts[block] == 0:
            del self._free[block]
            self.num_cached -= 1
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        """One block table less names this block."""
        count = self.ref_counts[block] - 1
        if count < 0 or block == NULL_BLOCK:
            raise InvariantError(f"block {block} was released more often than it was taken")
        self.ref_counts[block] = count
        if count == 0:
            self._free[block] = None
            if self.nodes[block] is None:
                self._free.move_to_end(block, last=False)
            else:
                self.num_cached += 1

    def attach(self, block: int, node: PrefixNode) -> None:
        """Remember that the prefix cache knows the content of this used block."""
        self.nodes[block] = node

    def detach(self, block: int) -> None:
        """The prefix cache no longer knows this block."""
        self.nodes[block] = None
        if self.ref_counts[block] == 0:
            self.num_cached -= 1
            self._free.move_to_end(block, last=False)

    def check_invariants(self, references: dict[int, int]) -> None:
        """Compare the books with ``references``, how often each block stands in a block table or a deferred release.

        Raises InvariantError.
        """
        for block in range(1, self.num_blocks):
            named = references.get(block, 0)
            if self.ref_counts[block] != named:
                raise InvariantError(
                    f"block {block} counts {self.ref_counts[block]} references, {named} tables name it"
                )
            if (self.ref_counts[block] == 0) != (block in self._free):
                raise InvariantError(
                    f"block {block}: reference count {self.ref_counts[block]} contradicts the free list"
                )
        if NULL_BLOCK in self._free or self.ref_counts[NULL_BLOCK] or self.nodes[NULL_BLOCK] is not None:
            raise InvariantError("the null block was given out")
        cached = sum(1 for block in self._free if self.nodes[block] is not None)
        if cached != self.num_cached:
            raise InvariantError(f"{cached} free blocks have cached content, but the pool counts {self.num_cached}")
