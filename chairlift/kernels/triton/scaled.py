# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator"
"""A linear layer with an fp8 weight, for many rows. Rows are rounded to fp8, each with its own scale, and torch's
library multiplies 8-bit numbers in tensor cores. (Few rows are not rounded:
:mod:`~chairlift.kernels.triton.linear_small`.)"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from chairlift.kernels import fp8
from chairlift.kernels.triton.launch import elementwise_warps, power_of_2

__all__ = ["quantize_rows", "scaled_linear"]


@triton.jit
def _quantize_rows(
    values_ptr: tl.tensor, scales_ptr: tl.tensor, x_ptr: tl.tensor, x_stride: tl.tensor, WIDTH: tl.constexpr,
    PAD: tl.constexpr, LARGEST: tl.constexpr, MIN_SCALE: tl.constexpr,
) -> None:  # fmt: skip
    """Kernel of :func:`quantize_rows`. One program per row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PAD)
    x = tl.load(x_ptr + row * x_stride + i, mask=i < WIDTH, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), axis=0), LARGEST), MIN_SCALE)
    tl.store(scales_ptr + row, scale)
    tl.store(values_ptr + row * WIDTH + i, tl.div_rn(x, scale).to(tl.float8e4nv), mask=i < WIDTH)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`~chairlift.kernels.fp8.quantize` of x [T, K], rows contiguous, in one launch."""
    num_rows, width = x.shape
    values = torch.empty((num_rows, width), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        _quantize_rows[(num_rows,)](
            values, scales, x, x.stride(0), WIDTH=width, PAD=power_of_2(width), LARGEST=fp8.FP8_LARGEST,
            MIN_SCALE=fp8.FP8_MIN_SCALE, num_warps=elementwise_warps(width),
        )  # fmt: skip
    return values, scales


def scaled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *, scales: Tensor) -> Tensor:
    """``x @ weight.T + bias`` with x rounded to fp8 row by row. The sizes of the fp8 weight are multiples of 16;
    ``scales``, float32 [N], are the factors of its rows.

    On a GPU, x must be bfloat16, the only dtype that the library's fp8 matmuls return. On the CPU PyTorch rounds the
    rows, because Triton's interpreter rounds wrongly.
    """
    rows, factors = quantize_rows(x) if x.is_cuda else fp8.quantize(x)
    return torch._scaled_mm(
        rows, weight.t(), scale_a=factors[:, None], scale_b=scales[None], bias=bias, out_dtype=x.dtype
    )
