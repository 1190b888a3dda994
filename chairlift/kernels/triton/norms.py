# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
"""RMSNorm, the additions before it, and SwiGLU. One program computes one row.

The kernels round to the model's dtype at the same points as :mod:`chairlift.kernels.reference` and Hugging Face models.
Only the mean of squares differs, because its terms are added in another order. A row's bits do not depend on the other
rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels.triton.dependent import dependent_launch, wait_for_inputs
from chairlift.kernels.triton.launch import elementwise_warps, power_of_2

__all__ = ["add_parts", "add_rms_norm", "rms_norm", "silu_and_mul", "swiglu"]


@triton.jit
def add_parts(
    parts_ptr: tl.tensor, bias_ptr: tl.tensor, row: tl.tensor, n: tl.tensor, inside: tl.tensor, num_rows: tl.tensor,
    num_out: tl.tensor, NUM_SPLITS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Columns ``n`` of a row of a matmul's result whose sum was split into NUM_SPLITS parts. It adds the parts, in
    order, and the bias, all in float32. The parts are [NUM_SPLITS, num_rows, num_out]."""
    total = tl.zeros(n.shape, dtype=tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        total += tl.load(parts_ptr + (split * num_rows + row) * num_out + n, mask=inside, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def swiglu(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """silu(gate) * up in float32, from a gate and an up value in the model's dtype. silu is rounded to that dtype."""
    wide = gate.to(tl.float32)
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    return silu.to(tl.float32) * up.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    out_ptr: tl.tensor, x_ptr: tl.tensor, residual_ptr: tl.tensor, weight_ptr: tl.tensor, bias_ptr: tl.tensor,
    eps: tl.tensor, x_stride: tl.tensor, num_rows: tl.tensor, WIDTH: tl.constexpr, PAD: tl.constexpr,
    NUM_SPLITS: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """RMSNorm kernel. One program per row. If there is a residual, x is added to it in place, and the sum is
    normalised. If there are splits, x is the sum of float32 parts."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    inside = i < WIDTH
    wait_for_inputs(PDL)
    if NUM_SPLITS > 0:
        x = add_parts(x_ptr, bias_ptr, row, i, inside, num_rows, WIDTH, NUM_SPLITS).to(out_ptr.dtype.element_ty)
    else:
        x = tl.load(x_ptr + row * x_stride + i, mask=inside, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * WIDTH + i, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(residual_ptr + row * WIDTH + i, x, mask=inside)
    wide = x.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / WIDTH + eps)).to(x.dtype)
    weight = tl.load(weight_ptr + i, mask=inside, other=0.0)
    out = weight.to(tl.float32) * normed.to(tl.float32)
    tl.store(out_ptr + row * WIDTH + i, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _silu_and_mul(
    out_ptr: tl.tensor, x_ptr: tl.tensor, x_stride: tl.tensor, FACTOR: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
) -> None:  # fmt: skip
    """SwiGLU kernel. One program per row and block of columns."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < WIDTH
    wait_for_inputs(PDL)
    gate = tl.load(x_ptr + row * x_stride + i, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * x_stride + WIDTH + i, mask=inside, other=0.0)
    if FACTOR != 1.0:
        gate = (gate.to(tl.float32) * FACTOR).to(gate.dtype)
    tl.store(out_ptr + row * WIDTH + i, swiglu(gate, up).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm (Zhang and Sennrich, 2019): x [T, D], rows contiguous, weight [D] -> [T, D]."""
    return _norm(x, None, weight, eps, None)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, bias: Tensor | None = None) -> Tensor:
    """Add ``x`` to ``residual`` in place, and return the norm of the sum: both [T, D] of one dtype, ``residual``
    contiguous.

    ``x`` may also be the parts of a split sum, float32 [S, T, D], contiguous. Then their sum and ``bias`` [D] are
    rounded to the dtype of ``residual`` before the addition, as :func:`~chairlift.kernels.triton.linear_small` does.
    """
    return _norm(x, residual, weight, eps, bias)


def silu_and_mul(gate_up: Tensor, factor: float = 1.0) -> Tensor:
    """SwiGLU (Shazeer, 2020): [T, 2 I], rows contiguous, the gate first -> silu(factor * gate) * up, [T, I]."""
    num_rows = gate_up.shape[0]
    width = gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, power_of_2(width))
    if num_rows:
        _silu_and_mul[(num_rows, -(-width // block))](
            out, gate_up, gate_up.stride(0),
            FACTOR=factor, WIDTH=width, BLOCK=block, **dependent_launch(out.device),
        )  # fmt: skip
    return out


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, bias: Tensor | None) -> Tensor:
    num_rows, width = x.shape[-2:]
    out = torch.empty((num_rows, width), dtype=(x if residual is None else residual).dtype, device=x.device)
    if num_rows:
        _rms_norm[(num_rows,)](
            out, x, residual, weight, bias, eps, x.stride(-2), num_rows,
            WIDTH=width, PAD=power_of_2(width), NUM_SPLITS=len(x) if x.ndim == 3 else 0,
            num_warps=elementwise_warps(width), **dependent_launch(out.device),
        )  # fmt: skip
    return out
