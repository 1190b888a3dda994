"""The cache groups of a model, and how many blocks a request needs in each.

A *group* is a set of layers that store the same positions: ``full`` stores all positions, ``window(W)`` the last W, and
``state`` has recurrent states instead of positions. Every group has its own block pool; a request has one block table
per group. The group's :class:`~chairlift.core.kv_cache.cache_kind.CacheKind` says what an entry of the table holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from chairlift.config import CacheGroup
from chairlift.core.kv_cache.cache_kind import CacheKind
from chairlift.core.kv_cache.state_kind import StateKind
from chairlift.errors import ConfigError

__all__ = ["CacheLayout"]


class CacheLayout:
    """The cache groups of a model and their block size.

    ``max_step_tokens`` is the maximum number of tokens that one step computes for
    one request. A group with a sliding window needs it, because it holds a window and the new tokens of a step at the
    same time. A model that keeps nothing between two steps has no groups. Raises ConfigError for a bad block size, and
    if the number of positions per recurrent state is not a multiple of the block size.
    """

    def __init__(self, groups: Sequence[CacheGroup], block_size: int, max_step_tokens: int) -> None:
        if block_size not in {1, 2, 4, 8, 16, 32, 64, 128, 256}:
            raise ConfigError(f"block_size must be a power of two from 1 to 256, got {block_size}")
        self.groups = tuple(groups)
        self.block_size = block_size
        self.max_step_tokens = max_step_tokens
        self.kinds = tuple(_kind_of(group, block_size) for group in groups)
        """One entry per cache group: the kind of cache."""
        self.share_unit = max((kind.share_unit for kind in self.kinds), default=1)
        """Two requests may share only prefixes whose length is a multiple of this number."""

    def blocks_for(self, group: int, num_tokens: int) -> int:
        """Maximum number of blocks that a request of ``num_tokens`` positions holds at once in ``group``."""
        return self.kinds[group].max_entries(num_tokens, self.max_step_tokens)

    def first_in_reach(self, group: int, position: int) -> int:
        """Index of the first table entry that the token at ``position`` may still read."""
        return self.kinds[group].first_in_reach(position)

    def admission_blocks(self, group: int, known: int, reserve: int) -> int:
        """Number of entries in a request's block table after its admission. ``known`` is the number of shared
        positions; the request gets blocks for ``reserve`` positions."""
        whole = self.kinds[group].num_entries(max(reserve, known + 1))
        return min(whole, self.first_in_reach(group, known) + self.blocks_for(group, reserve))

    def agreed(self, num_blocks: int, has: Callable[[int, int], bool]) -> int:
        """Number of leading blocks, at most ``num_blocks``, that every group has, so that a request can continue after
        them. ``has`` takes (group, index of a block). A window group needs only the blocks inside its window."""
        hit = num_blocks
        for group, kind in enumerate(self.kinds):
            if not kind.releases:
                hit = next((index for index in range(hit) if not has(group, index)), hit)
        while hit and not self._continues(hit, has):
            hit -= 1
        return hit

    def _continues(self, num_blocks: int, has: Callable[[int, int], bool]) -> bool:
        known = num_blocks * self.block_size
        return all(
            known % kind.share_unit == 0 and all(has(group, index) for index in self.in_reach(group, num_blocks))
            for group, kind in enumerate(self.kinds)
        )

    def in_reach(self, group: int, num_blocks: int) -> list[int]:
        """Indices of the blocks whose table entries the token after ``num_blocks`` full blocks reads in ``group``."""
        kind = self.kinds[group]
        known = num_blocks * self.block_size
        entries = range(self.first_in_reach(group, known), kind.num_entries(known))
        return [kind.last_block(entry, self.block_size) for entry in entries]


def _kind_of(group: CacheGroup, block_size: int) -> CacheKind:
    span = group.state_span
    if span is None:
        return CacheKind(block_size, group.window)
    if span < 1 or span % block_size or group.window is not None:
        raise ConfigError(
            f"state_span must be a multiple of block_size {block_size}, without a window; got {span}, {group.window}"
        )
    return StateKind(span)
