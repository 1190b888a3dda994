"""Remembers which blocks lack a drafting layer's KV, because no hidden states were kept when they were computed."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from chairlift.core.scheduler.output import NewRow, SchedulerOutput

__all__ = ["KeptBlocks"]


class KeptBlocks:
    """The blocks of one cache group, each with or without the drafting layer's KV.

    A block gets its mark when a row gets it to compute into: the block will have the layer's KV if the row's hidden
    states are kept. Copies and saved blocks take their marks along. So steps without new rows or blocks cost nothing.

    Args:
        group: Number of the cache group to which the layer belongs.
        num_blocks: Number of blocks of the group.
        block_size: Tokens per block.
    """

    def __init__(self, group: int, num_blocks: int, block_size: int) -> None:
        self._group = group
        self._block_size = block_size
        self._lacks = np.zeros(num_blocks, dtype=np.bool_)
        """Per block: whether it lacks the layer's KV."""
        self._saved: set[int] = set()
        """Blocks of the host memory that lack it."""
        self._tables: dict[int, list[int]] = {}
        """Slot -> block table of its row. The first entries may be outdated, if they left the row's window."""

    def joined(self, out: SchedulerOutput) -> None:
        """Note the copies and the new rows of a step. Call this before :meth:`has_all`."""
        group = self._group
        lacks = self._lacks
        saved = self._saved
        for slot in out.left:
            self._tables.pop(slot, None)
        for other, block, host in out.swap_out:
            if other == group:
                (saved.add if lacks[block] else saved.discard)(host)
        if copies := [(source, into) for other, source, into in out.copies if other == group]:
            sources, targets = zip(*copies, strict=True)
            lacks[list(targets)] = lacks[list(sources)]
        for other, host, block in out.swap_in:
            if other == group:
                lacks[block] = host in saved
        for row in out.joined:
            self._tables[row.slot] = list(row.block_ids[group])

    def has_all(self, row: NewRow) -> bool:
        """Whether the layer's KV exists in all blocks with positions of the row that are computed already."""
        count = -(-row.num_computed_tokens // self._block_size)
        return not (count and self._lacks[row.block_ids[self._group][:count]].any())

    def grew(self, out: SchedulerOutput, keeps: npt.NDArray[np.bool_]) -> None:
        """Mark the blocks that rows got in this step. ``keeps`` has, per slot, whether hidden states of the row are
        kept from this step on."""
        for row in out.joined:
            # A block that is partly computed keeps its mark if the row's hidden states are kept.
            table = row.block_ids[self._group]
            positions = row.num_computed_tokens
            self._lacks[table[-(-positions // self._block_size) :]] = lacking = not keeps[row.slot]
            self._lacks[table[positions // self._block_size :]] |= lacking
        for slot, blocks in out.new_blocks:
            if blocks.group == self._group:
                table = self._tables[slot]
                table[blocks.first :] = blocks.block_ids
                self._lacks[list(blocks.block_ids)] = not keeps[slot]

    def stop(self, slots: Iterable[int], counts: npt.NDArray[np.int32]) -> None:
        """Note that hidden states of the rows ``slots`` are no longer kept. ``counts`` has, per slot, the number of
        leading positions that have the layer's KV."""
        for slot in slots:
            if slot in self._tables:
                self._lacks[self._tables[slot][int(counts[slot]) // self._block_size :]] = True
