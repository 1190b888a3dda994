# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
"""Adapters of linear layers: low-rank matrices, gains and offsets of rows that each have an adapter of their own.

A first launch (shrink) multiplies the rows by the matrices A of their adapters. It has a program for each tile of rows
and each of the adapters that such a tile may have, whatever adapters the rows have; programs without an adapter end at
once. So a captured graph serves any mixture. The second product (expand) happens in the matmul of the layer: its
programs add each row's term to their float32 sums before these are rounded (:func:`add_low_rank`). If torch's library
computes the matmul, a launch of its own adds the terms to the rounded results.

**Determinism.** A row's term is one sum over the inputs and one over the rank, in a fixed order, and depends on no
other row. There are no atomic additions. The sums of rows without an adapter, and of outputs that an adapter does not
change, are selected and not computed again: adding 0 would change the sign of -0.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels.low_rank_pool import HEAD_WORDS, LowRankSite
from chairlift.kernels.triton.dependent import dependent_launch, wait_for_inputs
from chairlift.kernels.triton.launch import EXPAND_BLOCK, ShrinkLaunch, shrink_launch

__all__ = ["LowRankTerm", "add_low_rank", "expand", "shrink", "term_arguments"]

_NONE: tl.constexpr = tl.constexpr(2**31 - 1)
"""Larger than any slot."""
_HEAD: tl.constexpr = tl.constexpr(HEAD_WORDS)


@dataclasses.dataclass(frozen=True, slots=True)
class LowRankTerm:
    """What adapters add to a layer's result for M rows, before it is multiplied by the matrices B."""

    site: LowRankSite
    slots: Tensor
    """int32 [M], the slot of each row's adapter; -1 for none."""
    low: Tensor
    """float32 [splits, M, parts * rank], the parts of x @ A.T; meaningless from the rank of a row's adapter on."""


@triton.jit
def _next_slot(slots: tl.tensor, last: tl.tensor) -> tl.tensor:
    """The smallest of ``slots`` that is larger than ``last``; a number that is no slot if there is none."""
    return tl.min(tl.where(slots > last, slots, _NONE), axis=0)


@triton.jit(do_not_specialize=["num_rows"])
def _shrink(
    low_ptr: tl.tensor, x_ptr: tl.tensor, slots_ptr: tl.tensor, a_ptr: tl.tensor, words_ptr: tl.tensor,
    a_stride: tl.tensor, words_stride: tl.tensor, num_rows: tl.tensor, num_in: tl.tensor, x_stride: tl.tensor,
    PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_SPLITS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel of :func:`shrink`. One program per tile of rows, distinct adapter of the tile and tile of ranks, and
    split."""
    TILES: tl.constexpr = PARTS * RANK // BLOCK_R
    split = tl.program_id(2)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1) % TILES * BLOCK_R
    wait_for_inputs(PDL)
    slots = tl.load(slots_ptr + m, mask=m < num_rows, other=-1)
    slot = _next_slot(slots, -1)
    for _ in range(tl.program_id(1) // TILES):
        slot = _next_slot(slots, slot)
    if slot < _NONE:
        part = first // RANK
        rank = tl.load(words_ptr + slot.to(tl.int64) * words_stride + part) + part * RANK
        if first < rank:
            r = first + tl.arange(0, BLOCK_R)
            has = slots == slot
            x_rows = x_ptr + m.to(tl.int64)[:, None] * x_stride
            a_rows = a_ptr + slot.to(tl.int64) * a_stride + r[:, None] * num_in
            sums = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
            steps = tl.cdiv(num_in, BLOCK_K)
            share = tl.cdiv(steps, NUM_SPLITS)
            for step in range(split * share, tl.minimum((split + 1) * share, steps)):
                k = step * BLOCK_K + tl.arange(0, BLOCK_K)
                inside = (k < num_in)[None, :]
                x = tl.load(x_rows + k[None, :], mask=has[:, None] & inside, other=0.0)
                a = tl.load(a_rows + k[None, :], mask=(r < rank)[:, None] & inside, other=0.0)
                sums = tl.dot(x, tl.trans(a), sums, input_precision="ieee")
            place = (split * num_rows + m).to(tl.int64)[:, None] * (PARTS * RANK) + r[None, :]
            tl.store(low_ptr + place, sums, mask=has[:, None] & (r < rank)[None, :])


@triton.jit
def _expanded(
    low_ptr: tl.tensor, b_rows: tl.tensor, rank: tl.tensor, has: tl.tensor, mine: tl.tensor, m: tl.tensor,
    num_rows: tl.tensor, PART: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
    LOW_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Terms of one part of an adapter, float32 [BLOCK_M, BLOCK_N], for the rows that have the adapter and the outputs
    that are ``mine``."""
    term = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for first in tl.range(0, rank, BLOCK_R, num_stages=1):
        r = first + tl.arange(0, BLOCK_R)
        known = (r < rank)[None, :]
        low = tl.zeros([BLOCK_M, BLOCK_R], dtype=tl.float32)
        for split in tl.static_range(LOW_SPLITS):
            place = (split * num_rows + m).to(tl.int64)[:, None] * (PARTS * RANK) + PART * RANK + r[None, :]
            low += tl.load(low_ptr + place, mask=has[:, None] & known, other=0.0)
        b = tl.load(b_rows + r[None, :], mask=mine[:, None] & known, other=0.0)
        term = tl.dot(low.to(b.dtype), tl.trans(b), term, input_precision="ieee")
    return term


@triton.jit
def add_low_rank(
    sums: tl.tensor, low_ptr: tl.tensor, slots_ptr: tl.tensor, b_ptr: tl.tensor, words_ptr: tl.tensor,
    b_stride: tl.tensor, words_stride: tl.tensor, bias_ptr: tl.tensor, n: tl.tensor, inside_out: tl.tensor,
    m: tl.tensor, split: tl.tensor, num_rows: tl.tensor, num_out: tl.tensor, PARTS: tl.constexpr, RANK: tl.constexpr,
    LOW_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """``sums`` [BLOCK_M, BLOCK_N] of a layer for the rows ``m`` and the outputs ``n``, changed as the rows' adapters
    say: gain * (sums + term) + offset.

    If a sum is split, its first part gets term and offset, and each part is multiplied by the gain. A bias that is
    already in the sums is given as ``bias_ptr``: gains do not multiply it.
    """
    BLOCK_R: tl.constexpr = 32 if RANK % 32 == 0 else 16
    slots = tl.load(slots_ptr + m, mask=m < num_rows, other=-1)
    slot = _next_slot(slots, -1)
    while slot < _NONE:
        has = slots == slot
        words = words_ptr + slot.to(tl.int64) * words_stride
        of_output = words + _HEAD + n
        if split == 0:
            part = tl.load(of_output, mask=inside_out, other=-1)
            b_rows = b_ptr + slot.to(tl.int64) * b_stride + n.to(tl.int64)[:, None] * RANK
            for p in tl.static_range(PARTS):
                mine = part == p
                if tl.max(mine.to(tl.int32), axis=0) > 0:
                    term = _expanded(
                        low_ptr, b_rows, tl.load(words + p), has, mine, m, num_rows, p, PARTS, RANK, BLOCK_R,
                        LOW_SPLITS, BLOCK_M, BLOCK_N,
                    )  # fmt: skip
                    sums = tl.where(has[:, None] & mine[None, :], sums + term, sums)
        if tl.load(words + _HEAD - 1) != 0:
            gain = tl.load(of_output + num_out, mask=inside_out, other=0).to(tl.float32, bitcast=True)
            offset = tl.load(of_output + 2 * num_out, mask=inside_out, other=0).to(tl.float32, bitcast=True)
            changed = sums
            if bias_ptr is not None:
                bias = tl.load(bias_ptr + n, mask=inside_out, other=0.0).to(tl.float32)
                changed -= bias[None, :]
                offset += bias
            changed = changed * gain[None, :] + tl.where(split == 0, offset, 0.0)[None, :]
            sums = tl.where(has[:, None], changed, sums)
        slot = _next_slot(slots, slot)
    return sums


@triton.jit(do_not_specialize=["num_rows"])
def _expand(
    out_ptr: tl.tensor, bias_ptr: tl.tensor, low_ptr: tl.tensor, slots_ptr: tl.tensor, b_ptr: tl.tensor,
    words_ptr: tl.tensor, b_stride: tl.tensor, words_stride: tl.tensor, num_rows: tl.tensor, num_out: tl.tensor,
    PARTS: tl.constexpr, RANK: tl.constexpr, LOW_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel of :func:`expand`. One program per tile of rows and tile of outputs."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_out = n < num_out
    wait_for_inputs(PDL)
    adapted = tl.load(slots_ptr + m, mask=m < num_rows, other=-1) >= 0
    if tl.max(adapted.to(tl.int32), axis=0) > 0:
        place = out_ptr + m.to(tl.int64)[:, None] * num_out + n[None, :]
        mask = adapted[:, None] & inside_out[None, :]
        sums = add_low_rank(
            tl.load(place, mask=mask, other=0.0).to(tl.float32), low_ptr, slots_ptr, b_ptr, words_ptr, b_stride,
            words_stride, bias_ptr, n, inside_out, m, 0, num_rows, num_out, PARTS, RANK, LOW_SPLITS, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        tl.store(place, sums.to(out_ptr.dtype.element_ty), mask=mask)


def shrink(x: Tensor, site: LowRankSite, slots: Tensor, *, any_rows: bool = False) -> LowRankTerm:
    """Multiply each row of ``x`` [M, in], rows contiguous, by the matrices A of its adapter.

    ``slots``, int32 [M], has the slot of each row's adapter in the pool of ``site``; -1 for none. With ``any_rows`` a
    row's bits do not depend on M. Raises InvariantError if the shapes do not fit together.
    """
    num_rows, num_in = x.shape
    num_slots, parts, rank, inputs = site.a.shape
    if inputs != num_in or x.stride(1) != 1 or x.dtype != site.a.dtype or slots.shape != (num_rows,):
        raise InvariantError(
            f"x {list(x.shape)} of {x.dtype} and {list(slots.shape)} slots do not fit to A {list(site.a.shape)} of"
            f" {site.a.dtype}"
        )
    launch = shrink_launch(num_rows, num_in, rank, any_rows=any_rows, itemsize=x.element_size())
    low = torch.empty((launch.num_splits, num_rows, parts * rank), dtype=torch.float32, device=x.device)
    if num_rows:
        _shrink[_shrink_grid(launch, num_rows, num_slots, parts * rank)](
            low, x, slots, site.a, site.words, site.a.stride(0), site.words.stride(0), num_rows, num_in, x.stride(0),
            PARTS=parts, RANK=rank, BLOCK_M=launch.block_m, BLOCK_R=launch.block_r, BLOCK_K=launch.block_k,
            NUM_SPLITS=launch.num_splits, num_warps=launch.num_warps, num_stages=launch.num_stages,
            **dependent_launch(x.device),
        )  # fmt: skip
    return LowRankTerm(site, slots, low)


def _shrink_grid(launch: ShrinkLaunch, num_rows: int, num_slots: int, ranks: int) -> tuple[int, int, int]:
    """Number of programs. It depends on shapes only: a tile has at most as many adapters as rows, or as slots."""
    most = min(num_slots, launch.block_m)
    return -(-num_rows // launch.block_m), most * (ranks // launch.block_r), launch.num_splits


def term_arguments(term: LowRankTerm | None) -> dict[str, Any]:
    """Arguments of a matmul kernel for what adapters add; for none, those of a kernel that adds nothing."""
    if term is None:
        names = ("low_ptr", "term_slots_ptr", "b_ptr", "words_ptr", "b_stride", "words_stride")
        return {**dict.fromkeys(names), "PARTS": 0, "RANK": 0, "LOW_SPLITS": 0}
    site = term.site
    return {
        "low_ptr": term.low, "term_slots_ptr": term.slots, "b_ptr": site.b, "words_ptr": site.words,
        "b_stride": site.b.stride(0), "words_stride": site.words.stride(0), "PARTS": site.a.shape[1],
        "RANK": site.b.shape[2], "LOW_SPLITS": len(term.low),
    }  # fmt: skip


def expand(out: Tensor, term: LowRankTerm, bias: Tensor | None) -> None:
    """Change ``out`` [M, out], a layer's rounded results with its ``bias`` [out], in place, as the rows' adapters say.

    The term is added in float32 and the sum rounded again. Nothing is written to rows without an adapter. Raises
    InvariantError if the shapes do not fit together.
    """
    (num_rows, num_out), site = out.shape, term.site
    if not out.is_contiguous() or site.b.shape[1] != num_out or term.slots.shape != (num_rows,):
        raise InvariantError(f"out {list(out.shape)} does not fit to B {list(site.b.shape)} or {len(term.slots)} slots")
    if num_rows:
        _expand[(-(-num_rows // EXPAND_BLOCK), -(-num_out // EXPAND_BLOCK))](
            out, bias, term.low, term.slots, site.b, site.words, site.b.stride(0), site.words.stride(0), num_rows,
            num_out, PARTS=site.a.shape[1], RANK=site.b.shape[2], LOW_SPLITS=len(term.low), BLOCK_M=EXPAND_BLOCK,
            BLOCK_N=EXPAND_BLOCK, **dependent_launch(out.device),
        )  # fmt: skip
