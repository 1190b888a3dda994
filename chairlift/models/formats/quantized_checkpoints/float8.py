"""Weights of 8-bit floats with a scale for each block of rows and columns."""

from __future__ import annotations

import torch
from torch import Tensor

from chairlift.kernels.grouped import GROUP
from chairlift.models.formats.quantized_checkpoints.float4 import powers_of_two
from chairlift.models.formats.quantized_checkpoints.layer import FLOATS, FloatRows, StoredLayer

__all__ = ["float8_rows", "mxfp8_rows"]

_ONE = ((), (1,), (1, 1))
"""Shapes that a tensor with a single number may have."""


def float8_rows(layer: StoredLayer, scale: str, block: tuple[int, int] | None) -> FloatRows:
    """``weight`` e4m3 [N, K] times the tensor ``scale``, as float32 [N, K].

    ``block`` is the (rows, columns) of a block that shares a scale; blocks at the edges may be smaller. If ``block`` is
    None, there is one scale per row, or one scale for the whole weight.
    """
    weight = layer.take("weight", ("F8_E4M3",))
    n, k = weight.shape
    rows, columns = block or (1, k)
    shapes = [(-(-n // rows), -(-k // columns))] if block else [(n, 1), (n,), *_ONE]
    stored = layer.take(scale, FLOATS, *shapes)
    single = block is None and stored.shape not in ((n, 1), (n,))

    def read(first: int, last: int) -> Tensor:
        scales = stored.read().float()
        if scales.shape == (n,):
            scales = scales.view(n, 1)
        if single:
            factors = scales.reshape(1, 1)
        else:
            factors = scales[torch.arange(first, last) // rows].repeat_interleave(columns, dim=1)[:, :k]
        return weight.rows(first, last).float().mul_(factors)

    return FloatRows((n, k), read)


def mxfp8_rows(layer: StoredLayer, scale: str) -> FloatRows:
    """``weight`` e4m3 [N, K] in groups of 32 columns, with the exponents ``scale``, uint8 [N, K / 32], as float32."""
    weight = layer.take("weight", ("F8_E4M3",))
    n, k = weight.shape
    exponents = layer.take(scale, ("U8", "F8_E8M0"), (n, -(-k // GROUP)))

    def read(first: int, last: int) -> Tensor:
        scales = powers_of_two(exponents.rows(first, last).view(torch.uint8))
        return weight.rows(first, last).float().mul_(scales.repeat_interleave(GROUP, dim=1)[:, :k])

    return FloatRows((n, k), read)
