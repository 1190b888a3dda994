"""Host blocks, and who holds which: KV of preempted requests (swap preemption; vLLM, Kwon et al., SOSP 2023), and in
what that leaves free, blocks that the prefix cache has lost (hierarchical caches, as in SGLang and TensorRT-LLM)."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from chairlift.errors import InvariantError
from chairlift.kv_cache.prefix_node import PrefixNode

__all__ = ["SwapPool", "Swapped"]


@dataclasses.dataclass(frozen=True, slots=True)
class Swapped:
    """What is kept in host memory of one preempted request."""

    num_tokens: int
    """Leading positions that need not be computed again."""
    blocks: list[list[int]]
    """Per cache group the host blocks, for the table entries from the first that the next position can reach."""
    step: int
    """The step that saves them: if it does not run, nothing of this can be used."""


@dataclasses.dataclass(slots=True)
class _Kept:
    """A host block with what a prefix-cache node lost."""

    node: PrefixNode
    saved: int
    """The step that copies it here: it cannot be read before that has run."""
    used: int
    """The last step that reads or writes it, or that lost what it copies."""


class SwapPool:
    """Per cache group ``num_blocks`` host blocks with ids from 0 on.

    Host memory costs what has been touched, so the ids given back last, and then the lowest, are given out first.
    Blocks kept for prefix-cache nodes count as free while no step uses them: the least recently used goes first.
    """

    def __init__(self, num_blocks: Sequence[int]) -> None:
        self.num_blocks = tuple(num_blocks)
        self.lost: Callable[[int, PrefixNode], None] | None = None
        """Told the group and the node of a kept block that is given out again."""
        self._free = [list(reversed(range(count))) for count in num_blocks]
        self._kept: list[OrderedDict[int, _Kept]] = [OrderedDict() for _ in num_blocks]  # least recently used first
        self._deferred: list[tuple[int, int, list[int]]] = []  # (last step that uses them, group, blocks)
        self._done_step = -1

    @property
    def capacity(self) -> int:
        """Blocks of all groups together."""
        return sum(self.num_blocks)

    @property
    def num_used(self) -> int:
        """Blocks of all groups that hold a request's KV, or that a step in flight still uses."""
        return self.capacity - sum(map(self.num_free, range(len(self._free))))

    @property
    def num_kept(self) -> int:
        """Blocks of all groups that hold what prefix-cache nodes lost."""
        return sum(map(len, self._kept))

    def num_free(self, group: int) -> int:
        """Blocks of the group that can be given out now."""
        kept = self._kept[group]
        busy = next((i for i, each in enumerate(reversed(kept.values())) if each.used <= self._done_step), len(kept))
        return len(self._free[group]) + len(kept) - busy

    def allocate(self, group: int, count: int) -> list[int]:
        """Give out ``count`` blocks. The caller has checked :meth:`num_free`."""
        free, kept = self._free[group], self._kept[group]
        given = [free.pop() for _ in range(min(count, len(free)))]
        while len(given) < count:
            host, oldest = kept.popitem(last=False)
            given.append(host)
            if self.lost is not None:
                self.lost(group, oldest.node)
        return given

    def keep(self, group: int, node: PrefixNode, step: int) -> int | None:
        """Give out a block to which ``step`` copies what ``node`` loses; None where there is none."""
        oldest = next(iter(self._kept[group].values()), None)
        if not self._free[group] and (oldest is None or oldest.used > self._done_step):
            return None
        (host,) = self.allocate(group, 1)
        self._kept[group][host] = _Kept(node, step, step)
        return host

    def is_readable(self, group: int, host: int) -> bool:
        """Whether what was kept in a block has arrived there."""
        return self._kept[group][host].saved <= self._done_step

    def touch(self, group: int, host: int, step: int) -> None:
        """Step ``step`` reads what is kept in a block, or loses the block that it copies."""
        self._kept[group][host].used = step
        self._kept[group].move_to_end(host)

    def drop(self, group: int, host: int) -> None:
        """What is kept in a block is not wanted any more."""
        self.release(group, [host], self._kept[group].pop(host).used)

    def saved_in(self, step: int) -> list[tuple[int, PrefixNode]]:
        """The groups and nodes for which ``step`` copies a block to host memory."""
        every = [(group, each) for group, kept in enumerate(self._kept) for each in kept.values()]
        return [(group, each.node) for group, each in every if each.saved == step]

    def release(self, group: int, blocks: list[int], step: int) -> None:
        """Take blocks back, once ``step`` has run: the last one that reads or writes them."""
        if step <= self._done_step:
            self._free[group] += reversed(blocks)
        elif blocks:
            self._deferred.append((step, group, blocks))

    def step_done(self, step: int) -> None:
        """Step ``step`` has run: what waited for it is free."""
        self._done_step = max(self._done_step, step)
        if self._deferred:
            waiting, self._deferred = self._deferred, []
            for last, group, blocks in waiting:
                self.release(group, blocks, last)

    def check_invariants(self, swapped: Iterable[Swapped]) -> None:
        """Raises InvariantError unless each block is free, deferred, kept, or named by exactly one of ``swapped``."""
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
