"""Blocks in host memory, and what they hold.

Some host blocks hold KV of preempted requests (swap preemption; vLLM, Kwon et al., SOSP 2023). The others hold blocks
that the prefix cache evicted (a hierarchical cache, as in SGLang and TensorRT-LLM).
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from chairlift.core.kv_cache.prefix_node import PrefixNode
from chairlift.errors import InvariantError

__all__ = ["SwapPool", "Swapped"]


@dataclasses.dataclass(frozen=True, slots=True)
class Swapped:
    """KV of one preempted request in host memory."""

    num_tokens: int
    """Number of leading positions whose KV is saved, so that they need not be computed again."""
    blocks: list[list[int]]
    """Per cache group: host blocks with the content of the block table's entries, beginning with the first entry that
    the next position still needs. With a sliding window, the entries before the window are not saved."""
    step: int
    """Index of the step that makes the copies. If it fails, none of the host blocks can be used."""


@dataclasses.dataclass(slots=True)
class _Kept:
    """A host block that holds the evicted content of a prefix-cache node."""

    node: PrefixNode
    saved: int
    """Index of the step that copies the content to this host block. The host block can be read after that step has
    ended."""
    used: int
    """Index of the last step that reads or writes this host block, or in which the block of its node is evicted."""


class SwapPool:
    """Host blocks of each cache group; ids begin at 0.

    The operating system allocates host memory only when it is first written. So blocks released last are used again
    first, and new blocks are taken in ascending order. Blocks that hold content of prefix-cache nodes count as free
    while no step uses them; the least recently used one is evicted first.
    """

    def __init__(self, num_blocks: Sequence[int]) -> None:
        self.num_blocks = tuple(num_blocks)
        self.lost: Callable[[int, PrefixNode], None] | None = None
        """Called with (group, node) when a block with the content of a prefix-cache node is allocated for other
        content."""
        self._free = [list(reversed(range(count))) for count in num_blocks]
        self._kept: list[OrderedDict[int, _Kept]] = [OrderedDict() for _ in num_blocks]
        """Per group: host block -> its evicted content, least recently used first."""
        self._deferred: list[tuple[int, int, list[int]]] = []  # (last step that uses them, group, blocks)
        self._done_step = -1

    @property
    def capacity(self) -> int:
        """Number of blocks, summed over all groups."""
        return sum(self.num_blocks)

    @property
    def num_used(self) -> int:
        """Number of host blocks that hold a request's KV or that a step in flight still uses, summed over all
        groups."""
        return self.capacity - sum(map(self.num_free, range(len(self._free))))

    @property
    def num_kept(self) -> int:
        """Number of blocks that hold evicted content of prefix-cache nodes, summed over all groups."""
        return sum(map(len, self._kept))

    def num_free(self, group: int) -> int:
        """Number of blocks of the group that can be allocated now."""
        kept = self._kept[group]
        busy = next((i for i, each in enumerate(reversed(kept.values())) if each.used <= self._done_step), len(kept))
        return len(self._free[group]) + len(kept) - busy

    def allocate(self, group: int, count: int) -> list[int]:
        """Allocate ``count`` blocks. :meth:`num_free` must be at least ``count``."""
        free = self._free[group]
        kept = self._kept[group]
        blocks = [free.pop() for _ in range(min(count, len(free)))]
        while len(blocks) < count:
            host, oldest = kept.popitem(last=False)
            blocks.append(host)
            if self.lost is not None:
                self.lost(group, oldest.node)
        return blocks

    def keep(self, group: int, node: PrefixNode, step: int) -> int | None:
        """Allocate a host block to which ``step`` copies the evicted block of ``node``; None if no host block is
        free."""
        oldest = next(iter(self._kept[group].values()), None)
        if not self._free[group] and (oldest is None or oldest.used > self._done_step):
            return None
        (host,) = self.allocate(group, 1)
        self._kept[group][host] = _Kept(node, step, step)
        return host

    def is_readable(self, group: int, host: int) -> bool:
        """Whether the host block of a prefix-cache node can be read: the step that copies the content to it has
        ended."""
        return self._kept[group][host].saved <= self._done_step

    def touch(self, group: int, host: int, step: int) -> None:
        """Note that ``step`` reads this host block of a prefix-cache node, or that the block of the node is evicted in
        ``step``."""
        self._kept[group][host].used = step
        self._kept[group].move_to_end(host)

    def drop(self, group: int, host: int) -> None:
        """Release a host block of a prefix-cache node, because its content is not needed any more."""
        self.release(group, [host], self._kept[group].pop(host).used)

    def saved_in(self, step: int) -> list[tuple[int, PrefixNode]]:
        """(group, node) of each prefix-cache node whose block ``step`` copies to host memory."""
        every = [(group, each) for group, kept in enumerate(self._kept) for each in kept.values()]
        return [(group, each.node) for group, each in every if each.saved == step]

    def release(self, group: int, blocks: list[int], step: int) -> None:
        """Release blocks after ``step``, which is the last step that reads or writes them."""
        if step <= self._done_step:
            self._free[group] += reversed(blocks)
        elif blocks:
            self._deferred.append((step, group, blocks))

    def step_done(self, step: int) -> None:
        """Free the blocks that waited for the end of ``step``."""
        self._done_step = max(self._done_step, step)
        if self._deferred:
            waiting = self._deferred
            self._deferred = []
            for last, group, blocks in waiting:
                self.release(group, blocks, last)

    def check_invariants(self, swapped: Iterable[Swapped]) -> None:
        """Raise InvariantError unless each block has exactly one state: free, waiting for a step, with content of a
        prefix-cache node, or in one of ``swapped``."""
        holders = [[list(free), list(kept)] for free, kept in zip(self._free, self._kept, strict=True)]
        for saved in swapped:
            for group, blocks in enumerate(saved.blocks):
                holders[group].append(blocks)
        for _, group, blocks in self._deferred:
            holders[group].append(blocks)
        for group, lists in enumerate(holders):
            if sorted(block for blocks in lists for block in blocks) != list(range(self.num_blocks[group])):
                raise InvariantError(f"the host blocks of group {group} are not all free or held, once each: {lists}")
        for group, kept in enumerate(self._kept):
            busy = [each.used > self._done_step for each in kept.values()]
            if any(each.node.hosts[group] != host for host, each in kept.items()) or busy != sorted(busy):
                raise InvariantError(f"host blocks kept in group {group} are unknown to their nodes, or out of order")
