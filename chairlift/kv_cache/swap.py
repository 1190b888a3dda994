"""Host blocks and their owners.

Some blocks hold KV of preempted requests (swap preemption; vLLM, Kwon et al., SOSP 2023). The remaining ones hold
blocks that the prefix cache evicted (hierarchical caches, as in SGLang and TensorRT-LLM).
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from chairlift.errors import InvariantError
from chairlift.kv_cache.prefix_node import PrefixNode

__all__ = ["SwapPool", "Swapped"]


@dataclasses.dataclass(frozen=True, slots=True)
class Swapped:
    """KV of one preempted request in host memory."""

    num_tokens: int
    """Leading positions that need not be computed again."""
    blocks: list[list[int]]
    """Host blocks per cache group, from the first table entry that the next position can reach."""
    step: int
    """Step that copies the blocks. If it does not run, none of them can be used."""


@dataclasses.dataclass(slots=True)
class _Kept:
    """A host block with the evicted content of a prefix-cache node."""

    node: PrefixNode
    saved: int
    """Step that copies the content here. It can be read after that step has run."""
    used: int
    """Last step that reads or writes the host block, or evicts its node's block."""


class SwapPool:
    """Host blocks of each cache group, with ids from 0 on.

    Only touched host memory is really allocated, so the ids released last, and then the lowest, are given out first.
    Blocks kept for prefix-cache nodes count as free while no step uses them. The least recently used goes first.
    """

    def __init__(self, num_blocks: Sequence[int]) -> None:
        self.num_blocks = tuple(num_blocks)
        self.lost: Callable[[int, PrefixNode], None] | None = None
        """Called with (group, node) when a kept block is given out again."""
        self._free = [list(reversed(range(count))) for count in num_blocks]
        self._kept: list[OrderedDict[int, _Kept]] = [OrderedDict() for _ in num_blocks]  # least recently used first
        self._deferred: list[tuple[int, int, list[int]]] = []  # (last step that uses them, group, blocks)
        self._done_step = -1

    @property
    def capacity(self) -> int:
        """Number of blocks of all groups together."""
        return sum(self.num_blocks)

    @property
    def num_used(self) -> int:
        """Number of blocks that hold a request's KV or that a step in flight still uses, in all groups."""
        return self.capacity - sum(map(self.num_free, range(len(self._free))))

    @property
    def num_kept(self) -> int:
        """Number of blocks that hold evicted content of prefix-cache nodes, in all groups."""
        return sum(map(len, self._kept))

    def num_free(self, group: int) -> int:
        """Number of blocks of the group that can be given out now."""
        kept = self._kept[group]
        busy = next((i for i, each in enumerate(reversed(kept.values())) if each.used <= self._done_step), len(kept))
        return len(self._free[group]) + len(kept) - busy

    def allocate(self, group: int, count: int) -> list[int]:
        """Give out ``count`` blocks. :meth:`num_free` must be at least ``count``."""
        free, kept = self._free[group], self._kept[group]
        given = [free.pop() for _ in range(min(count, len(free)))]
        while len(given) < count:
            host, oldest = kept.popitem(last=False)
            given.append(host)
            if self.lost is not None:
                self.lost(group, oldest.node)
        return given

    def keep(self, group: int, node: PrefixNode, step: int) -> int | None:
        """Give out a host block to which ``step`` copies the evicted block of ``node``; None if there is none."""
        oldest = next(iter(self._kept[group].values()), None)
        if not self._free[group] and (oldest is None or oldest.used > self._done_step):
            return None
        (host,) = self.allocate(group, 1)
        self._kept[group][host] = _Kept(node, step, step)
        return host

    def is_readable(self, group: int, host: int) -> bool:
        """Whether the copy to a kept block has been made."""
        return self._kept[group][host].saved <= self._done_step

    def touch(self, group: int, host: int, step: int) -> None:
        """Note that ``step`` reads a kept block, or evicts its node's block."""
        self._kept[group][host].used = step
        self._kept[group].move_to_end(host)

    def drop(self, group: int, host: int) -> None:
        """Release a kept block whose content is not needed any more."""
        self.release(group, [host], self._kept[group].pop(host).used)

    def saved_in(self, step: int) -> list[tuple[int, PrefixNode]]:
        """(group, node) of each block that ``step`` copies to host memory."""
        every = [(group, each) for group, kept in enumerate(self._kept) for each in kept.values()]
        return [(group, each.node) for group, each in every if each.saved == step]

    def release(self, group: int, blocks: list[int], step: int) -> None:
        """Take blocks back once ``step`` has run, which is the last one that reads or writes them."""
        if step <= self._done_step:
            self._free[group] += reversed(blocks)
        elif blocks:
            self._deferred.append((step, group, blocks))

    def step_done(self, step: int) -> None:
        """Free the blocks that waited for ``step``, which has run."""
        self._done_step = max(self._done_step, step)
        if self._deferred:
            waiting, self._deferred = self._deferred, []
            for last, group, blocks in waiting:
                self.release(group, blocks, last)

    def check_invariants(self, swapped: Iterable[Swapped]) -> None:
        """Raise InvariantError unless each block is free, deferred, kept, or in exactly one of ``swapped``."""
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
