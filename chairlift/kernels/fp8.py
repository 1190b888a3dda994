"""Linear layers with weights of 8 bits: float8_e4m3fn (Micikevicius et al., 2022) and one scale for each output."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from chairlift.kernels.cpu.packing import by_slices

__all__ = ["FP8_LARGEST", "FP8_LEAST_SCALE", "Fp8Weight", "fp8_linear", "quantize"]

FP8_LARGEST: Final = 448.0
"""Largest value of the format."""
FP8_LEAST_SCALE: Final = torch.finfo(torch.float32).tiny
"""That of zeros, so that nothing is divided by 0."""


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 values [N, K] and float32 scales [N] of ``rows`` [N, K]: a row is about its values times its scale.

    The largest of a row becomes the largest of the format. A number is off by a 16th at most, small ones by 2^-10
    scales. A row with an infinity or NaN gives NaN in every product, which is found where tokens are drawn.
    """
    wide = rows.float()
    largest = wide.abs().amax(1)
    # Division by a number would be a product with its reciprocal on a GPU, and its last bit another than the CPU's.
    scales = (largest / torch.full_like(largest, FP8_LARGEST)).clamp(min=FP8_LEAST_SCALE)
    return (wide / scales[:, None]).to(torch.float8_e4m3fn), scales


class Fp8Weight:
    """A linear layer's weight [out, in]; :meth:`pack_rows` fills it, and writes other weights over it."""

    def __init__(self, out_features: int, in_features: int, device: torch.device) -> None:
        self.values = torch.empty((out_features, in_features), dtype=torch.float8_e4m3fn, device=device)
        self.scales = torch.empty(out_features, dtype=torch.float32, device=device)

    def pack_rows(self, source: Tensor, first_row: int = 0, *, mapped: bool = False) -> None:
        """Quantise ``source`` [rows, in], of any float dtype on any device, as outputs ``first_row`` and following.

        ``mapped`` is as in :meth:`~chairlift.kernels.cpu.packing.PackedWeight.pack_rows`.
        """

        def pack(start: int, rows: Tensor) -> None:
            place = slice(first_row + start, first_row + start + len(rows))
            self.values[place], self.scales[place] = quantize(rows.to(self.values.device))

        by_slices(source, pack, mapped=mapped)

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """The weight that the values stand for, [out, in]."""
        return (self.values.float() * self.scales[:, None]).to(dtype)


def fp8_linear(x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` by definition, activations as they are; the Triton kernels are what is fast."""
    return torch.nn.functional.linear(x, weight.unpack(x.dtype), bias)
