# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
"""Recurrent states in blocks: where a row's state is read and written, as kernels find it in device memory.

A row's block table has an entry for every ``span`` positions. The entry's block has the state after the newest token
at these positions. So a kernel reads the block of the position before the row's first token, and writes the state after
the row's last token and after each token that completes an entry. All of this is data, so a captured graph serves any
rows. A row whose first token has position 0 begins with zeros, and the old contents of its block are not read.

A program owns a part of the states of one row (some channels, or some columns of a head) and computes the row's tokens
in order. The order of operations of a token does not depend on the step. Therefore the bits of a row depend neither on
other rows nor on how its tokens are divided into steps.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "StateRows",
    "block_of",
    "load_panel",
    "result",
    "row_tokens",
    "softplus",
    "store_panel",
    "store_zeros",
    "table_of",
]


@dataclasses.dataclass(frozen=True, slots=True)
class StateRows:
    """The rows of a step, as recurrent layers of one cache group see them: N rows."""

    offsets: Tensor
    """int32 [N + 1], offsets of the rows in the flat batch."""
    seq_lens: Tensor
    """int32 [N], number of tokens in each sequence after this step; 0 in padding rows, whose states are neither read
    nor written."""
    table_rows: Tensor
    """int32 [N], for each row of the step, the index of its row in the block table."""
    table: Tensor
    """int32 [number of table rows, M], the block table, contiguous."""
    span: int
    """Number of positions that a table entry covers."""
    one_token: bool
    """Whether each row has one token."""


def result(given: Tensor, width: int, rows: StateRows, dtype: torch.dtype | None = None) -> Tensor:
    """Memory for the results [T, ``width``] of a layer with the input ``given`` [T, ...]; ``dtype`` None: that of
    ``given``. A step with prompts may be padded with tokens that belong to no row; their results are zeros."""
    make = given.new_empty if rows.one_token else given.new_zeros
    return make((len(given), width), dtype=dtype or given.dtype)


@triton.jit
def row_tokens(row: tl.tensor, offsets_ptr: tl.tensor, seq_lens_ptr: tl.tensor) -> tl.tensor:
    """(index in the batch of the row's first token, number of tokens that it has there, number of those to compute,
    position of the first). A padding row has a token in the batch, but none to compute."""
    start = tl.load(offsets_ptr + row)
    places = tl.load(offsets_ptr + row + 1) - start
    length = tl.load(seq_lens_ptr + row)
    count = tl.minimum(places, length)
    return start, places, count, length - count


@triton.jit
def table_of(row: tl.tensor, table_ptr: tl.tensor, table_rows_ptr: tl.tensor, TABLE_WIDTH: tl.constexpr) -> tl.tensor:
    """Pointer to the block table of a row. For a padding row it must not be read."""
    return table_ptr + tl.load(table_rows_ptr + row).to(tl.int64) * TABLE_WIDTH


@triton.jit
def block_of(
    table_ptr: tl.tensor, position: tl.tensor, wanted: tl.tensor, SPAN: tl.constexpr, TABLE_WIDTH: tl.constexpr
) -> tl.tensor:
    """Block with the state after ``position``, int64. -1 if it is not ``wanted``, if the position is -1, or if the
    position is past the table: such a row has ended, but the host hears of it one step later."""
    entry = position // SPAN
    held = wanted & (position >= 0) & (entry < TABLE_WIDTH)
    return tl.load(table_ptr + entry, mask=held, other=-1).to(tl.int64)


@triton.jit
def _panel(states_ptr: tl.tensor, block: tl.tensor, i: tl.tensor, j: tl.tensor, ROWS: tl.constexpr,
           COLUMNS: tl.constexpr) -> tl.tensor:  # fmt: skip
    """Pointers to this program's panel of a head's state in ``block``. The states are [blocks, heads, panels, ROWS,
    COLUMNS], and the second index of the grid counts heads and panels."""
    panel = block * tl.num_programs(1) + tl.program_id(1)
    return states_ptr + panel * (ROWS * COLUMNS) + i[:, None] * COLUMNS + j[None, :]


@triton.jit
def load_panel(
    states_ptr: tl.tensor, block: tl.tensor, ROWS: tl.constexpr, ROWS_PAD: tl.constexpr, COLUMNS: tl.constexpr,
    COLUMNS_PAD: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """This program's panel of the state in ``block``, float32 [ROWS_PAD, COLUMNS_PAD]; zeros if the block is -1.
    Afterwards the program may write the block: all of its threads have read."""
    i = tl.arange(0, ROWS_PAD)
    j = tl.arange(0, COLUMNS_PAD)
    # A vector, because the interpreter cannot combine a mask with a scalar.
    rows = (i < ROWS) & (i * 0 + block >= 0)
    inside = rows[:, None] & (j < COLUMNS)[None, :]
    panel = tl.load(_panel(states_ptr, block, i, j, ROWS, COLUMNS), mask=inside, other=0.0)
    tl.debug_barrier()
    return panel


@triton.jit
def store_panel(
    states_ptr: tl.tensor, block: tl.tensor, panel: tl.tensor, ROWS: tl.constexpr, ROWS_PAD: tl.constexpr,
    COLUMNS: tl.constexpr, COLUMNS_PAD: tl.constexpr,
) -> None:  # fmt: skip
    """Store this program's panel of a state in ``block``; -1 stores nothing."""
    i = tl.arange(0, ROWS_PAD)
    j = tl.arange(0, COLUMNS_PAD)
    rows = (i < ROWS) & (i * 0 + block >= 0)
    tl.store(_panel(states_ptr, block, i, j, ROWS, COLUMNS), panel, mask=rows[:, None] & (j < COLUMNS)[None, :])


@triton.jit
def store_zeros(
    out_ptr: tl.tensor, start: tl.tensor, count: tl.tensor, places: tl.tensor, inside: tl.tensor, WIDTH: tl.constexpr
) -> None:
    """Store zeros as the results of a padding row: of its tokens ``count`` to ``places - 1``, in the columns to which
    ``out_ptr`` points. Each result has ``WIDTH`` columns."""
    for t in range(count, places):
        place = (start + t).to(tl.int64) * WIDTH
        tl.store(out_ptr + place, tl.zeros(inside.shape, dtype=out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softplus(x: tl.tensor) -> tl.tensor:
    """ln(1 + e^x) = max(x, 0) + ln(1 + u) with u = e^-|x|, and ln(1 + u) = 2 artanh(u / (2 + u)). The relative error
    is below 5e-7, also where 1 + u would be rounded to 1."""
    u = tl.exp(-tl.abs(x))
    s = u / (2.0 + u)
    q = s * s
    p = 1.0 / 13.0 + q * (1.0 / 15.0)
    p = 1.0 / 11.0 + q * p
    p = 1.0 / 9.0 + q * p
    p = 1.0 / 7.0 + q * p
    p = 1.0 / 5.0 + q * p
    p = 1.0 / 3.0 + q * p
    return tl.maximum(x, 0.0) + 2.0 * s * (1.0 + q * p)
