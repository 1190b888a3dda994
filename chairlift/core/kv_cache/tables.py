"""Records of changes in block tables, and counts of blocks."""

from __future__ import annotations

import dataclasses

__all__ = ["Admission", "BlockCounts", "NewBlocks", "TableChange"]

TableChange = tuple[str, int, int, list[int], list[int]]
"""(request id, group, first, new blocks from entry ``first`` on, released blocks) of one change of a block table.
``first`` = -n means that the window has passed the first n entries."""


@dataclasses.dataclass(frozen=True, slots=True)
class NewBlocks:
    """Blocks appended to one block table, from entry ``first`` on."""

    group: int
    first: int
    block_ids: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """Result of an admission: the KV with which the request starts."""

    num_computed_tokens: int
    """Number of leading positions whose KV is computed already."""
    copies: list[tuple[int, int, int]]
    """One entry per block to copy before the step's first write: (cache group, source block, destination block)."""
    swap_in: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    """One entry per block to copy from host memory before the step's first write: (cache group, host block, block)."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockCounts:
    """Numbers of blocks, summed over all groups. ``free + used + cached`` is the total."""

    free: int
    used: int
    cached: int
    shared: int = 0
    """Number of blocks that sharing saves: a block in the tables of three requests saves two."""
