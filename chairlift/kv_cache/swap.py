"""Host blocks for the KV of preempted requests: who holds which (swap preemption; vLLM, Kwon et al., SOSP 2023)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from chairlift.errors import InvariantError

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


class SwapPool:
    """Per cache group ``num_blocks`` host blocks with ids from 0 on.

    Host memory costs what has been touched, so the ids given back last, and then the lowest, are given out first.
    """

    def __init__(self, num_blocks: Sequence[int]) -> None:
        self.num_blocks = tuple(num_blocks)
        self._free = [list(reversed(range(count))) for count in num_blocks]
        self._deferred: list[tuple[int, int, list[int]]] = []  # (last step that uses them, group, blocks)
        self._done_step = -1

    @property
    def capacity(self) -> int:
        """Blocks of all groups together."""
        return sum(self.num_blocks)

    @property
    def num_used(self) -> int:
        """Blocks of all groups that hold a request's KV, or that a step in flight still uses."""
        return self.capacity - sum(map(len, self._free))

    def num_free(self, group: int) -> int:
        """Blocks of the group that can be given out now."""
        return len(self._free[group])

    def allocate(self, group: int, count: int) -> list[int]:
        """Give out ``count`` blocks. The caller has checked :meth:`num_free`."""
        free = self._free[group]
        return [free.pop() for _ in range(count)]

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
        """Raises InvariantError unless each block is free, deferred, or named by exactly one of ``swapped``."""
        holders = [[list(free)] for free in self._free]
        for saved in swapped:
            for group, blocks in enumerate(saved.blocks):
                holders[group].append(blocks)
        for _, group, blocks in self._deferred:
            holders[group].append(blocks)
        for group, lists in enumerate(holders):
            if sorted(block for blocks in lists for block in blocks) != list(range(self.num_blocks[group])):
                raise InvariantError(f"the host blocks of group {group} are not all free or held, once each: {lists}")
