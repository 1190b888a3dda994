# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
"""The gate of recurrent layers and the norm before or after it. One program computes one group of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.dependent import dependent_launch, wait_for_inputs
from chairlift.kernels.triton.launch import elementwise_warps, power_of_2

__all__ = ["gated_norm"]


@triton.jit
def _gated_norm(
    out_ptr: tl.tensor, x_ptr: tl.tensor, gate_ptr: tl.tensor, weight_ptr: tl.tensor, gate_stride: tl.tensor,
    eps: tl.tensor, COLUMN: tl.constexpr, SIZE: tl.constexpr, PAD: tl.constexpr, WEIGHTS: tl.constexpr,
    NORM_FIRST: tl.constexpr, FACTOR: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel of the gated norm. One program per token and group of SIZE channels. The weight has WEIGHTS elements, for
    one group or for all."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    inside = i < SIZE
    at = tl.program_id(1) * SIZE + i
    place = token * (tl.num_programs(1) * SIZE) + at
    wait_for_inputs(PDL)
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + COLUMN + at, mask=inside, other=0.0).to(tl.float32) * FACTOR
    gate = gate / (1.0 + tl.exp(-gate))
    if not NORM_FIRST:
        x = x * gate
    if weight_ptr is not None:
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps)
        x = x * tl.load(weight_ptr + at % WEIGHTS, mask=inside, other=0.0).to(tl.float32)
    if NORM_FIRST:
        x = x * gate
    tl.store(out_ptr + place, x.to(out_ptr.dtype.element_ty), mask=inside)


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    *,
    eps: float,
    groups: int,
    column: int = 0,
    norm_first: bool = False,
    factor: float = 1.0,
) -> Tensor:
    """Gate ``x`` with silu, and normalise each group of its channels, in float32.

    Args:
        x: [T, W], contiguous.
        gate: [T, at least ``column`` + W], rows contiguous; the gates begin at ``column``.
        weight: weight of the norm, [W] or, shared by all groups, [W / groups]. None: there is no norm.
        eps: number added to the mean of squares.
        groups: number of groups of W; each has its own root mean square.
        norm_first: norm(x) * silu(gate) instead of norm(x * silu(gate)).
        factor: factor of the gates before silu.

    Returns:
        [T, W] in the dtype of ``gate``.
    """
    count, width = x.shape
    size = width // groups
    out = torch.empty((count, width), dtype=gate.dtype, device=gate.device)
    if count:
        _gated_norm[(count, groups)](
            out, x, gate, weight, gate.stride(0), eps, COLUMN=column, SIZE=size, PAD=power_of_2(size),
            WEIGHTS=1 if weight is None else len(weight), NORM_FIRST=norm_first, FACTOR=factor,
            num_warps=elementwise_warps(size), **dependent_launch(out.device),
        )  # fmt: skip
    return out
