"""Linear layers with 8-bit weights: float8_e4m3fn (Micikevicius et al., 2022) and one scale per output."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from chairlift.kernels.cpu.packing import by_slices

__all__ = ["FP8_LARGEST", "FP8_MIN_SCALE", "Fp8Weight", "fp8_linear", "quantize"]

FP8_LARGEST: Final = 448.0
"""Largest number that the 8-bit float format float8_e4m3fn can represent."""
FP8_MIN_SCALE: Final = torch.finfo(torch.float32).tiny
"""Minimum scale of a row. It avoids a division by 0 for rows of zeros."""


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 values [N, K] and float32 scales [N] of ``rows`` [N, K]. A row is approximately its values times its scale.

    The largest number of a row becomes the largest value of the format. The relative error is at most 1/16; for small
    numbers the absolute error is at most 2^-10 times the scale. A row with infinity or NaN makes every matmul result
    NaN, which sampling detects.
    """
    wide = rows.float()
    largest = wide.abs().amax(1)
    # On a GPU, torch computes division by a constant as multiplication by its reciprocal, and the last bit differs from
    # the CPU's. Dividing by a tensor avoids this.
    scales = (largest / torch.full_like(largest, FP8_LARGEST)).clamp(min=FP8_MIN_SCALE)
    return (wide / scales[:, None]).to(torch.float8_e4m3fn), scales


class Fp8Weight:
    """A linear layer's weight [out, in] in fp8. :meth:`pack_rows` fills it, and may overwrite it later."""

    def __init__(self, out_features: int, in_features: int, device: torch.device) -> None:
        self.values = torch.empty((out_features, in_features), dtype=torch.float8_e4m3fn, device=device)
        self.scales = torch.empty(out_features, dtype=torch.float32, device=device)

    def pack_rows(self, source: Tensor, first_row: int = 0, *, mapped: bool = False) -> None:
        """Quantise ``source`` [rows, in], of any float dtype on any device, as the outputs from ``first_row`` on.

        ``mapped`` has the meaning of :meth:`~chairlift.kernels.cpu.packing.PackedWeight.pack_rows`.
        """

        def pack(start: int, rows: Tensor) -> None:
            place = slice(first_row + start, first_row + start + len(rows))
            self.values[place], self.scales[place] = quantize(rows.to(self.values.device))

        by_slices(source, pack, mapped=mapped)

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in] converted to floats of ``dtype``."""
        return (self.values.float() * self.scales[:, None]).to(dtype)


def fp8_linear(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``, written as its definition, without rounding activations. The Triton kernels are the fast
    version."""
    return torch.nn.functional.linear(x, weight.unpack(x.dtype), bias)
