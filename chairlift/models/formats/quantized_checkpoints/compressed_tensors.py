"""``quant_method`` compressed-tensors, written by LLM Compressor.

``int-quantized`` has one byte per weight, ``pack-quantized`` words of codes, ``float-quantized`` 8-bit floats.
``nvfp4-pack-quantized``, ``mxfp4-pack-quantized`` and ``mxfp8-quantized`` have floats in groups. With
``mixed-precision``, groups of layers have formats of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from chairlift.errors import ModelLoadError
from chairlift.kernels.grouped import GroupKind
from chairlift.models.formats.quantized_checkpoints.float4 import mxfp4_rows, nvfp4_rows
from chairlift.models.formats.quantized_checkpoints.float8 import float8_rows, mxfp8_rows
from chairlift.models.formats.quantized_checkpoints.ignored_settings import (
    ACTIVATION_SCALES,
    KV_SCALES,
    STATIC_NOTE,
    kv_notes,
)
from chairlift.models.formats.quantized_checkpoints.layer import (
    FLOATS,
    FloatRows,
    IntegerRows,
    IntegerStack,
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

_Read = Callable[[int, int], Tensor]
_ORDER: Final = "weight_g_idx"
"""Last part of the name of the tensor with the group of each column, which older versions write."""


@dataclasses.dataclass(frozen=True)
class _Weights:
    """How the weights of all quantised layers are stored: bits per number, zero points, numbers per scale."""

    bits: int
    symmetric: bool
    strategy: str
    group: int
    """Number of columns that share a scale; -1 if scales are not per group."""
    block: tuple[int, int] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _IntQuantized(Method):
    weights: _Weights
    marks: frozenset[str] = frozenset({"weight_scale", "weight_zero_point", _ORDER})
    companions: frozenset[str] = frozenset({"weight"})

    def rows(self, layer: StoredLayer) -> StoredRows:
        weight = layer.take("weight", ("I8",))
        n, k = weight.shape
        half = 1 << (self.weights.bits - 1)
        scales, shape = _scales(self.weights, layer, n, k)
        zeros = None
        if _has_zeros(self.weights, layer):
            stored = layer.take("weight_zero_point", ("I8",), shape)
            signed = _by_row(stored, n)
            zeros = lambda first, last: signed(first, last).float() + half  # noqa: E731

        def codes(first: int, last: int) -> Tensor:
            numbers = weight.rows(first, last)
            if half < 128 and bool(((numbers < -half) | (numbers >= half)).any()):
                layer.fail("weight", f"has numbers of more than the {self.weights.bits} bits of num_bits")
            return numbers.view(torch.uint8) + half  # from signed bytes to unsigned, modulo 256

        return _in_order(self.weights, layer, (n, k), codes, scales, zeros)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PackQuantized(Method):
    weights: _Weights
    marks: frozenset[str] = frozenset({"weight_packed", "weight_scale", "weight_zero_point", "weight_shape", _ORDER})

    def rows(self, layer: StoredLayer) -> StoredRows:
        bits = self.weights.bits
        packed = layer.take("weight_packed", ("I32",))
        n = packed.shape[0]
        whole = self._whole_shape(layer, packed)
        k = whole[1]
        scales, (_, *groups) = _scales(self.weights, layer, n, k)
        kind = _kind(self.weights, k)
        zeros = None
        if _has_zeros(self.weights, layer):
            words = layer.take("weight_zero_point", ("I32",), (-(-n * bits // 32), *groups))
            zeros = lambda first, last: _packed_by_output(words, bits, first, last)  # noqa: E731
        shift = kind.zero - (1 << (bits - 1)) if self.weights.symmetric else 0  # to the zero point of the kernels

        def codes(first: int, last: int) -> Tensor:
            found = unpacked(packed.rows(first, last), bits)[:, :k].contiguous()
            return found.add_(shift) if shift else found

        if len(whole) > 2:
            return IntegerStack((n, k), whole[2:], kind, codes, scales, zeros)
        return _in_order(self.weights, layer, (n, k), codes, scales, zeros)

    def _whole_shape(self, layer: StoredLayer, packed: StoredTensor) -> tuple[int, ...]:
        """(rows, columns) of the layer's weight, and for a stack of experts then the shape of the original tensor. The
        last word of a packed row may be only partly used."""
        bits = self.weights.bits
        n, words = packed.shape
        columns = words * 32 // bits
        if "weight_shape" not in layer:
            return (n, columns)
        shape = layer.take("weight_shape", ("I64", "I32"), (2,), (3,)).read().tolist()
        if len(shape) == 3:  # [experts, outputs, inputs] or [experts, inputs, outputs]
            count, first, second = shape
            if (count * first, second) != (n, columns) and (count * second, first) != (n, columns):
                layer.fail("weight_shape", f"says {shape}, but weight_packed has room for {[n, columns]}")
            return (n, columns, *shape)
        if shape[0] != n or -(-shape[1] * bits // 32) != words:
            layer.fail("weight_shape", f"says {shape}, but weight_packed has room for {[n, columns]}")
        return (n, int(shape[1]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FloatQuantized(Method):
    weights: _Weights
    marks: frozenset[str] = frozenset({"weight_scale"})
    companions: frozenset[str] = frozenset({"weight"})

    def rows(self, layer: StoredLayer) -> StoredRows:
        return float8_rows(layer, "weight_scale", self.weights.block)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Mxfp8(Method):
    weights: _Weights
    marks: frozenset[str] = frozenset({"weight_scale"})
    companions: frozenset[str] = frozenset({"weight"})

    def rows(self, layer: StoredLayer) -> StoredRows:
        return mxfp8_rows(layer, "weight_scale")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Mxfp4(Method):
    weights: _Weights
    marks: frozenset[str] = frozenset({"weight_packed", "weight_scale"})

    def rows(self, layer: StoredLayer) -> StoredRows:
        return mxfp4_rows(layer, "weight_packed", "weight_scale")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Nvfp4(Method):
    weights: _Weights
    marks: frozenset[str] = frozenset({"weight_packed", "weight_scale", "weight_global_scale"})

    def rows(self, layer: StoredLayer) -> StoredRows:
        return nvfp4_rows(layer, "weight_packed", "weight_scale", "weight_global_scale", divides=True)


def _in_order(
    weights: _Weights, layer: StoredLayer, shape: tuple[int, int], codes: _Read, scales: _Read, zeros: _Read | None
) -> StoredRows:
    """Rows of integers; floats if the columns of a group are scattered (``actorder`` group), which no kernel
    supports."""
    if _ORDER not in layer:
        return IntegerRows(shape, _kind(weights, shape[1]), codes, scales, zeros)
    k = shape[1]
    order = layer.take(_ORDER, ("I32", "I64"), (k,)).read().long()
    groups = -(-k // weights.group) if weights.strategy == "group" else 1
    if int(order.min()) < 0 or int(order.max()) >= groups:
        low, high = int(order.min()), int(order.max())
        layer.fail(_ORDER, f"has numbers from {low} to {high}, but there are {groups} groups")
    if weights.strategy != "group" or torch.equal(order, torch.arange(k) // weights.group):
        return IntegerRows(shape, _kind(weights, k), codes, scales, zeros)
    middle = float(GroupKind(_kind(weights, k).bits, weights.group).zero)

    def read(first: int, last: int) -> Tensor:
        zero = middle if zeros is None else zeros(first, last).float()[:, order]
        return (codes(first, last).float() - zero).mul_(scales(first, last).float()[:, order])

    return FloatRows(shape, read)


def _kind(weights: _Weights, k: int) -> GroupKind:
    """The kind of the kernels: codes of 4 or 8 bits."""
    group = group_of_rows(k) if weights.group == -1 else weights.group
    return GroupKind(4 if weights.bits <= 4 else 8, group, not weights.symmetric)


def _scales(weights: _Weights, layer: StoredLayer, n: int, k: int) -> tuple[_Read, tuple[int, ...]]:
    """(function that reads scales [rows, groups or 1], shape of the scales in the file)."""
    shapes: dict[str, list[tuple[int, ...]]] = {
        "tensor": [(1,), (), (1, 1)],
        "channel": [(n, 1)],
        "group": [(n, -(-k // max(weights.group, 1)))],
    }
    stored = layer.take("weight_scale", FLOATS, *shapes[weights.strategy])
    return _by_row(stored, n), stored.shape


def _by_row(stored: StoredTensor, n: int) -> _Read:
    if len(stored.shape) == 2 and stored.shape[0] == n:
        return stored.rows
    return lambda first, last: stored.read().reshape(1, 1).expand(last - first, 1)


def _has_zeros(weights: _Weights, layer: StoredLayer) -> bool:
    if not weights.symmetric:
        return True
    if "weight_zero_point" in layer:  # older versions store zeros for symmetric weights
        stored = layer.take("weight_zero_point", ("I8", "I32"), rank=2)
        if bool(stored.read().any()):
            layer.fail("weight_zero_point", "is not 0, but quantization_config says that weights are symmetric")
    return False


def _packed_by_output(words: StoredTensor, bits: int, first: int, last: int) -> Tensor:
    """Unpack codes along the outputs: ``words`` [outputs * bits / 32, groups] -> uint8 [outputs, groups] for outputs
    ``first`` to ``last`` (excluded)."""
    begin, end = first // 32, -(-last // 32)  # 32 outputs fill whole words
    packed = words.rows(bits * begin, min(bits * end, words.shape[0]))
    return unpacked(packed.t().contiguous(), bits).t()[first - 32 * begin : last - 32 * begin]


_FLOATS_IN_GROUPS: Final = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32, "mxfp8-quantized": 32}
"""Format of floats -> columns of a group."""
_FORMATS: Final[Mapping[str, tuple[type[Any], str, tuple[int, ...], tuple[str, ...]]]] = {
    "float-quantized": (_FloatQuantized, "float", (8,), ("tensor", "channel", "block")),
    "int-quantized": (_IntQuantized, "int", (4, 8), ("tensor", "channel", "group")),
    "mxfp4-pack-quantized": (_Mxfp4, "float", (4,), ("group",)),
    "mxfp8-quantized": (_Mxfp8, "float", (8,), ("group",)),
    "nvfp4-pack-quantized": (_Nvfp4, "float", (4,), ("tensor_group",)),
    "pack-quantized": (_PackQuantized, "int", (2, 3, 4, 5, 6, 7, 8), ("tensor", "channel", "group")),
}
"""Name of a format -> (class that reads it, supported type of numbers, supported numbers of bits, supported
strategies)."""
_MIXED: Final = "mixed-precision"
"""Format of a checkpoint whose groups of layers have formats of their own."""


def method(settings: QuantizationSettings) -> Method:
    """Read the settings of compressed-tensors. Raises ModelLoadError for settings that this package cannot compute
    correctly."""
    settings.absent("transform_config")
    if (sparsity := settings.part("sparsity_config")) is not None:
        sparsity.one_of("format", ("dense",), "dense")  # older versions write it for weights without sparsity
    kv = kv_notes(settings, "kv_cache_scheme")
    if kv and settings.get("format") == "dense":  # only the KV cache is quantised
        return _FloatsOnly(marks=frozenset(), dropped=KV_SCALES, notes=kv)
    name = settings.one_of("format", (*_FORMATS, _NAIVE, _MIXED))
    groups = settings.part("config_groups")
    methods = []
    for each in () if groups is None else groups.keys():
        group = groups.part(each) if groups is not None else None
        if group is None or (weights := group.part("weights")) is None:
            raise ModelLoadError(f"{settings.where}: config_groups.{each!s:.80} has no weights; use another version")
        static = _has_fixed_scales(group)
        form = _format_of(group, weights, name)
        methods.append(
            _FORMATS[form][0](
                weights=_read_weights(weights, form),
                dropped=(ACTIVATION_SCALES if static else frozenset()) | (KV_SCALES if kv else frozenset()),
                notes=((STATIC_NOTE,) if static else ()) + kv,
            )
        )
    if not methods:
        settings.refuse("config_groups", "an object with at least one group of layers")
    return one_method(methods)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FloatsOnly(Method):
    """No layer is quantised."""

    def rows(self, layer: StoredLayer) -> StoredRows:
        layer.fail(min(layer.files), "belongs to no format that the config names")


_NAIVE: Final = "naive-quantized"
"""Format of numbers of one byte, integers or floats."""


def _format_of(group: QuantizationSettings, weights: QuantizationSettings, whole: str) -> str:
    """Format of a group of layers. ``whole`` is that of the checkpoint."""
    known = (*_FORMATS, _NAIVE)
    form = group.one_of("format", known, None if whole == _MIXED else whole)
    if form != _NAIVE:
        return str(form)
    return "float-quantized" if weights.get("type") == "float" else "int-quantized"


def _has_fixed_scales(group: QuantizationSettings) -> bool:
    """Whether the file has scales of activations. ``local`` scales are computed, and multiplied by one in the file."""
    group.absent("output_activations")
    inputs = group.part("input_activations")
    return inputs is not None and inputs.one_of("dynamic", (True, False, "local"), False) is not True


def _read_weights(weights: QuantizationSettings, name: str) -> _Weights:
    _, kind, widths, strategies = _FORMATS[name]
    weights.one_of("type", (kind,), "int")
    weights.absent("dynamic")
    if weights.get("actorder") not in (None, False, True, "group", "weight", "static"):
        weights.refuse("actorder", "null, group, weight and static")
    small = name in _FLOATS_IN_GROUPS
    group = weights.one_of("group_size", (_FLOATS_IN_GROUPS[name],)) if small else weights.group_size()
    default = "channel" if "group_size" in weights else "tensor"
    strategy = weights.get("strategy", "group" if group > 0 else default)
    if strategy not in strategies:
        weights.refuse("strategy", ", ".join(strategies))
    if strategy == "group" and group == -1:
        weights.refuse("group_size", "multiples of 32")
    block = weights.block("block_structure") if strategy == "block" else None
    if strategy == "block" and block is None:
        weights.refuse("block_structure", "two numbers above 0, such as [128, 128]")
    symmetric = weights.flag("symmetric", True)
    if kind == "float" and not symmetric:
        weights.refuse("symmetric", "true")
    bits = weights.one_of("num_bits", widths, 8)
    return _Weights(bits, symmetric, strategy, group if strategy == "group" else -1, block)
