# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
"""The causal convolution over a few tokens of :class:`~chairlift.kernels.short_conv.ShortConv`, for decode steps and
prompts.

Every product is added by one fused operation, tap by tap, so the bits do not depend on the size of a tile. The inputs
before a row's first token come from its state.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.short_conv import ShortConv
from chairlift.kernels.triton.dependent import dependent_launch, wait_for_inputs
from chairlift.kernels.triton.launch import conv_tile, power_of_2
from chairlift.kernels.triton.states import StateRows, block_of, result, row_tokens, table_of

__all__ = ["short_conv"]


@triton.jit
def _inputs(
    x_ptr: tl.tensor, tail_ptr: tl.tensor, before: tl.tensor, start: tl.tensor, i: tl.tensor, count: tl.tensor,
    c: tl.tensor, x_stride: tl.tensor, CHANNELS: tl.constexpr, TAPS: tl.constexpr, GATED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Inputs of the convolution at the row's tokens ``i`` in channels ``c``, in the dtype of x. Negative tokens are
    those in the state at ``tail_ptr``; zeros if the block ``before`` is -1."""
    inside = (c < CHANNELS)[None, :]
    new = ((i >= 0) & (i < count))[:, None] & inside
    row = x_ptr + (start + i).to(tl.int64)[:, None] * x_stride + c[None, :]
    if GATED:
        b = tl.load(row, mask=new, other=0.0)
        x = tl.load(row + 2 * CHANNELS, mask=new, other=0.0)
        x = (b.to(tl.float32) * x.to(tl.float32)).to(x.dtype)
    else:
        x = tl.load(row, mask=new, other=0.0)
    # A vector, because the interpreter cannot combine a mask with a scalar.
    old = ((i < 0) & (i * 0 + before >= 0))[:, None] & inside
    kept = tl.load(tail_ptr + (i + (TAPS - 1))[:, None] * CHANNELS + c[None, :], mask=old, other=0.0)
    return tl.where((i >= 0)[:, None], x, kept.to(x.dtype))


@triton.jit
def _convolve(
    out_ptr: tl.tensor, x_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor, factors_ptr: tl.tensor,
    states_ptr: tl.tensor, offsets_ptr: tl.tensor, seq_lens_ptr: tl.tensor, table_rows_ptr: tl.tensor,
    table_ptr: tl.tensor, x_stride: tl.tensor, COLUMN: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    TAPS_PAD: tl.constexpr, SPAN: tl.constexpr, TABLE_WIDTH: tl.constexpr, GATED: tl.constexpr, SILU: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Convolution kernel. One program per row and block of channels. The state is read before it is written."""
    row = tl.program_id(0)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < CHANNELS
    wait_for_inputs(PDL)
    start, places, count, first = row_tokens(row, offsets_ptr, seq_lens_ptr)
    if places <= 0:
        return
    x_ptr += COLUMN
    table = table_of(row, table_ptr, table_rows_ptr, TABLE_WIDTH)
    before = block_of(table, first - 1, count > 0, SPAN, TABLE_WIDTH)
    tail_ptr = states_ptr + before * ((TAPS - 1) * CHANNELS)
    t = tl.arange(0, BLOCK_T)
    for at in range(0, places, BLOCK_T):
        y = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            i = at + t + (tap - TAPS + 1)
            x = _inputs(x_ptr, tail_ptr, before, start, i, count, c, x_stride, CHANNELS, TAPS, GATED)
            weight = tl.load(weight_ptr + c * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
            if factors_ptr is not None:
                weight *= tl.load(factors_ptr + c, mask=inside, other=0.0)
            y = tl.fma(x.to(tl.float32), tl.broadcast_to(weight[None, :], [BLOCK_T, BLOCK_C]), y)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + c, mask=inside, other=0.0).to(tl.float32)[None, :]
        if SILU:
            y = y / (1.0 + tl.exp(-y))
        token = start + at + t
        real = (at + t < count)[:, None] & inside[None, :]
        if GATED:
            gates = x_ptr + token.to(tl.int64)[:, None] * x_stride + (CHANNELS + c)[None, :]
            gate = tl.load(gates, mask=real, other=0.0)
            y = gate.to(tl.float32) * y.to(gate.dtype).to(tl.float32)
        y = tl.where(real, y, 0.0).to(out_ptr.dtype.element_ty)
        here = (at + t < places)[:, None] & inside[None, :]
        tl.store(out_ptr + token.to(tl.int64)[:, None] * CHANNELS + c[None, :], y, mask=here)
    j = tl.arange(0, TAPS_PAD)
    oldest = first // SPAN
    newest = (first + count - 1) // SPAN
    # The newest state first, because the oldest may replace the state that all of them read.
    for back in range(0, tl.where(count > 0, newest - oldest + 1, 0)):
        entry = newest - back
        end = count
        if back > 0:
            end = (entry + 1) * SPAN - first
        block = block_of(table, entry * SPAN, count > 0, SPAN, TABLE_WIDTH)
        values = _inputs(
            x_ptr, tail_ptr, before, start, end - (TAPS - 1) + j, count, c, x_stride, CHANNELS, TAPS, GATED
        )
        tl.debug_barrier()
        kept = ((j < TAPS - 1) & (j * 0 + block >= 0))[:, None] & inside[None, :]
        place = states_ptr + block * ((TAPS - 1) * CHANNELS) + j[:, None] * CHANNELS + c[None, :]
        tl.store(place, values.to(states_ptr.dtype.element_ty), mask=kept)


def short_conv(
    cell: ShortConv,
    x: Tensor,
    states: Tensor,
    rows: StateRows,
    *,
    factors: Tensor | None = None,
    column: int = 0,
    rounded: bool = True,
) -> Tensor:
    """The convolution ``cell`` over the rows of a step.

    Args:
        cell: its weights and settings.
        x: [T, at least ``column`` plus the cell's input width], rows contiguous; the input begins at ``column``.
        states: [blocks, K - 1, W] in x's dtype, contiguous. They are read and updated.
        rows: which tokens belong to which row, and where its states are.
        factors: float32 [W], factors of the channels' inputs (:meth:`ShortConv.channel_factors`).
        rounded: Whether the result has x's dtype; otherwise float32.

    Returns:
        [T, W]. Padding rows are zeros.
    """
    out = result(x, cell.channels, rows, x.dtype if rounded else torch.float32)
    num_rows = len(rows.seq_lens)
    tokens, channels, warps = conv_tile(cell.channels, one_token=rows.one_token)
    if num_rows:
        _convolve[(num_rows, -(-cell.channels // channels))](
            out, x, cell.weight, cell.bias, factors, states, rows.offsets, rows.seq_lens, rows.table_rows, rows.table,
            x.stride(0), COLUMN=column, CHANNELS=cell.channels, TAPS=cell.taps, TAPS_PAD=power_of_2(cell.taps - 1),
            SPAN=rows.span, TABLE_WIDTH=rows.table.shape[1], GATED=cell.gated, SILU=cell.silu, BLOCK_T=tokens,
            BLOCK_C=channels, num_warps=warps, **dependent_launch(x.device),
        )  # fmt: skip
    return out
