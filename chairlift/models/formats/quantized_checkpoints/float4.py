"""Weights of 4-bit floats (e2m1) with a scale for each group of columns, two numbers in a byte.

NVFP4 (NVIDIA, 2024) has groups of 16 columns with e4m3 scales, and one float32 scale for the whole weight. MXFP4 (OCP
Microscaling Formats, 2023) has groups of 32 columns with powers of two. The kernels multiply MXFP4 as it is. Groups of
16 columns have no kernel, so NVFP4 becomes floats with exactly its values.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from chairlift.kernels.grouped import E2M1_VALUES, GROUP, GroupedRows, GroupKind
from chairlift.models.formats.quantized_checkpoints.layer import FloatRows, StoredLayer, StoredTensor
from chairlift.models.formats.stored_rows import StoredRows

__all__ = ["mxfp4_rows", "nvfp4_rows", "powers_of_two"]

_NVFP4_GROUP: Final = 16


def nvfp4_rows(
    layer: StoredLayer, weight: str, scale: str, second: str, *, divides: bool = False, columns: str = ""
) -> FloatRows:
    """NVFP4 as float32 [N, K].

    ``weight`` and ``scale`` are the endings of the names of the codes, uint8 [N, K / 2], and of the groups' scales.
    ``second`` is that of one float32 number by which all scales are multiplied, or divided if ``divides``.
    ``columns`` is the ending of a tensor [K] that multiplies each row of inputs; the weight is multiplied by it
    instead. Empty: there is none.
    """
    packed = layer.take(weight, ("U8",))
    n = packed.shape[0]
    k = packed.shape[1] * 2
    scales = layer.take(scale, ("F8_E4M3",), (n, -(-k // _NVFP4_GROUP)))
    factor = layer.take(second, ("F32",), (), (1,), (1, 1)).read().reshape(1, 1)
    inputs = layer.take(columns, ("F32", "F16", "BF16"), (k,)).read().float() if columns in layer else None

    def read(first: int, last: int) -> Tensor:
        groups = scales.rows(first, last).float()
        groups = groups / factor if divides else groups * factor
        values = _values(packed, first, last).mul_(groups.repeat_interleave(_NVFP4_GROUP, dim=1)[:, :k])
        return values if inputs is None else values.mul_(inputs)

    return FloatRows((n, k), read)


def mxfp4_rows(layer: StoredLayer, weight: str, scale: str) -> StoredRows:
    """MXFP4 with the exponents ``scale``, uint8 [N, K / 32], as 4-bit floats in groups of 32."""
    packed = layer.take(weight, ("U8",))
    n = packed.shape[0]
    k = packed.shape[1] * 2
    return _Mxfp4Rows(packed, layer.take(scale, ("U8",), (n, -(-k // GROUP))))


class _Mxfp4Rows(StoredRows):
    kind = GroupKind(4, GROUP, e2m1=True)

    def __init__(self, packed: StoredTensor, exponents: StoredTensor) -> None:
        self._packed = packed
        self._exponents = exponents

    def get_shape(self) -> list[int]:
        n, half = self._packed.shape
        return [n, 2 * half]

    def __getitem__(self, rows: slice) -> GroupedRows:
        first, last, _ = rows.indices(len(self))
        codes = _codes(self._packed, first, last)
        # Codes are stored as twice their value, so that all codes are integers. So the scales are halved.
        return GroupedRows(self.kind, codes, powers_of_two(self._exponents.rows(first, last)) / 2)


def powers_of_two(exponents: Tensor) -> Tensor:
    """Scales of 8-bit exponents (e8m0), uint8, as float32. The exponent 255 means "not a number", and gives
    infinity."""
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)


def _codes(packed: StoredTensor, first: int, last: int) -> Tensor:
    both = packed.rows(first, last)
    return torch.stack([both & 15, both >> 4], dim=-1).flatten(1)


def _values(packed: StoredTensor, first: int, last: int) -> Tensor:
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32) / 2
    return table[_codes(packed, first, last).int()]
