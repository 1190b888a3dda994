"""Weights of 8-bit floats with a scale for each block of rows and columns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from chairlift.kernels.grouped import GROUP, GroupKind
from chairlift.models.formats.quantized_checkpoints.float4 import powers_of_two
from chairlift.models.formats.quantized_checkpoints.layer import (
    FLOATS,
    FloatRows,
    IntegerRows,
    StoredLayer,
    StoredTensor,
)
from chairlift.models.formats.stored_rows import StoredRows

__all__ = ["float8_rows", "mxfp8_rows"]

_ONE = ((), (1,), (1, 1))
"""Shapes that a tensor with a single number may have."""


def float8_rows(layer: StoredLayer, scale: str, block: tuple[int, int] | None) -> StoredRows:
    """``weight`` e4m3 [N, K] times the tensor ``scale``.

    ``block`` is the (rows, columns) of a block that shares a scale; blocks at the edges may be smaller. If ``block`` is
    None, there is one scale per row, or one scale for the whole weight. Rows are codes in groups of the columns of a
    block, or float32 if these are no multiple of 32.
    """
    weight = layer.take("weight", ("F8_E4M3",))
    n, k = weight.shape
    rows, columns = block or (1, -(-k // GROUP) * GROUP)
    shapes = [(-(-n // rows), -(-k // columns))] if block else [(n, 1), (n,), *_ONE]
    stored = layer.take(scale, FLOATS, *shapes)
    single = block is None and stored.shape not in ((n, 1), (n,))

    def scales(first: int, last: int) -> Tensor:
        """Scales of some rows, float32 [rows, groups]."""
        found = stored.read().float()
        if single:
            return found.reshape(1, 1).expand(last - first, 1)
        return found.view(len(found), -1)[torch.arange(first, last) // rows]

    if columns % GROUP == 0:
        return _codes(weight, columns, scales)
    return FloatRows(
        (n, k),
        lambda first, last: (
            weight.rows(first, last).float().mul_(scales(first, last).repeat_interleave(columns, dim=1)[:, :k])
        ),
    )


def mxfp8_rows(layer: StoredLayer, scale: str) -> StoredRows:
    """``weight`` e4m3 [N, K] in groups of 32 columns, with the exponents ``scale``, uint8 [N, K / 32]."""
    weight = layer.take("weight", ("F8_E4M3",))
    n, k = weight.shape
    exponents = layer.take(scale, ("U8", "F8_E8M0"), (n, -(-k // GROUP)))
    return _codes(weight, GROUP, lambda first, last: powers_of_two(exponents.rows(first, last).view(torch.uint8)))


def _codes(weight: StoredTensor, group: int, scales: Callable[[int, int], Tensor]) -> IntegerRows:
    n, k = weight.shape
    kind = GroupKind(8, group, e4m3=True)
    return IntegerRows((n, k), kind, lambda first, last: weight.rows(first, last).view(torch.uint8), scales, None)
