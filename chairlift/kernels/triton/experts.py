# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
"""A layer of experts: routing, the MLPs of the chosen experts, and the weighted sum of their results.

A pair is a row and one of the experts that it chose. With few pairs, a program computes some outputs of one pair, so a
step reads the chosen experts only, and nothing is sorted. With more pairs, they are sorted by expert, and one grouped
matmul computes tiles of pairs of one expert. Its grid has the largest possible number of tiles; programs without a tile
stop at once. Then the results of a row are added in the order of its choice. There are five or six launches, none of
which depends on the host. Weights in codes are decoded in registers, tile by tile, as in
:mod:`~chairlift.kernels.triton.coded_linear`; then everything is as with floats, so the bits are those of the decoded
weights. Rows that only pad a step choose no expert.

**Determinism.** A row's bits do not depend on the other rows as long as the launch is the same: with few pairs, each
pair is computed separately; in a tile, each row is summed separately, in steps of ``block_k``. The two forms sum in
another order, so ``batch_invariant`` uses tiles only, always of the same size.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels.coded import CodedWeight
from chairlift.kernels.grouped import GROUP
from chairlift.kernels.routing import Routing
from chairlift.kernels.triton.coded_linear import weight_arguments, weight_tile
from chairlift.kernels.triton.dependent import dependent_launch, wait_for_inputs
from chairlift.kernels.triton.launch import (
    PAIR_BLOCK_K,
    PAIR_BLOCK_N,
    PAIR_WARPS,
    GemmLaunch,
    elementwise_warps,
    experts_launch,
    gemm_launch,
    power_of_2,
)
from chairlift.kernels.triton.linear_small import linear_parts
from chairlift.kernels.triton.norms import swiglu
from chairlift.kernels.triton.routing import SortedPairs, route, sort_pairs

__all__ = ["FEW_PAIRS", "experts"]

FEW_PAIRS: Final = 64
"""Maximum number of pairs for the form without sorting. It reads the weights of an expert once for each pair."""

_PLAIN: Final = 0
_SWIGLU: Final = 1
_CLAMPED: Final = 2
_SQUARED: Final = 3
"""Values of ``ACTIVATION``: none; SwiGLU; a gated MLP with a clamped gate; a squared ReLU without a gate."""


@triton.jit
def _activated(
    first: tl.tensor, up: tl.tensor, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr
) -> tl.tensor:
    """The inner value of an expert, rounded where the definition rounds. ``first`` is the gate, or the only value.

    No minimum or maximum is used, because these would drop NaN.
    """
    dtype: tl.constexpr = first.dtype
    if ACTIVATION == 1:
        return swiglu(first, up).to(dtype)
    if ACTIVATION == 2:
        gate = first.to(tl.float32)
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        gate = (gate / (1.0 + tl.exp(-ALPHA * gate))).to(dtype)
        wide = up.to(tl.float32)
        wide = tl.where(wide > LIMIT, LIMIT, tl.where(wide < -LIMIT, -LIMIT, wide))
        return (gate.to(tl.float32) * (wide + 1.0).to(dtype).to(tl.float32)).to(dtype)
    if ACTIVATION == 3:
        wide = tl.where(first < 0.0, 0.0, first).to(tl.float32)
        return (wide * wide).to(dtype)
    return first


@triton.jit
def _row_sums(parts: tl.tensor, ROWS: tl.constexpr, LEVELS: tl.constexpr) -> tl.tensor:
    """Sums of the rows of ``parts`` [ROWS, 2^LEVELS]: of neighbours, then of neighbouring sums. The order of ``tl.sum``
    would depend on how the compiler distributes a tile, which differs for floats and codes."""
    for level in tl.static_range(LEVELS):
        left, right = tl.split(tl.reshape(parts, [ROWS, 1 << (LEVELS - level - 1), 2]))
        parts = left + right
    return tl.reshape(parts, [ROWS])


@triton.jit
def _of_pairs(
    out_ptr: tl.tensor, x_ptr: tl.tensor, bias_ptr: tl.tensor, chosen_ptr: tl.tensor, num_out: tl.tensor,
    num_in: tl.tensor, x_stride: tl.tensor, weight_ptr: tl.tensor, scales_ptr: tl.tensor, minimums_ptr: tl.tensor,
    row_bytes: tl.tensor, num_groups: tl.tensor, BITS: tl.constexpr, GROUP_SIZE: tl.constexpr, ZERO: tl.constexpr,
    FLOATS: tl.constexpr, NUM_EXPERTS: tl.constexpr, PER_ROW: tl.constexpr, ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, BLOCK_N: tl.constexpr, LEVELS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel for few pairs: a matmul of one pair with the weight of its expert. One program per pair and block of
    outputs. PER_ROW pairs share a row of x. ``num_out`` are the rows of an expert's weight, whose format
    :func:`weight_tile` knows. 2^LEVELS inputs are read at a time. A pair of a padding row has no expert."""
    BLOCK_K: tl.constexpr = 1 << LEVELS
    pair = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    GATED: tl.constexpr = ACTIVATION == 1 or ACTIVATION == 2
    width = num_out
    if GATED:
        width = num_out // 2
    inside_out = n < width
    x_row = x_ptr + (pair // PER_ROW).to(tl.int64) * x_stride
    sums = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    up_sums = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    wait_for_inputs(PDL)
    expert = tl.load(chosen_ptr + pair)
    if expert == NUM_EXPERTS:
        return
    first = expert.to(tl.int64) * num_out
    for step in range(tl.cdiv(num_in, BLOCK_K)):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        x = tl.load(x_row + k, mask=k < num_in, other=0.0).to(tl.float32)[None, :]
        tile = weight_tile(
            weight_ptr, scales_ptr, minimums_ptr, first + n, inside_out, step, num_in, row_bytes, num_groups, BITS,
            GROUP_SIZE, ZERO, FLOATS, BLOCK_N, BLOCK_K, dtype,
        )  # fmt: skip
        sums += x * tile.to(tl.float32)
        if GATED:
            up_tile = weight_tile(
                weight_ptr, scales_ptr, minimums_ptr, first + width + n, inside_out, step, num_in, row_bytes,
                num_groups, BITS, GROUP_SIZE, ZERO, FLOATS, BLOCK_N, BLOCK_K, dtype,
            )  # fmt: skip
            up_sums += x * up_tile.to(tl.float32)
    out = _row_sums(sums, BLOCK_N, LEVELS)
    up = out
    if GATED:
        up = _row_sums(up_sums, BLOCK_N, LEVELS)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + first + n, mask=inside_out, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias_ptr + first + width + n, mask=inside_out, other=0.0).to(tl.float32)
    out = _activated(out.to(dtype), up.to(dtype), ACTIVATION, ALPHA, LIMIT)
    tl.store(out_ptr + pair.to(tl.int64) * width + n, out, mask=inside_out)


@triton.jit
def _of_tiles(
    out_ptr: tl.tensor, x_ptr: tl.tensor, bias_ptr: tl.tensor, order_ptr: tl.tensor, experts_ptr: tl.tensor,
    num_out: tl.tensor, num_in: tl.tensor, x_stride: tl.tensor, weight_ptr: tl.tensor, scales_ptr: tl.tensor,
    minimums_ptr: tl.tensor, row_bytes: tl.tensor, num_groups: tl.tensor, BITS: tl.constexpr, GROUP_SIZE: tl.constexpr,
    ZERO: tl.constexpr, FLOATS: tl.constexpr, PER_ROW: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr,
    LIMIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel for many pairs: a grouped matmul. One program per tile of pairs of one expert, and tile of outputs. The
    tiles of an expert are neighbouring programs, so that they find its weights in the L2 cache. The format of the
    weight is one that :func:`weight_tile` knows."""
    tile = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    GATED: tl.constexpr = ACTIVATION == 1 or ACTIVATION == 2
    n = column
    if GATED:  # gate and up of one result are neighbours, so that one thread has both
        n = column // 2 + column % 2 * (num_out // 2)
    wait_for_inputs(PDL)
    expert = tl.load(experts_ptr + tile)
    if expert < 0:
        return
    pair = tl.load(order_ptr + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    real = pair >= 0
    first = expert.to(tl.int64) * num_out
    x_rows = x_ptr + (pair // PER_ROW).to(tl.int64)[:, None] * x_stride
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for step in range(tl.cdiv(num_in, BLOCK_K)):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        x = tl.load(x_rows + k[None, :], mask=real[:, None] & (k < num_in)[None, :], other=0.0)
        weight = weight_tile(
            weight_ptr, scales_ptr, minimums_ptr, first + n, column < num_out, step, num_in, row_bytes, num_groups,
            BITS, GROUP_SIZE, ZERO, FLOATS, BLOCK_N, BLOCK_K, x.dtype,
        )  # fmt: skip
        sums = tl.dot(x, tl.trans(weight), sums, input_precision="ieee")
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + first + n, mask=column < num_out, other=0.0).to(tl.float32)[None, :]
    out = sums.to(out_ptr.dtype.element_ty)
    width = num_out
    if GATED:
        gate, up = tl.split(tl.reshape(out, [BLOCK_M, BLOCK_N // 2, 2]))
        out = _activated(gate, up, ACTIVATION, ALPHA, LIMIT)
        width = num_out // 2
        n = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        out = _activated(out, out, ACTIVATION, ALPHA, LIMIT)
    place = pair.to(tl.int64)[:, None] * width + n[None, :]
    tl.store(out_ptr + place, out, mask=real[:, None] & (n < width)[None, :])


@triton.jit
def _add_chosen(
    out_ptr: tl.tensor, results_ptr: tl.tensor, weights_ptr: tl.tensor, chosen_ptr: tl.tensor, shared_ptr: tl.tensor,
    x_ptr: tl.tensor, gate_ptr: tl.tensor, x_stride: tl.tensor, shared_stride: tl.tensor, WIDTH: tl.constexpr,
    PAD: tl.constexpr, NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel that adds the weighted results of a row in the order of its choice, then the shared expert's. One program
    per row. The sum of a padding row, which chose no expert, begins with 0."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    inside = i < WIDTH
    wait_for_inputs(PDL)
    total = tl.zeros([PAD], dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        pair = row * TOP_K + place
        width = tl.where(tl.load(chosen_ptr + pair) < NUM_EXPERTS, WIDTH, 0)
        result = tl.load(results_ptr + pair * WIDTH + i, mask=i < width, other=0.0).to(tl.float32)
        weighted = tl.load(weights_ptr + pair) * result
        if place == 0:  # adding to 0 would turn -0 into 0
            total = weighted
        else:
            total += weighted
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + row * shared_stride + i, mask=inside, other=0.0).to(tl.float32)
        if gate_ptr is not None:
            x = tl.load(x_ptr + row * x_stride + i, mask=inside, other=0.0).to(tl.float32)
            gate = tl.sum(x * tl.load(gate_ptr + i, mask=inside, other=0.0).to(tl.float32), axis=0)
            shared *= (1.0 / (1.0 + tl.exp(-gate.to(tl.float64)))).to(tl.float32)
        total += shared
    tl.store(out_ptr + row * WIDTH + i, total.to(out_ptr.dtype.element_ty), mask=inside)


def experts(
    x: Tensor,
    routed: Tensor,
    shared: Tensor | None,
    gate_up: Tensor | CodedWeight,
    down: Tensor | CodedWeight,
    router: Tensor,
    routing: Routing,
    correction: Tensor | None = None,
    shared_gate: Tensor | None = None,
    router_bias: Tensor | None = None,
    biases: tuple[Tensor, Tensor] | None = None,
    clamp: tuple[float, float] | None = None,
    gated: bool = True,
    *,
    num_multiprocessors: int,
    batch_invariant: bool = False,
    slots: Tensor | None = None,
) -> Tensor:
    """``ops.experts`` of rows ``x`` [T, D] -> [T, D], or ``ops.latent_experts`` if ``routed`` [T, R], which the router
    reads, are other rows.

    The other arguments are those of :func:`chairlift.kernels.experts.experts`. All weights are contiguous and of x's
    dtype (float32, float16 or bfloat16); ``gate_up`` and ``down`` may be codes instead, with the bits of the decoded
    weights. x, ``routed`` and ``shared`` have contiguous rows. With ``batch_invariant``, the bits of a row depend
    neither on the other rows nor on their number. ``slots`` (int64 [T]) is negative in rows that only pad the step;
    their experts' sum is 0. Raises InvariantError for shapes that do not fit together.
    """
    num_rows, width = x.shape
    count, top_k = routing.num_experts, routing.top_k
    first, inner = len(gate_up) // count, down.shape[1]
    if (len(gate_up), len(down)) != (count * (1 + gated) * inner, count * width) or gate_up.shape[1] != width:
        raise InvariantError(
            f"weights {list(gate_up.shape)} and {list(down.shape)} are not those of {count} experts for rows of {width}"
        )
    any_rows = batch_invariant or num_rows > _MOST_ROUTED
    size = routed.element_size()
    launch = gemm_launch(
        count, routed.shape[1], num_multiprocessors, num_rows=num_rows, any_rows=any_rows, itemsize=size
    )
    weights, chosen = route(linear_parts(routed, router, launch=launch), routing, correction, router_bias, slots)
    num_pairs = num_rows * top_k
    results = x.new_empty((num_pairs, width))
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    if num_pairs == 0:
        return out
    inner_rows = x.new_empty((num_pairs, inner))
    activation = _SQUARED if not gated else _SWIGLU if clamp is None else _CLAMPED
    bias, down_bias = biases or (None, None)
    if num_pairs <= FEW_PAIRS and not batch_invariant:
        _multiply_pairs(inner_rows, x, gate_up, bias, chosen, first, count, top_k, activation, clamp)
        _multiply_pairs(results, inner_rows, down, down_bias, chosen, width, count, 1, _PLAIN, None)
    else:
        tiles = experts_launch(num_pairs, count, itemsize=x.element_size(), any_rows=batch_invariant)
        pairs = sort_pairs(chosen, count, tiles.block_m)
        _multiply_tiles(inner_rows, x, gate_up, bias, pairs, tiles, first, top_k, activation, clamp)
        _multiply_tiles(results, inner_rows, down, down_bias, pairs, tiles, width, 1, _PLAIN, None)
    # Fused multiply-adds are disabled, because they would skip roundings that the definition does.
    _add_chosen[(num_rows,)](
        out, results, weights, chosen, shared, routed, shared_gate, routed.stride(0),
        0 if shared is None else shared.stride(0), WIDTH=width, PAD=power_of_2(width), NUM_EXPERTS=count, TOP_K=top_k,
        num_warps=elementwise_warps(width), enable_fp_fusion=False, **dependent_launch(x.device),
    )  # fmt: skip
    return out


_MOST_ROUTED: Final = 64
"""Maximum number of rows for which the router's matmul uses the tiles of few rows."""


def _multiply_pairs(
    out: Tensor, x: Tensor, weight: Tensor | CodedWeight, bias: Tensor | None, chosen: Tensor, num_out: int,
    num_experts: int, per_row: int, activation: int, clamp: tuple[float, float] | None,
) -> None:  # fmt: skip
    alpha, limit = clamp or (0.0, 0.0)
    block_k = min(PAIR_BLOCK_K, max(GROUP, power_of_2(weight.shape[1])))
    _of_pairs[(len(out), -(-out.shape[1] // PAIR_BLOCK_N))](
        out, x, bias, chosen, num_out, weight.shape[1], x.stride(0), **weight_arguments(weight),
        NUM_EXPERTS=num_experts, PER_ROW=per_row, ACTIVATION=activation, ALPHA=alpha, LIMIT=limit, BLOCK_N=PAIR_BLOCK_N,
        LEVELS=block_k.bit_length() - 1, num_warps=PAIR_WARPS, **dependent_launch(x.device),
    )  # fmt: skip


def _multiply_tiles(
    out: Tensor, x: Tensor, weight: Tensor | CodedWeight, bias: Tensor | None, pairs: SortedPairs, launch: GemmLaunch,
    num_out: int, per_row: int, activation: int, clamp: tuple[float, float] | None,
) -> None:  # fmt: skip
    alpha, limit = clamp or (0.0, 0.0)
    _of_tiles[(len(pairs.experts), -(-num_out // launch.block_n))](
        out, x, bias, pairs.order, pairs.experts, num_out, weight.shape[1], x.stride(0), **weight_arguments(weight),
        PER_ROW=per_row, ACTIVATION=activation, ALPHA=alpha, LIMIT=limit, BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n, BLOCK_K=launch.block_k, num_warps=launch.num_warps, num_stages=launch.num_stages,
        **dependent_launch(x.device),
    )  # fmt: skip
