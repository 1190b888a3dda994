# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
"""A linear layer whose weight is codes of 8 or 4 bits. Each program decodes its tiles of the weight in registers.

A code becomes a number of x's dtype, rounded once; then everything is as in
:mod:`~chairlift.kernels.triton.linear_small`, with the same tiles, splits and order of sums. So the result has the bits
of that kernel with the decoded weight, and its determinism. With many rows, decoding once is cheaper than in each tile
of rows: :func:`library_linear` decodes a bounded piece of the weight, and torch's library multiplies with it.

Decoding needs few instructions. A code in the last bits of the float32 number 2^23 is exact, so a subtraction gives the
code without its zero point. Floats of 4 and 8 bits become float16 by moving their bits. (So 8-bit floats need no GPU
that knows them.)
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels.coded import DECODED_BYTES, SCALE_UNIT, CodedWeight
from chairlift.kernels.grouped import GROUP, GroupKind
from chairlift.kernels.triton.dependent import dependent_launch, wait_for_inputs
from chairlift.kernels.triton.launch import GemmLaunch
from chairlift.kernels.triton.linear_small import add_splits, output_columns, store_sums
from chairlift.kernels.triton.low_rank import LowRankTerm, add_low_rank, term_arguments

__all__ = ["coded_linear", "coded_parts", "decoded_rows", "library_linear", "weight_arguments", "weight_tile"]

_ROWS = 16
_COLUMNS = 128
_UNIT: tl.constexpr = tl.constexpr(GROUP)
_INVERSE: tl.constexpr = tl.constexpr(1 / SCALE_UNIT)
_MAGIC: tl.constexpr = tl.constexpr(0x4B000000)
"""Bits of the float32 number 2^23, whose last bit stands for 1."""


@triton.jit
def _numbers(codes: tl.tensor, ZERO: tl.constexpr, FLOATS: tl.constexpr) -> tl.tensor:
    """The numbers that codes of 8 or 4 bits stand for, without their scales: float32."""
    bits = codes.to(tl.int32)
    if FLOATS == 8:
        half = (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.int16)
        numbers = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif FLOATS == 4:  # twice the value of the 4-bit float, as in E2M1_VALUES
        half = (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.int16)
        numbers = half.to(tl.float16, bitcast=True).to(tl.float32) * 32768.0
    else:
        numbers = (bits | _MAGIC).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)
    return numbers


@triton.jit
def _table_entries(table_ptr: tl.tensor, place: tl.tensor, known: tl.tensor) -> tl.tensor:
    """Scales or minimums as float32: those stored as float16 are multiplied by 256."""
    entries = tl.load(table_ptr + place, mask=known, other=0.0).to(tl.float32)
    if table_ptr.dtype.element_ty == tl.float16:
        entries *= _INVERSE
    return entries


@triton.jit
def _coded_tile(
    codes_ptr: tl.tensor, scales_ptr: tl.tensor, minimums_ptr: tl.tensor, n: tl.tensor, inside_out: tl.tensor,
    step: tl.tensor, num_in: tl.tensor, row_bytes: tl.tensor, num_groups: tl.tensor, BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, ZERO: tl.constexpr, FLOATS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Inputs from ``step * BLOCK_K`` on of the rows ``n`` [BLOCK_N] of a weight in codes: float32 [BLOCK_N, BLOCK_K].

    Rows that are not ``inside_out`` are not read. Inputs from ``num_in`` on have any finite value.
    """
    rows = n.to(tl.int64)
    place = step * (BLOCK_K * BITS // 8) + tl.arange(0, BLOCK_K * BITS // 8)
    inside = inside_out[:, None] & (place < row_bytes)[None, :]
    codes = tl.load(codes_ptr + rows[:, None] * row_bytes + place[None, :], mask=inside, other=0)
    if BITS == 4:  # the halves of a unit's bytes are its first and its last inputs
        halves = tl.reshape(tl.join(codes & 15, codes >> 4), [BLOCK_N, BLOCK_K // _UNIT, _UNIT // 2, 2])
        codes = tl.reshape(tl.permute(halves, [0, 1, 3, 2]), [BLOCK_N, BLOCK_K])
    numbers = tl.reshape(_numbers(codes, ZERO, FLOATS), [BLOCK_N, BLOCK_K // _UNIT, _UNIT])
    first = step * BLOCK_K + tl.arange(0, BLOCK_K // _UNIT) * _UNIT
    group = first // GROUP_SIZE
    table = rows[:, None] * num_groups + group[None, :]
    known = inside_out[:, None] & (first < num_in)[None, :]
    if FLOATS == 4:
        exponents = tl.load(scales_ptr + table, mask=known, other=0).to(tl.int32)
        scales = (exponents << 23).to(tl.float32, bitcast=True)
    else:
        scales = _table_entries(scales_ptr, table, known)
    numbers *= scales[:, :, None]
    if minimums_ptr is not None:
        numbers += _table_entries(minimums_ptr, table, known)[:, :, None]
    return tl.reshape(numbers, [BLOCK_N, BLOCK_K])


@triton.jit
def weight_tile(
    weight_ptr: tl.tensor, scales_ptr: tl.tensor, minimums_ptr: tl.tensor, n: tl.tensor, inside_out: tl.tensor,
    step: tl.tensor, num_in: tl.tensor, row_bytes: tl.tensor, num_groups: tl.tensor, BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr, ZERO: tl.constexpr, FLOATS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Inputs from ``step * BLOCK_K`` on of the rows ``n`` [BLOCK_N] of a weight, which is passed by
    :func:`weight_arguments`: [BLOCK_N, BLOCK_K] of ``DTYPE``. A weight in codes is decoded, and each number is rounded
    once.

    Rows that are not ``inside_out`` are not read. Inputs from ``num_in`` on have any finite value.
    """
    if BITS == 0:
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        rows = weight_ptr + n.to(tl.int64)[:, None] * num_in
        tile = tl.load(rows + k[None, :], mask=inside_out[:, None] & (k < num_in)[None, :], other=0.0)
    else:
        tile = _coded_tile(
            weight_ptr, scales_ptr, minimums_ptr, n, inside_out, step, num_in, row_bytes, num_groups, BITS, GROUP_SIZE,
            ZERO, FLOATS, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    return tile.to(DTYPE)


def weight_arguments(weight: Tensor | CodedWeight) -> dict[str, Any]:
    """Arguments with which a kernel passes a weight [out, in] to :func:`weight_tile`: floats, contiguous, or codes."""
    if isinstance(weight, Tensor):
        tables: dict[str, Any] = {"weight_ptr": weight, "scales_ptr": None, "minimums_ptr": None}
        return {**tables, "row_bytes": 0, "num_groups": 0, "BITS": 0, "GROUP_SIZE": 0, "ZERO": 0, "FLOATS": 0}
    kind = weight.kind
    return {
        **{"weight_ptr": weight.codes, "scales_ptr": weight.scales, "minimums_ptr": weight.minimums},
        **{"row_bytes": weight.codes.shape[1], "num_groups": weight.scales.shape[1]},
        **{"BITS": kind.bits, "GROUP_SIZE": kind.group, "ZERO": kind.zero, "FLOATS": _floats(kind)},
    }


@triton.jit(do_not_specialize=["num_rows"])
def _coded_product(
    out_ptr: tl.tensor, x_ptr: tl.tensor, codes_ptr: tl.tensor, scales_ptr: tl.tensor, minimums_ptr: tl.tensor,
    bias_ptr: tl.tensor, low_ptr: tl.tensor, term_slots_ptr: tl.tensor, b_ptr: tl.tensor, words_ptr: tl.tensor,
    b_stride: tl.tensor, words_stride: tl.tensor, num_rows: tl.tensor, num_out: tl.tensor, num_in: tl.tensor,
    x_stride: tl.tensor, row_bytes: tl.tensor, num_groups: tl.tensor, BITS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    ZERO: tl.constexpr, FLOATS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    NUM_SPLITS: tl.constexpr, GATED: tl.constexpr, PARTS: tl.constexpr, RANK: tl.constexpr, LOW_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Matmul kernel with a weight in codes. Its programs are those of ``linear_small``."""
    split = tl.program_id(2)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n, inside_out = output_columns(num_out, BLOCK_N, GATED)
    x_rows = x_ptr + m.to(tl.int64)[:, None] * x_stride
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    steps = tl.cdiv(num_in, BLOCK_K)
    share = tl.cdiv(steps, NUM_SPLITS)
    wait_for_inputs(PDL)
    for step in range(split * share, tl.minimum((split + 1) * share, steps)):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        x = tl.load(x_rows + k[None, :], mask=(m < num_rows)[:, None] & (k < num_in)[None, :], other=0.0)
        weight = _coded_tile(
            codes_ptr, scales_ptr, minimums_ptr, n, inside_out, step, num_in, row_bytes, num_groups, BITS, GROUP_SIZE,
            ZERO, FLOATS, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        sums = tl.dot(x, tl.trans(weight.to(x.dtype)), sums, input_precision="ieee")
    if low_ptr is not None:
        sums = add_low_rank(
            sums, low_ptr, term_slots_ptr, b_ptr, words_ptr, b_stride, words_stride, None, n, inside_out, m, split,
            num_rows, num_out, PARTS, RANK, LOW_SPLITS, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    store_sums(out_ptr, sums, bias_ptr, n, inside_out, m, split, num_rows, num_out, BLOCK_M, BLOCK_N, GATED)


@triton.jit
def _decode(
    out_ptr: tl.tensor, ids_ptr: tl.tensor, codes_ptr: tl.tensor, scales_ptr: tl.tensor, minimums_ptr: tl.tensor,
    first: tl.tensor, num_rows: tl.tensor, num_in: tl.tensor, row_bytes: tl.tensor, num_groups: tl.tensor,
    BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, ZERO: tl.constexpr, FLOATS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel of :func:`decoded_rows`. One program per tile of rows and columns."""
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    step = tl.program_id(1)
    inside = r < num_rows
    wait_for_inputs(PDL)
    n = first + r
    if ids_ptr is not None:
        n = tl.load(ids_ptr + r, mask=inside, other=0)
    weight = _coded_tile(
        codes_ptr, scales_ptr, minimums_ptr, n, inside, step, num_in, row_bytes, num_groups, BITS, GROUP_SIZE, ZERO,
        FLOATS, ROWS, COLUMNS,
    )  # fmt: skip
    k = step * COLUMNS + tl.arange(0, COLUMNS)
    place = r.to(tl.int64)[:, None] * num_in + k[None, :]
    tl.store(out_ptr + place, weight.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (k < num_in)[None, :])


def coded_linear(
    x: Tensor,
    weight: CodedWeight,
    bias: Tensor | None,
    *,
    launch: GemmLaunch,
    gated: bool = False,
    term: LowRankTerm | None = None,
) -> Tensor:
    """``x @ weight.T + bias``, correct for any number of rows, and made for few.

    The arguments, results and errors are those of :func:`~chairlift.kernels.triton.linear_small.linear_small`, and so
    are the bits, with a weight that is decoded and rounded to x's dtype. Tiles have at least 32 inputs: smaller tiles
    of ``launch`` become 32.
    """
    num_rows, num_out = len(x), len(weight)
    if gated and num_out % 2:
        raise InvariantError(f"a gated layer has one gate for each output, so an even number of both; got {num_out}")
    out = torch.empty((num_rows, num_out // 2 if gated else num_out), dtype=x.dtype, device=x.device)
    if launch.num_splits == 1:
        _launch_product(out, x, weight, bias, launch, gated, term)
    elif num_rows:
        add_splits(out, coded_parts(x, weight, launch=launch, term=term), bias, gated)
    return out


def coded_parts(x: Tensor, weight: CodedWeight, *, launch: GemmLaunch, term: LowRankTerm | None = None) -> Tensor:
    """The parts of the sums ``x @ weight.T``, float32 [``launch.num_splits``, M, N]; see :func:`coded_linear`."""
    parts = torch.empty((launch.num_splits, len(x), len(weight)), dtype=torch.float32, device=x.device)
    _launch_product(parts, x, weight, None, launch, gated=False, term=term)
    return parts


def decoded_rows(weight: CodedWeight, dtype: torch.dtype, first: int = 0, ids: Tensor | int | None = None) -> Tensor:
    """Rows of a weight as floats [n, in] of ``dtype``: those with the indices ``ids`` (int32 or int64 [n]), or ``ids``
    rows from ``first`` on (None: all)."""
    given = isinstance(ids, Tensor)
    num_rows = len(ids) if isinstance(ids, Tensor) else len(weight) - first if ids is None else ids
    out = torch.empty((num_rows, weight.k), dtype=dtype, device=weight.codes.device)
    kind = weight.kind
    if num_rows:
        _decode[(-(-num_rows // _ROWS), -(-weight.k // _COLUMNS))](
            out, ids if given else None, weight.codes, weight.scales, weight.minimums, first, num_rows, weight.k,
            weight.codes.shape[1], weight.scales.shape[1], BITS=kind.bits, GROUP_SIZE=kind.group, ZERO=kind.zero,
            FLOATS=_floats(kind), ROWS=_ROWS, COLUMNS=_COLUMNS, **dependent_launch(out.device),
        )  # fmt: skip
    return out


def library_linear(x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` by torch's library, for many rows. The weight is decoded in pieces of at most
    :data:`~chairlift.kernels.coded.DECODED_BYTES`."""
    piece = max(DECODED_BYTES // (weight.k * x.element_size()) // _ROWS, 1) * _ROWS
    num_out = len(weight)
    if num_out <= piece:
        return torch.nn.functional.linear(x, decoded_rows(weight, x.dtype), bias)
    out = torch.empty((len(x), num_out), dtype=x.dtype, device=x.device)
    for first in range(0, num_out, piece):
        end = min(first + piece, num_out)
        some = decoded_rows(weight, x.dtype, first, end - first)
        out[:, first:end] = torch.nn.functional.linear(x, some, None if bias is None else bias[first:end])
    return out


def _floats(kind: GroupKind) -> int:
    """Number of bits of codes that are floats; 0 for integers."""
    return kind.bits if kind.e2m1 or kind.e4m3 else 0


def _launch_product(
    out: Tensor,
    x: Tensor,
    weight: CodedWeight,
    bias: Tensor | None,
    launch: GemmLaunch,
    gated: bool,
    term: LowRankTerm | None,
) -> None:
    num_rows, num_in = x.shape
    num_out, splits, kind = len(weight), launch.num_splits, weight.kind
    if weight.k != num_in or x.stride(1) != 1:
        raise InvariantError(f"x {list(x.shape)} and weight {list(weight.shape)} must share K and have contiguous rows")
    if num_rows:
        _coded_product[(-(-num_rows // launch.block_m), -(-num_out // launch.block_n), splits)](
            out, x, weight.codes, weight.scales, weight.minimums, bias, num_rows=num_rows, num_out=num_out,
            num_in=num_in, x_stride=x.stride(0), row_bytes=weight.codes.shape[1], num_groups=weight.scales.shape[1],
            BITS=kind.bits, GROUP_SIZE=kind.group, ZERO=kind.zero, FLOATS=_floats(kind), BLOCK_M=launch.block_m,
            BLOCK_N=launch.block_n, BLOCK_K=max(launch.block_k, GROUP), NUM_SPLITS=splits, GATED=gated,
            **term_arguments(term), num_warps=launch.num_warps, num_stages=launch.num_stages,
            **dependent_launch(x.device),
        )  # fmt: skip
