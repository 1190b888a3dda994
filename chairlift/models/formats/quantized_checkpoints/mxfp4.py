"""``quant_method`` mxfp4, the format of gpt-oss. Only the weights of experts are quantised."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from chairlift.kernels.cpu.packing import by_slices
from chairlift.kernels.grouped import GROUP, GroupedRows, GroupKind, dequantized
from chairlift.models.formats.quantized_checkpoints.layer import Method, StoredLayer, StoredTensor
from chairlift.models.formats.quantized_checkpoints.settings import QuantizationSettings
from chairlift.models.formats.stored_rows import StoredRows

__all__ = ["method"]

_BIAS = 127
"""Number that is subtracted from a stored 8-bit exponent (e8m0): the value is 2 ** (exponent - _BIAS)."""


class _Stack(StoredRows):
    """Rows [E R, K] of the experts' weights, which are [E, K, R] in the original model.

    ``blocks`` are uint8 [E, R, K / 32, 16], two codes per byte, the first in the low half. ``scales`` are exponents,
    uint8 [E, R, K / 32]. The exponent 255 means "not a number" and is converted to infinity.
    """

    kind = GroupKind(4, GROUP, e2m1=True)
    stacked = True

    def __init__(self, blocks: StoredTensor, scales: StoredTensor) -> None:
        self._blocks = blocks
        self._scales = scales
        self._count, self._rows, self._groups, _ = blocks.shape

    def get_shape(self) -> list[int]:
        return [self._count, self._groups * GROUP, self._rows]

    def __len__(self) -> int:
        return self._count * self._rows

    def __getitem__(self, rows: slice) -> GroupedRows:
        first, last, _ = rows.indices(len(self))
        packed, exponents = (each.read().flatten(0, 1)[first:last] for each in (self._blocks, self._scales))
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
        # Codes are stored as twice their value, so that all codes are integers. So the scales are halved.
        scales = torch.ldexp(torch.ones(exponents.shape), exponents.int() - _BIAS - 1)
        for view in (packed, exponents):
            by_slices(view, lambda *_: None, mapped=True)
        return GroupedRows(self.kind, codes, scales)

    def get_tensor(self, name: str) -> Tensor:
        return dequantized(self[:]).view(self._count, self._rows, -1).transpose(1, 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _MXFP4(Method):
    marks: frozenset[str] = frozenset({"blocks", "scales"})
    separator: str = "_"
    original: str = ""

    def rows(self, layer: StoredLayer) -> _Stack:
        blocks = layer.take("blocks", ("U8",), rank=4)
        if blocks.shape[3] != GROUP // 2:
            layer.fail("blocks", f"has shape {list(blocks.shape)}, but a block of 32 numbers has {GROUP // 2} bytes")
        return _Stack(blocks, layer.take("scales", ("U8",), blocks.shape[:3]))


def method(settings: QuantizationSettings) -> _MXFP4:
    """Return the reader of this method. It reads no settings: layers in ``modules_to_not_convert`` are recognised
    because they are not quantised in the file."""
    return _MXFP4()
