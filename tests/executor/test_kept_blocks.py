"""Which blocks lack a drafting layer's KV: marks follow rows, copies, saved blocks and stops."""

from __future__ import annotations

from typing import Any

import numpy as np

from chairlift.core.kv_cache.manager import NewBlocks
from chairlift.core.scheduler.output import NewRow, SchedulerOutput
from chairlift.executor.drafters.kept_blocks import KeptBlocks

SIZE = 4
"""Tokens per block."""


def row(slot: int, table: list[int], computed: int = 0) -> NewRow:
    """A row whose table in group 1 is ``table``. Its blocks in group 0 have other marks."""
    return NewRow(slot, f"r{slot}", [5] * 40, 40, computed, [[90 + block for block in table], table], None)


class Marks:
    """The class under test, with three slots whose hidden states are kept or not."""

    def __init__(self) -> None:
        self.blocks, self.keeps = KeptBlocks(1, 200, SIZE), np.array([True, True, True])

    def step(self, **fields: Any) -> None:
        out = SchedulerOutput(0, **fields)
        self.blocks.joined(out)
        self.blocks.grew(out, self.keeps)

    def lack(self, *table: int, computed: int | None = None) -> bool:
        """Whether a new row with these shared blocks, of which all positions are computed, lacks KV."""
        return not self.blocks.has_all(row(2, list(table), SIZE * len(table) if computed is None else computed))


def test_blocks_that_a_row_computes_without_the_layer_lack_its_kv() -> None:
    marks = Marks()
    marks.keeps[1] = False
    marks.step(joined=[row(0, [1, 2, 3]), row(1, [1, 5, 6], computed=SIZE)])
    assert not marks.lack(1, 2, 3) and not marks.lack(1) and not marks.lack()
    assert marks.lack(1, 5) and marks.lack(6)
    assert not marks.lack(1, 5, 6, computed=SIZE) and marks.lack(1, 5, 6, computed=SIZE + 1)
    marks.step(left=[1], joined=[row(2, [5, 7])])  # block 5 is computed again, with the layer
    assert not marks.lack(5) and marks.lack(6)


def test_blocks_that_a_row_gets_later_are_marked() -> None:
    marks = Marks()
    marks.keeps[1] = False
    marks.step(joined=[row(0, [1]), row(1, [2])])
    marks.step(new_blocks=[(0, NewBlocks(1, 1, [3])), (1, NewBlocks(1, 1, [4, 5])), (1, NewBlocks(0, 1, [6, 3]))])
    assert not marks.lack(1, 3) and not marks.lack(6) and marks.lack(4) and marks.lack(5)


def test_a_block_that_is_partly_computed_keeps_its_mark() -> None:
    marks = Marks()
    marks.keeps[1] = False
    marks.step(joined=[row(0, [1]), row(1, [2])])
    marks.keeps[:] = True, False, True
    marks.step(copies=[(1, 1, 10), (1, 2, 11), (0, 2, 12)], joined=[row(0, [10, 13], computed=3)])
    assert not marks.lack(10) and not marks.lack(13) and marks.lack(11) and not marks.lack(12)
    marks.step(joined=[row(1, [10, 14], computed=2)])
    assert marks.lack(10) and marks.lack(14)


def test_all_sources_of_copies_are_read_before_a_target_is_written() -> None:
    marks = Marks()
    marks.keeps[0] = False
    marks.step(joined=[row(0, [1])])
    marks.step(copies=[(1, 1, 2), (1, 2, 3)])
    assert marks.lack(2) and not marks.lack(3)


def test_saved_blocks_keep_their_marks() -> None:
    marks = Marks()
    marks.keeps[0] = False
    marks.step(joined=[row(0, [1]), row(1, [2])])
    marks.step(swap_out=[(1, 1, 70), (1, 2, 71), (0, 1, 72)])
    marks.step(joined=[row(1, [1, 2])])
    assert not marks.lack(1, 2)
    marks.step(swap_in=[(1, 70, 3), (1, 71, 4), (0, 70, 5)])
    assert marks.lack(3) and not marks.lack(4) and not marks.lack(5)
    marks.step(swap_out=[(1, 4, 70)])
    marks.step(swap_in=[(1, 70, 3)])
    assert not marks.lack(3)


def test_positions_that_the_layer_has_not_computed_at_a_stop_lack_its_kv() -> None:
    marks = Marks()
    marks.step(joined=[row(0, [1, 2, 3]), row(1, [4, 5, 6])])
    marks.step(new_blocks=[(0, NewBlocks(1, 3, [7]))])
    marks.blocks.stop([0], np.array([2 * SIZE, 0, 0], dtype=np.int32))
    assert not marks.lack(1, 2) and marks.lack(3) and marks.lack(7) and not marks.lack(4, 5, 6)
    marks.step(left=[0])
    marks.blocks.stop([0, 1], np.array([0, 2 * SIZE + 3, 0], dtype=np.int32))
    assert not marks.lack(1, 2) and not marks.lack(4, 5) and marks.lack(6)
