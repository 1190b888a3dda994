"""Kinds of cache: the contents of a cache group's table entries. The manager treats all kinds alike."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

__all__ = ["CacheKind"]


@dataclasses.dataclass(frozen=True, slots=True)
class CacheKind:
    """K and V of ``span`` positions per table entry. A token reads the newest ``reach`` positions, its own included.

    With ``reach`` None it reads all of them (``full``), else entries behind its reach are released (``window(W)``).
    """

    span: int
    """Positions per table entry: a multiple of the block size."""
    reach: int | None = None
    stores_positions: ClassVar[bool] = True
    """Whether an entry has a place for each of its positions."""

    @property
    def releases(self) -> bool:
        """Whether a request gives entries back while it runs."""
        return self.reach is not None

    @property
    def grows(self) -> bool:
        """Whether a running request may need more entries than it joined with."""
        return True

    @property
    def share_unit(self) -> int:
        """A prefix that ends inside an entry can be shared if its length is a multiple of this."""
        return 1

    def num_entries(self, num_tokens: int) -> int:
        """Length of a table that covers the first ``num_tokens`` positions."""
        return -(-num_tokens // self.span)

    def most_entries(self, num_tokens: int, max_step_tokens: int) -> int:
        """Largest number of entries that a request of ``num_tokens`` positions holds at once, if a step computes at
        most ``max_step_tokens`` of them."""
        whole = self.num_entries(num_tokens)
        if self.reach is None:
            return whole
        return min(whole, self.num_entries(self.reach - 1 + max_step_tokens) + 1)

    def first_in_reach(self, position: int) -> int:
        """Index of the first table entry that the token at ``position`` may still read."""
        return 0 if self.reach is None else max(0, position - self.reach + 1) // self.span

    def continues_at(self, position: int, num_computed: int) -> bool:
        """Whether a table that was computed up to ``num_computed`` positions can serve the token at ``position``, as
        far as it still has the entries."""
        return True

    def last_block(self, entry: int, block_size: int) -> int:
        """Number of the block of ``block_size`` tokens with which a table entry is complete."""
        return (entry + 1) * (self.span // block_size) - 1

    def completed_by(self, block: int, block_size: int) -> int | None:
        """The table entry that is complete with block ``block``; None if it ends inside an entry."""
        entry, rest = divmod(block + 1, self.span // block_size)
        return None if rest else entry - 1
