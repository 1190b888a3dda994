"""What changes in block tables, and how full they are."""

from __future__ import annotations

import dataclasses

__all__ = ["Admission", "BlockCounts", "NewBlocks", "TableChange"]

TableChange = tuple[str, int, int, list[int], list[int]]
"""(request id, group, first, blocks it has from entry ``first`` on, blocks given back); ``first`` = -n: its first n."""


@dataclasses.dataclass(frozen=True, slots=True)
class NewBlocks:
    """Blocks appended to one table, from entry ``first`` on."""

    group: int
    first: int
    block_ids: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """What a request starts with."""

    num_computed_tokens: int
    """Leading positions whose KV is already there."""
    copies: list[tuple[int, int, int]]
    """(group, source block, destination block) to copy before the step's first write."""
    swap_in: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    """(group, host block, block) to bring back from host memory before the step's first write."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks of all groups together: ``free + used + cached`` is the whole."""

    free: int
    used: int
    cached: int
