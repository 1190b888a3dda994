"""Kinds of cache: they say what an entry of a block table holds. The manager treats all kinds alike."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

__all__ = ["CacheKind"]


@dataclasses.dataclass(frozen=True, slots=True)
class CacheKind:
    """Each table entry holds K and V of ``span`` positions. A token reads the newest ``reach`` positions, including its
    own.

    With ``reach`` None a token reads all positions (``full``). Otherwise, entries that no later token can read are
    released (``window(W)``).
    """

    span: int
    """Number of positions per table entry: a multiple of the block size."""
    reach: int | None = None
    stores_positions: ClassVar[bool] = True
    """Whether an entry stores data for each of its positions."""

    @property
    def releases(self) -> bool:
        """Whether a running request releases entries that it cannot read any more."""
        return self.reach is not None

    @property
    def grows(self) -> bool:
        """Whether a running request may need more entries than it had when it joined."""
        return True

    @property
    def share_unit(self) -> int:
        """If a shared prefix ends inside an entry, its length must be a multiple of this number."""
        return 1

    def num_entries(self, num_tokens: int) -> int:
        """Length of a table that covers the first ``num_tokens`` positions."""
        return -(-num_tokens // self.span)

    def max_entries(self, num_tokens: int, max_step_tokens: int) -> int:
        """Maximum number of entries that a request of ``num_tokens`` positions holds at once, if a step computes at
        most ``max_step_tokens`` of its tokens."""
        whole = self.num_entries(num_tokens)
        if self.reach is None:
            return whole
        return min(whole, self.num_entries(self.reach - 1 + max_step_tokens) + 1)

    def first_in_reach(self, position: int) -> int:
        """Index of the first table entry that the token at ``position`` may still read."""
        return 0 if self.reach is None else max(0, position - self.reach + 1) // self.span

    def continues_at(self, position: int, num_computed: int) -> bool:
        """Whether the token at ``position`` would read the right content from the table of a request with
        ``num_computed`` computed positions. Released entries are not considered."""
        return True

    def last_block(self, entry: int, block_size: int) -> int:
        """Index of the last block of ``block_size`` tokens in a table entry."""
        return (entry + 1) * (self.span // block_size) - 1

    def completed_by(self, block: int, block_size: int) -> int | None:
        """Index of the table entry that ends with block ``block``; None if no entry ends there."""
        entry, rest = divmod(block + 1, self.span // block_size)
        return None if rest else entry - 1
