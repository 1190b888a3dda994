# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
"""A linear layer for few rows. It takes about as long as reading the weight once.

The weight is read once and multiplied with tiles of x, usually of 16 rows. If there are too few outputs to occupy the
GPU, several programs share the sum over the inputs, and a second launch adds their float32 parts in order (split-K
without atomics). A weight in fp8 has half the bytes. Its values are exact in x's dtype, and its scales are applied
last.

**Determinism.** Tile sizes and splits do not depend on the number of rows. Therefore a row's bits depend neither on the
other rows nor on their number. Another kernel (cuBLAS) gives other bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels.triton.dependent import dependent_launch, wait_for_inputs
from chairlift.kernels.triton.launch import GEMM_ADD_BLOCK, GemmLaunch
from chairlift.kernels.triton.low_rank import LowRankTerm, add_low_rank, term_arguments
from chairlift.kernels.triton.norms import add_parts, swiglu

__all__ = ["add_splits", "linear_parts", "linear_small", "output_columns", "store_sums"]


@triton.jit
def output_columns(num_out: tl.tensor, BLOCK_N: tl.constexpr, GATED: tl.constexpr) -> tl.tensor:
    """(rows of the weight in this program's tile of outputs, which of them exist). With ``GATED``, gate and up of one
    result are neighbours, so that one thread has both."""
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = column
    if GATED:
        n = column // 2 + column % 2 * (num_out // 2)
    return n, column < num_out


@triton.jit
def store_sums(
    out_ptr: tl.tensor, sums: tl.tensor, bias_ptr: tl.tensor, n: tl.tensor, inside_out: tl.tensor, m: tl.tensor,
    split: tl.tensor, num_rows: tl.tensor, num_out: tl.tensor, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    GATED: tl.constexpr,
) -> None:  # fmt: skip
    """Store a tile of a matmul's float32 sums for the rows ``m`` of x and the columns of :func:`output_columns`: add
    the bias, round, and with ``GATED`` compute SwiGLU."""
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + n, mask=inside_out, other=0.0).to(tl.float32)[None, :]
    out = sums.to(out_ptr.dtype.element_ty)
    if GATED:
        gate, up = tl.split(tl.reshape(out, [BLOCK_M, BLOCK_N // 2, 2]))
        out = swiglu(gate, up).to(out_ptr.dtype.element_ty)
        num_out = num_out // 2
        n = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        inside_out = n < num_out
    place = (split * num_rows + m).to(tl.int64)[:, None] * num_out + n[None, :]
    tl.store(out_ptr + place, out, mask=(m < num_rows)[:, None] & inside_out[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _product(
    out_ptr: tl.tensor, x_ptr: tl.tensor, weight_ptr: tl.tensor, scale_ptr: tl.tensor, bias_ptr: tl.tensor,
    low_ptr: tl.tensor, term_slots_ptr: tl.tensor, b_ptr: tl.tensor, words_ptr: tl.tensor, b_stride: tl.tensor,
    words_stride: tl.tensor, num_rows: tl.tensor, num_out: tl.tensor, num_in: tl.tensor, x_stride: tl.tensor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_SPLITS: tl.constexpr, GATED: tl.constexpr,
    PARTS: tl.constexpr, RANK: tl.constexpr, LOW_SPLITS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Matmul kernel. One program per tile of rows, tile of outputs, and split. Programs for different rows of the same
    weights run next to each other, so that they find the weights in the L2 cache. With ``GATED``, half of the outputs
    are gates, and SwiGLU is stored. With ``low_ptr``, rows may have adapters."""
    split = tl.program_id(2)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n, inside_out = output_columns(num_out, BLOCK_N, GATED)
    x_rows = x_ptr + m.to(tl.int64)[:, None] * x_stride
    weight_rows = weight_ptr + n.to(tl.int64)[:, None] * num_in
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    steps = tl.cdiv(num_in, BLOCK_K)
    share = tl.cdiv(steps, NUM_SPLITS)
    wait_for_inputs(PDL)
    for step in range(split * share, tl.minimum((split + 1) * share, steps)):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = (k < num_in)[None, :]
        x = tl.load(x_rows + k[None, :], mask=(m < num_rows)[:, None] & inside, other=0.0)
        weight = tl.load(weight_rows + k[None, :], mask=inside_out[:, None] & inside, other=0.0)
        sums = tl.dot(x, tl.trans(weight.to(x.dtype)), sums, input_precision="ieee")
    if scale_ptr is not None:
        sums *= tl.load(scale_ptr + n, mask=inside_out, other=0.0)[None, :]
    if low_ptr is not None:
        sums = add_low_rank(
            sums, low_ptr, term_slots_ptr, b_ptr, words_ptr, b_stride, words_stride, None, n, inside_out, m, split,
            num_rows, num_out, PARTS, RANK, LOW_SPLITS, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    store_sums(out_ptr, sums, bias_ptr, n, inside_out, m, split, num_rows, num_out, BLOCK_M, BLOCK_N, GATED)


@triton.jit(do_not_specialize=["num_rows"])
def _add_splits(
    out_ptr: tl.tensor, parts_ptr: tl.tensor, bias_ptr: tl.tensor, num_rows: tl.tensor, num_out: tl.tensor,
    NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel that adds the parts of split sums. One program per row and block of results. With ``GATED``, half of the
    outputs are gates, and SwiGLU is stored."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = num_out
    if GATED:
        width = num_out // 2
    inside = n < width
    wait_for_inputs(PDL)
    out = add_parts(parts_ptr, bias_ptr, row, n, inside, num_rows, num_out, NUM_SPLITS).to(out_ptr.dtype.element_ty)
    if GATED:
        up = add_parts(parts_ptr, bias_ptr, row, n + width, inside, num_rows, num_out, NUM_SPLITS)
        out = swiglu(out, up.to(out_ptr.dtype.element_ty)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + n, out, mask=inside)


def linear_small(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    launch: GemmLaunch,
    scales: Tensor | None = None,
    gated: bool = False,
    term: LowRankTerm | None = None,
) -> Tensor:
    """``x @ weight.T + bias``, correct for any number of rows, and fast for at most 64.

    Args:
        x: [M, K], rows contiguous.
        weight: [N, K], contiguous, of x's dtype (float32, float16 or bfloat16), or in fp8. Summed in float32.
        bias: [N] or None; added in float32 before the one rounding.
        launch: from :func:`~chairlift.kernels.triton.launch.gemm_launch`.
        scales: float32 [N], factors of the rows of a weight in fp8.
        gated: The first half of the outputs are the gates of the second half. The result is SwiGLU, with the same bits
            as :func:`~chairlift.kernels.triton.norms.silu_and_mul` of the outputs.
        term: What the adapters of the rows add before the bias is added; None if no row has one.

    Returns:
        [M, N], or with ``gated`` [M, N / 2], in x's dtype.

    Raises:
        InvariantError: the shapes do not fit together.
    """
    num_rows = len(x)
    num_out = weight.shape[0]
    splits = launch.num_splits
    if gated and num_out % 2:
        raise InvariantError(f"a gated layer has one gate for each output, so an even number of both; got {num_out}")
    width = num_out // 2 if gated else num_out
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if splits == 1:
        _launch_product(out, x, weight, bias, launch, scales, gated, term)
    elif num_rows:
        add_splits(out, linear_parts(x, weight, launch=launch, scales=scales, term=term), bias, gated)
    return out


def add_splits(out: Tensor, parts: Tensor, bias: Tensor | None, gated: bool) -> None:
    """Write into ``out`` [M, N], or with ``gated`` [M, N / 2], the results of a matmul of which ``parts``, float32 [S,
    M, N], are the parts: their sums in order, plus ``bias``, and with ``gated`` SwiGLU."""
    splits, num_rows, num_out = parts.shape
    _add_splits[(num_rows, -(-out.shape[1] // GEMM_ADD_BLOCK))](
        out, parts, bias, num_rows, num_out,
        NUM_SPLITS=splits, BLOCK=GEMM_ADD_BLOCK, GATED=gated, **dependent_launch(out.device),
    )  # fmt: skip


def linear_parts(
    x: Tensor,
    weight: Tensor,
    *,
    launch: GemmLaunch,
    scales: Tensor | None = None,
    term: LowRankTerm | None = None,
) -> Tensor:
    """The parts of the sums ``x @ weight.T``, float32 [``launch.num_splits``, M, N]. :func:`linear_small` describes
    the arguments and errors."""
    parts = torch.empty((launch.num_splits, len(x), len(weight)), dtype=torch.float32, device=x.device)
    _launch_product(parts, x, weight, None, launch, scales, gated=False, term=term)
    return parts


def _launch_product(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    launch: GemmLaunch,
    scales: Tensor | None,
    gated: bool,
    term: LowRankTerm | None,
) -> None:
    (num_rows, num_in), num_out, splits = x.shape, weight.shape[0], launch.num_splits
    if weight.shape[1] != num_in or not weight.is_contiguous() or x.stride(1) != 1:
        raise InvariantError(f"x {list(x.shape)} and weight {list(weight.shape)} must share K and have contiguous rows")
    if num_rows:
        _product[(-(-num_rows // launch.block_m), -(-num_out // launch.block_n), splits)](
            out, x, weight, scales, bias, num_rows=num_rows, num_out=num_out, num_in=num_in, x_stride=x.stride(0),
            BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, BLOCK_K=launch.block_k, NUM_SPLITS=splits, GATED=gated,
            num_warps=launch.num_warps, num_stages=launch.num_stages, **term_arguments(term),
            **dependent_launch(x.device),
        )  # fmt: skip
