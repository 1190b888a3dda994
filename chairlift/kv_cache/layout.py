"""The cache groups of a model, and how many blocks a table takes in each.

A *group* is a set of layers that keep the same positions: ``full`` keeps all of them, ``window(W)`` the last W. Every
group has a pool of its own; a request has one table per group.
"""

from __future__ import annotations

from collections.abc import Sequence

from chairlift.config import CacheGroup
from chairlift.errors import ConfigError

__all__ = ["CacheLayout"]


class CacheLayout:
    """Cache groups with their block size.

    ``max_step_tokens`` is the most tokens that one step computes for one request. A window group must hold a window and
    the new tokens of one step at once. Raises ConfigError for a bad block size and for no groups.
    """

    def __init__(self, groups: Sequence[CacheGroup], block_size: int, max_step_tokens: int) -> None:
        if block_size not in {1, 2, 4, 8, 16, 32, 64, 128, 256}:
            raise ConfigError(f"block_size must be a power of two from 1 to 256, got {block_size}")
        if not groups:
            raise ConfigError("a KV cache needs at least one cache group")
        self.groups = tuple(groups)
        self.block_size = block_size
        self.max_step_tokens = max_step_tokens

    def blocks_for(self, group: int, num_tokens: int) -> int:
        """Largest number of blocks that a request of ``num_tokens`` positions holds at once in ``group``."""
        whole = -(-num_tokens // self.block_size)
        window = self.groups[group].window
        if window is None:
            return whole
        return min(whole, -(-(window - 1 + self.max_step_tokens) // self.block_size) + 1)

    def first_in_reach(self, group: int, position: int) -> int:
        """Index of the first table entry that the token at ``position`` may still attend to."""
        window = self.groups[group].window
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def admission_blocks(self, group: int, known: int, reserve: int) -> int:
        """Number of table entries after admission with ``known`` shared tokens and ``reserve`` reserved positions."""
        whole = -(-max(reserve, known + 1) // self.block_size)
        return min(whole, self.first_in_reach(group, known) + self.blocks_for(group, reserve))
