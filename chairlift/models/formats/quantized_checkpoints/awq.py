"""``quant_method`` awq, version ``gemm``: 4 bits in groups with zero points, the format of AutoAWQ."""

from __future__ import annotations

import dataclasses
from typing import Final

import torch
from torch import Tensor

from chairlift.kernels.grouped import GroupKind
from chairlift.models.formats.quantized_checkpoints.layer import (
    FLOATS,
    IntegerRows,
    Method,
    StoredLayer,
    StoredTensor,
    group_of_rows,
    unpacked,
)
from chairlift.models.formats.quantized_checkpoints.settings import QuantizationSettings

__all__ = ["method", "of_group"]

_ORDER: Final = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
"""For each of eight consecutive outputs, the index of the 4-bit code in a 32-bit word that belongs to this output."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Awq(Method):
    group: int
    marks: frozenset[str] = frozenset({"qweight", "qzeros", "scales"})

    def rows(self, layer: StoredLayer) -> IntegerRows:
        qweight = layer.take("qweight", ("I32",))
        k = qweight.shape[0]
        n = qweight.shape[1] * 8
        whole = self.group == -1
        groups = 1 if whole else -(-k // self.group)
        qzeros = layer.take("qzeros", ("I32",), (groups, n // 8))
        scales = layer.take("scales", FLOATS, (groups, n))
        return IntegerRows(
            (n, k),
            GroupKind(4, group_of_rows(k) if whole else self.group, minimum=True),
            lambda first, last: _outputs(qweight, first, last),
            scales.columns,
            lambda first, last: _outputs(qzeros, first, last),
        )


def _outputs(words: StoredTensor, first: int, last: int) -> Tensor:
    """4-bit codes of the ``words`` [inputs, outputs / 8] for outputs ``first`` to ``last`` (excluded): uint8 [outputs,
    inputs]."""
    begin, end = first // 8, -(-last // 8)
    packed = words.columns(begin, end)  # [words, inputs]
    nibbles = unpacked(packed.unsqueeze(-1).flatten(0, 1), 4)  # [words * inputs, 8]
    outputs = nibbles[:, _ORDER].view(len(packed), -1, 8).transpose(1, 2).flatten(0, 1)
    return outputs[first - 8 * begin : last - 8 * begin]


def method(settings: QuantizationSettings) -> Method:
    """Read the settings of awq. Raises ModelLoadError for other versions of the format and other numbers of bits."""
    settings.one_of("bits", (4,), 4)
    settings.one_of("zero_point", (True,), True)
    for key in ("version", "format"):
        settings.one_of(key, ("gemm", "GEMM"), "gemm")
    return of_group(settings.group_size())


def of_group(group: int) -> Method:
    """Reader of the version ``gemm`` with ``group`` columns for each scale; -1: all columns."""
    return _Awq(group=group)
