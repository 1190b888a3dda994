# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
"""Mamba-2 layers (:class:`~chairlift.kernels.mamba2.Mamba2`), for decode steps and prompts, in three launches:
convolution, scan, and gated norm.

A program of the scan holds a panel of columns of one head's state in registers, in float32, and computes the row's
tokens one after the other. Between the launches, numbers have the model's dtype, as in the definition.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.mamba2 import Mamba2
from chairlift.kernels.recurrent import panel_width
from chairlift.kernels.triton.dependent import dependent_launch, wait_for_inputs
from chairlift.kernels.triton.gated_norm import gated_norm
from chairlift.kernels.triton.launch import power_of_2, state_warps
from chairlift.kernels.triton.short_conv import short_conv
from chairlift.kernels.triton.states import (
    StateRows,
    block_of,
    load_panel,
    result,
    row_tokens,
    softplus,
    store_panel,
    store_zeros,
    table_of,
)

__all__ = ["mamba2"]


@triton.jit
def _mamba_scan(
    out_ptr: tl.tensor, mixed_ptr: tl.tensor, given_ptr: tl.tensor, a_log_ptr: tl.tensor, dt_bias_ptr: tl.tensor,
    skip_ptr: tl.tensor, states_ptr: tl.tensor, offsets_ptr: tl.tensor, seq_lens_ptr: tl.tensor,
    table_rows_ptr: tl.tensor, table_ptr: tl.tensor, given_stride: tl.tensor, least_step: tl.tensor,
    most_step: tl.tensor, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, STATE_PAD: tl.constexpr,
    GROUPS: tl.constexpr, PANEL: tl.constexpr, PANEL_PAD: tl.constexpr, STEP_FACTOR: tl.constexpr, SPAN: tl.constexpr,
    TABLE_WIDTH: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel of the scan. One program per row, and head and panel of its columns."""
    row = tl.program_id(0)
    head = tl.program_id(1) // (HEAD_DIM // PANEL)
    group = head // (HEADS // GROUPS) * STATE
    i = tl.arange(0, STATE_PAD)
    j = tl.arange(0, PANEL_PAD)
    wait_for_inputs(PDL)
    start, places, count, first = row_tokens(row, offsets_ptr, seq_lens_ptr)
    if places <= 0:
        return
    INNER: tl.constexpr = HEADS * HEAD_DIM
    CHANNELS: tl.constexpr = INNER + 2 * GROUPS * STATE
    column = tl.program_id(1) * PANEL + j  # panels of all heads are neighbours
    own = j < PANEL
    store_zeros(out_ptr + column, start, count, places, own, INNER)
    table = table_of(row, table_ptr, table_rows_ptr, TABLE_WIDTH)
    before = block_of(table, first - 1, count > 0, SPAN, TABLE_WIDTH)
    state = load_panel(states_ptr, before, STATE, STATE_PAD, PANEL, PANEL_PAD)
    fade = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    skip = tl.load(skip_ptr + head).to(tl.float32)
    for t in range(0, count):
        token = (start + t).to(tl.int64)
        mixed = mixed_ptr + token * CHANNELS
        x = tl.load(mixed + column, mask=own, other=0.0).to(tl.float32)
        b = tl.load(mixed + (INNER + group) + i, mask=i < STATE, other=0.0).to(tl.float32)
        c = tl.load(mixed + (INNER + GROUPS * STATE + group) + i, mask=i < STATE, other=0.0).to(tl.float32)
        given = tl.load(given_ptr + token * given_stride + (INNER + CHANNELS) + head).to(tl.float32)
        step = softplus(given * STEP_FACTOR + bias)
        step = tl.minimum(tl.maximum(step, least_step), most_step)
        state = state * tl.exp(fade * step) + b[:, None] * (x * step)[None, :]
        y = tl.sum(state * c[:, None], axis=0) + skip * x
        tl.store(out_ptr + token * INNER + column, y.to(out_ptr.dtype.element_ty), mask=own)
        if (t + 1 == count) | ((first + t + 1) % SPAN == 0):
            block = block_of(table, first + t, count > 0, SPAN, TABLE_WIDTH)
            store_panel(states_ptr, block, state, STATE, STATE_PAD, PANEL, PANEL_PAD)


def mamba2(
    cell: Mamba2, given: Tensor, states: tuple[Tensor, Tensor], rows: StateRows, *, factors: Tensor | None = None
) -> Tensor:
    """The Mamba-2 layer ``cell`` over the rows of a step.

    Args:
        cell: its weights and sizes.
        given: [T, gate | x, B, C | time steps] as in :class:`Mamba2`, rows contiguous.
        states: the two parts of the states, each [blocks, ...], contiguous. They are read and updated.
        rows: which tokens belong to which row, and where its states are.
        factors: float32, factors of the convolution's inputs (:meth:`ShortConv.channel_factors`).

    Returns:
        [T, I] in the dtype of ``given``. Padding rows are zeros.
    """
    shape = cell.shape
    tails, kept = states
    mixed = short_conv(cell.conv, given, tails, rows, factors=factors, column=shape.inner)
    y = result(given, shape.inner, rows)
    panel = panel_width(shape.head_dim)
    state_pad = power_of_2(shape.state_size)
    panel_pad = power_of_2(panel)
    if num_rows := len(rows.seq_lens):
        _mamba_scan[(num_rows, shape.inner // panel)](
            y, mixed, given, cell.a_log, cell.dt_bias, cell.skip, kept, rows.offsets, rows.seq_lens, rows.table_rows,
            rows.table, given.stride(0), float(shape.time_limit[0]), float(shape.time_limit[1]), HEADS=shape.heads,
            HEAD_DIM=shape.head_dim, STATE=shape.state_size, STATE_PAD=state_pad, GROUPS=shape.groups, PANEL=panel,
            PANEL_PAD=panel_pad, STEP_FACTOR=shape.step_factor, SPAN=rows.span, TABLE_WIDTH=rows.table.shape[1],
            num_warps=state_warps(state_pad, panel_pad), **dependent_launch(given.device),
        )  # fmt: skip
    return gated_norm(
        y, given, cell.norm, eps=shape.norm_eps, groups=shape.norm_groups, norm_first=shape.norm_first,
        factor=shape.gate_factor,
    )  # fmt: skip
