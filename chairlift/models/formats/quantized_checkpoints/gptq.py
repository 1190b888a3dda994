"""``quant_method`` gptq: 2, 3, 4 or 8 bits in groups, written by AutoGPTQ and GPTQModel."""

from __future__ import annotations

import dataclasses
from typing import Final

import torch
from torch import Tensor

from chairlift.kernels.grouped import GroupKind
from chairlift.models.formats.quantized_checkpoints.layer import (
    FLOATS,
    FloatRows,
    IntegerRows,
    Method,
    StoredLayer,
    StoredTensor,
    group_of_rows,
    unpacked,
)
from chairlift.models.formats.quantized_checkpoints.mixed import one_method
from chairlift.models.formats.quantized_checkpoints.settings import QuantizationSettings
from chairlift.models.formats.stored_rows import StoredRows

__all__ = ["method"]

_PER_LAYER: Final = ("bits", "group_size", "sym", "desc_act")
"""Settings that a pattern of ``dynamic`` may change."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gptq(Method):
    bits: int
    group: int
    symmetric: bool
    reordered: bool
    """Whether the columns of a group may be scattered (``desc_act``). If so, ``g_idx`` gives each column's group."""
    zero_shift: int
    """Number to add to a stored zero point. It is 1 for version 1 of the format, which stores zero points minus one,
    otherwise 0."""
    marks: frozenset[str] = frozenset({"qweight", "qzeros", "scales", "g_idx"})

    def rows(self, layer: StoredLayer) -> StoredRows:
        qweight = layer.take("qweight", ("I32",))
        k = qweight.shape[0] * 32 // self.bits
        n = qweight.shape[1]
        whole = self.group == -1 or self.group >= k
        groups = 1 if whole else -(-k // self.group)
        scales = layer.take("scales", FLOATS, (groups, n))
        zeros = None
        if not self.symmetric or "qzeros" in layer:
            zeros = layer.take("qzeros", ("I32",), (groups, -(-n * self.bits // 32)))
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
        kind = GroupKind(max(self.bits, 4), group_of_rows(k) if whole else self.group, minimum=not self.symmetric)
        shift = kind.zero - (1 << (self.bits - 1)) if self.symmetric else 0

        def codes_of_kind(first: int, last: int) -> Tensor:
            return codes(first, last) + shift

        if shift:  # codes of 2 and 3 bits around the zero point of 4 bits
            return IntegerRows((n, k), kind, codes_of_kind, scales.columns, None)
        return IntegerRows((n, k), kind, codes, scales.columns, None if self.symmetric else zero_codes)

    def _zeros(self, stored: StoredTensor | None, groups: int, first: int, last: int) -> Tensor:
        """Zero points of outputs ``first`` to ``last`` (excluded): uint8 [outputs, groups]."""
        if self.symmetric or stored is None:
            return torch.full((last - first, groups), 1 << (self.bits - 1), dtype=torch.uint8)
        begin = first // 32  # 32 zero points fill whole words
        words = slice(begin * self.bits, min(-(-last // 32) * self.bits, stored.shape[1]))
        packed = stored.columns(words.start, words.stop).t().contiguous()  # [groups, words]
        outputs = unpacked(packed, self.bits).t()[first - 32 * begin : last - 32 * begin]
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


def method(settings: QuantizationSettings) -> Method:
    """Read the settings of gptq. Raises ModelLoadError for other numbers of bits and other formats.

    GPTQModel's ``dynamic`` has settings for the layers whose names match a pattern. Patterns that begin with ``-:``
    leave layers out, which are floats in the file.
    """
    variants = [settings]
    patterns = settings.part("dynamic")
    for pattern in () if patterns is None else patterns.keys():
        own = None if pattern.startswith("-:") or patterns is None else patterns.part(pattern)
        if own is not None:
            variants.append(settings.changed({key: own.get(key) for key in _PER_LAYER if key in own}))
    return one_method([_read(each) for each in variants])


def _read(settings: QuantizationSettings) -> _Gptq:
    settings.absent("is_marlin_format")
    key = "checkpoint_format" if "checkpoint_format" in settings else "format"
    stored_as = settings.one_of(key, ("gptq", "gptq_v2"), "gptq")
    return _Gptq(
        bits=settings.one_of("bits", (2, 3, 4, 8)),
        group=settings.group_size(),
        symmetric=settings.flag("sym", True),
        reordered=settings.flag("desc_act", False),
        zero_shift=1 if stored_as == "gptq" else 0,
    )
