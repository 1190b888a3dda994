"""``quant_method`` gptq: 4 or 8 bits in groups, written by AutoGPTQ and GPTQModel."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from chairlift.kernels.grouped import GroupKind
from chairlift.models.formats.quantized_checkpoints.layer import (
    FLOATS,
    FloatRows,
    IntegerRows,
    StoredLayer,
    StoredTensor,
    group_of_rows,
    unpacked,
)
from chairlift.models.formats.quantized_checkpoints.settings import QuantizationSettings
from chairlift.models.formats.stored_rows import StoredRows

__all__ = ["method"]


@dataclasses.dataclass(frozen=True)
class _Gptq:
    bits: int
    group: int
    symmetric: bool
    reordered: bool
    """Whether the columns of a group may be scattered (``desc_act``). If so, ``g_idx`` gives each column's group."""
    zero_shift: int
    """Number to add to a stored zero point. It is 1 for version 1 of the format, which stores zero points minus one,
    otherwise 0."""
    marks: frozenset[str] = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    companions: frozenset[str] = frozenset()

    def rows(self, layer: StoredLayer) -> StoredRows:
        per_word = 32 // self.bits
        qweight = layer.take("qweight", ("I32",))
        k = qweight.shape[0] * per_word
        n = qweight.shape[1]
        whole = self.group == -1 or self.group >= k
        groups = 1 if whole else -(-k // self.group)
        scales = layer.take("scales", FLOATS, (groups, n))
        zeros = None
        if not self.symmetric or "qzeros" in layer:
            zeros = layer.take("qzeros", ("I32",), (groups, -(-n // per_word)))
        order = self._order(layer, k, k if whole else self.group, groups)

        def codes(first: int, last: int) -> Tensor:
            return unpacked(qweight.columns(first, last), self.bits)

        def zero_codes(first: int, last: int) -> Tensor:
            return self._zeros(zeros, groups, first, last)

        if order is not None:  # groups of columns that are not adjacent are not supported by the kernels

            def read(first: int, last: int) -> Tensor:
                values = codes(first, last).float().sub_(zero_codes(first, last).float()[:, order])
                return values.mul_(scales.columns(first, last).float()[:, order])

            return FloatRows((n, k), read)
        kind = GroupKind(self.bits, group_of_rows(k) if whole else self.group, minimum=not self.symmetric)
        return IntegerRows((n, k), kind, codes, scales.columns, None if self.symmetric else zero_codes)

    def _zeros(self, stored: StoredTensor | None, groups: int, first: int, last: int) -> Tensor:
        """Zero points of outputs ``first`` to ``last`` (excluded): uint8 [outputs, groups]."""
        if self.symmetric or stored is None:
            return torch.full((last - first, groups), 1 << (self.bits - 1), dtype=torch.uint8)
        per_word = 32 // self.bits
        begin, end = first // per_word, -(-last // per_word)
        packed = stored.columns(begin, end)  # [words, groups]
        codes = unpacked(packed.view(-1, 1), self.bits).view(len(packed), groups, per_word)
        outputs = codes.transpose(1, 2).flatten(0, 1)[first - per_word * begin : last - per_word * begin]
        return (outputs + self.zero_shift) & ((1 << self.bits) - 1)

    def _order(self, layer: StoredLayer, k: int, group: int, groups: int) -> Tensor | None:
        """int64 [in], the group of each column; None if each group is a run of adjacent columns, in order."""
        if "g_idx" not in layer and not self.reordered:
            return None
        order = layer.take("g_idx", ("I32", "I64"), (k,)).read().long()
        if int(order.min()) < 0 or int(order.max()) >= groups:
            low, high = int(order.min()), int(order.max())
            layer.fail("g_idx", f"has numbers from {low} to {high}, but there are {groups} groups")
        return None if torch.equal(order, torch.arange(k) // group) else order


def method(settings: QuantizationSettings) -> _Gptq:
    """Read the settings of gptq. Raises ModelLoadError for other numbers of bits and other formats, and for settings
    per layer."""
    settings.absent("dynamic", "is_marlin_format")
    key = "checkpoint_format" if "checkpoint_format" in settings else "format"
    stored_as = settings.one_of(key, ("gptq", "gptq_v2"), "gptq")
    return _Gptq(
        bits=settings.one_of("bits", (4, 8)),
        group=settings.group_size(),
        symmetric=settings.flag("sym", True),
        reordered=settings.flag("desc_act", False),
        zero_shift=1 if stored_as == "gptq" else 0,
    )
