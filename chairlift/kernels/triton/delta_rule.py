# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
"""The gated delta rule of :class:`~chairlift.kernels.delta_rule.DeltaRule`, for decode steps and prompts, in three
launches: convolution, scan, and gated norm.

A program of the scan holds a panel of columns of one head's state in registers, in float32, and computes the row's
tokens one after the other. Numbers between the launches are float32, too, so results are rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.delta_rule import L2_EPS, DeltaRule
from chairlift.kernels.short_conv import ShortConv
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

__all__ = ["delta_rule"]


@triton.jit
def _unit(x: tl.tensor, EPS: tl.constexpr) -> tl.tensor:
    """x divided by its length."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + EPS)


@triton.jit
def _delta_scan(
    out_ptr: tl.tensor, mixed_ptr: tl.tensor, rates_ptr: tl.tensor, decay_log_ptr: tl.tensor, step_bias_ptr: tl.tensor,
    states_ptr: tl.tensor, offsets_ptr: tl.tensor, seq_lens_ptr: tl.tensor, table_rows_ptr: tl.tensor,
    table_ptr: tl.tensor, rates_stride: tl.tensor, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PAD: tl.constexpr, VALUE_DIM: tl.constexpr, PANEL: tl.constexpr,
    PANEL_PAD: tl.constexpr, Q_FACTOR: tl.constexpr, EPS: tl.constexpr, SPAN: tl.constexpr, TABLE_WIDTH: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel of the scan. One program per row, and value head and panel of its columns."""
    row = tl.program_id(0)
    head = tl.program_id(1) // (VALUE_DIM // PANEL)
    key = head // (VALUE_HEADS // KEY_HEADS) * KEY_DIM
    i = tl.arange(0, KEY_PAD)
    j = tl.arange(0, PANEL_PAD)
    wait_for_inputs(PDL)
    start, places, count, first = row_tokens(row, offsets_ptr, seq_lens_ptr)
    if places <= 0:
        return
    column = tl.program_id(1) * PANEL + j  # panels of all heads are neighbours
    own = j < PANEL
    store_zeros(out_ptr + column, start, count, places, own, VALUE_HEADS * VALUE_DIM)
    table = table_of(row, table_ptr, table_rows_ptr, TABLE_WIDTH)
    before = block_of(table, first - 1, count > 0, SPAN, TABLE_WIDTH)
    memory = load_panel(states_ptr, before, KEY_DIM, KEY_PAD, PANEL, PANEL_PAD)
    fade = -tl.exp(tl.load(decay_log_ptr + head).to(tl.float32))
    bias = tl.load(step_bias_ptr + head).to(tl.float32)
    for t in range(0, count):
        token = (start + t).to(tl.int64)
        mixed = mixed_ptr + token * (2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM)
        q = _unit(tl.load(mixed + key + i, mask=i < KEY_DIM, other=0.0), EPS) * Q_FACTOR
        k = _unit(tl.load(mixed + (KEY_HEADS * KEY_DIM + key) + i, mask=i < KEY_DIM, other=0.0), EPS)
        v = tl.load(mixed + 2 * KEY_HEADS * KEY_DIM + column, mask=own, other=0.0)
        rates = rates_ptr + token * rates_stride + head
        rate = 1.0 / (1.0 + tl.exp(-tl.load(rates).to(tl.float32)))
        decay = tl.exp(fade * softplus(tl.load(rates + VALUE_HEADS).to(tl.float32) + bias))
        memory = memory * decay
        change = (v - tl.sum(memory * k[:, None], axis=0)) * rate
        memory = memory + k[:, None] * change[None, :]
        read = tl.sum(memory * q[:, None], axis=0)
        tl.store(out_ptr + token * (VALUE_HEADS * VALUE_DIM) + column, read, mask=own)
        if (t + 1 == count) | ((first + t + 1) % SPAN == 0):
            block = block_of(table, first + t, count > 0, SPAN, TABLE_WIDTH)
            store_panel(states_ptr, block, memory, KEY_DIM, KEY_PAD, PANEL, PANEL_PAD)


def delta_rule(
    cell: DeltaRule, inputs: tuple[Tensor, Tensor], states: tuple[Tensor, Tensor], rows: StateRows
) -> Tensor:
    """The gated delta rule ``cell`` over the rows of a step.

    Args:
        cell: its weights and sizes.
        inputs: the two inputs of :class:`DeltaRule`, [T, channels + values] and [T, 2 value heads], rows contiguous.
        states: the two parts of the states, each [blocks, ...], contiguous. They are read and updated.
        rows: which tokens belong to which row, and where its states are.

    Returns:
        [T, value heads * value_dim] in the dtype of the inputs. Padding rows are zeros.
    """
    (given, rates), (tails, memories) = inputs, states
    conv = ShortConv(cell.conv, None, silu=True)
    mixed = short_conv(conv, given, tails, rows, rounded=False)
    width = cell.value_heads * cell.value_dim
    read = result(mixed, width, rows)
    key_pad = power_of_2(cell.key_dim)
    panel_pad = power_of_2(cell.panel)
    if num_rows := len(rows.seq_lens):
        _delta_scan[(num_rows, width // cell.panel)](
            read, mixed, rates, cell.decay_log, cell.step_bias, memories, rows.offsets, rows.seq_lens, rows.table_rows,
            rows.table, rates.stride(0), KEY_HEADS=cell.key_heads, VALUE_HEADS=cell.value_heads, KEY_DIM=cell.key_dim,
            KEY_PAD=key_pad, VALUE_DIM=cell.value_dim, PANEL=cell.panel, PANEL_PAD=panel_pad,
            Q_FACTOR=cell.key_dim**-0.5, EPS=L2_EPS, SPAN=rows.span, TABLE_WIDTH=rows.table.shape[1],
            num_warps=state_warps(key_pad, panel_pad), **dependent_launch(given.device),
        )  # fmt: skip
    return gated_norm(
        read, given, cell.norm, eps=cell.eps, groups=cell.value_heads, column=cell.channels, norm_first=True
    )
