"""``quant_method`` compressed-tensors, written by LLM Compressor: three of its formats.

``int-quantized`` has one byte per weight, ``pack-quantized`` words of codes, ``float-quantized`` 8-bit floats.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from chairlift.errors import ModelLoadError
from chairlift.kernels.grouped import GroupKind
from chairlift.models.formats.quantized_checkpoints.float8 import float8_rows
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
from chairlift.models.formats.quantized_checkpoints.settings import QuantizationSettings

__all__ = ["method"]

_Read = Callable[[int, int], Tensor]


@dataclasses.dataclass(frozen=True)
class _Weights:
    """How the weights of all quantised layers are stored: bits per number, zero points, numbers per scale."""

    bits: int
    symmetric: bool
    strategy: str
    group: int
    """Number of columns that share a scale; -1 if scales are not per group."""
    block: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class _IntQuantized:
    weights: _Weights
    marks: frozenset[str] = frozenset({"weight_scale", "weight_zero_point"})
    companions: frozenset[str] = frozenset({"weight"})

    def rows(self, layer: StoredLayer) -> IntegerRows:
        weight = layer.take("weight", ("I8",))
        n, k = weight.shape
        scales, shape = _scales(self.weights, layer, n, k)
        zeros = None
        if _has_zeros(self.weights, layer):
            stored = layer.take("weight_zero_point", ("I8",), shape)
            signed = _by_row(stored, n)
            zeros = lambda first, last: signed(first, last).float() + 128  # noqa: E731

        def codes(first: int, last: int) -> Tensor:
            return weight.rows(first, last).view(torch.uint8) ^ 128  # from signed bytes to unsigned: add 128

        return IntegerRows((n, k), _kind(self.weights, k), codes, scales, zeros)


@dataclasses.dataclass(frozen=True)
class _PackQuantized:
    weights: _Weights
    marks: frozenset[str] = frozenset({"weight_packed", "weight_scale", "weight_zero_point", "weight_shape"})
    companions: frozenset[str] = frozenset()

    def rows(self, layer: StoredLayer) -> IntegerRows:
        bits = self.weights.bits
        packed = layer.take("weight_packed", ("I32",))
        n = packed.shape[0]
        k = self._columns(layer, packed)
        scales, (_, *groups) = _scales(self.weights, layer, n, k)
        zeros = None
        if _has_zeros(self.weights, layer):
            words = layer.take("weight_zero_point", ("I32",), (-(-n * bits // 32), *groups))
            zeros = lambda first, last: _packed_by_output(words, bits, first, last)  # noqa: E731

        def codes(first: int, last: int) -> Tensor:
            return unpacked(packed.rows(first, last), bits)[:, :k].contiguous()

        return IntegerRows((n, k), _kind(self.weights, k), codes, scales, zeros)

    def _columns(self, layer: StoredLayer, packed: StoredTensor) -> int:
        """Number of columns of the layer's weight. The last word of a packed row may be only partly used."""
        per_word = 32 // self.weights.bits
        n, words = packed.shape
        if "weight_shape" not in layer:
            return words * per_word
        shape = layer.take("weight_shape", ("I64", "I32"), (2,)).read().tolist()
        if shape[0] != n or not words - 1 < shape[1] / per_word <= words:
            layer.fail("weight_shape", f"says {shape}, but weight_packed has room for {[n, words * per_word]}")
        return int(shape[1])


@dataclasses.dataclass(frozen=True)
class _FloatQuantized:
    weights: _Weights
    marks: frozenset[str] = frozenset({"weight_scale"})
    companions: frozenset[str] = frozenset({"weight"})

    def rows(self, layer: StoredLayer) -> FloatRows:
        return float8_rows(layer, "weight_scale", self.weights.block)


def _kind(weights: _Weights, k: int) -> GroupKind:
    return GroupKind(weights.bits, group_of_rows(k) if weights.group == -1 else weights.group, not weights.symmetric)


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
    per_word = 32 // bits
    begin, end = first // per_word, -(-last // per_word)
    packed = words.rows(begin, end)
    codes = unpacked(packed.view(-1, 1), bits).view(*packed.shape, per_word)
    return codes.transpose(1, 2).flatten(0, 1)[first - per_word * begin : last - per_word * begin]


_FORMATS: Final[Mapping[str, tuple[type[Any], str, tuple[int, ...], tuple[str, ...]]]] = {
    "float-quantized": (_FloatQuantized, "float", (8,), ("tensor", "channel", "block")),
    "int-quantized": (_IntQuantized, "int", (8,), ("tensor", "channel", "group")),
    "pack-quantized": (_PackQuantized, "int", (4, 8), ("tensor", "channel", "group")),
}
"""Name of a format -> (class that reads it, supported type of numbers, supported numbers of bits, supported
strategies)."""


def method(settings: QuantizationSettings) -> Method:
    """Read the settings of compressed-tensors. Raises ModelLoadError for settings that this package cannot compute
    correctly."""
    settings.absent("kv_cache_scheme", "transform_config")
    if (sparsity := settings.part("sparsity_config")) is not None:
        sparsity.one_of("format", ("dense",), "dense")  # older versions write it for weights without sparsity
    name = settings.one_of("format", tuple(_FORMATS))
    groups = settings.part("config_groups")
    names = list(settings.get("config_groups", ()))
    found = []
    for each in names:
        group = groups.part(each) if groups is not None else None
        if group is None or (weights := group.part("weights")) is None:
            raise ModelLoadError(f"{settings.where}: config_groups.{each!s:.80} has no weights; use another version")
        _check_activations(group)
        group.one_of("format", (name,), name)
        found.append(_read_weights(weights, name))
    if len(set(found)) != 1:
        given = "; ".join(map(str, dict.fromkeys(found))) or "none"
        raise ModelLoadError(
            f"{settings.where}: config_groups has {len(set(found))} ways of writing weights ({given:.300}); supported:"
            " one for all layers; use a version of the model with one, or the original weights"
        )
    made: Method = _FORMATS[name][0](found[0])
    return made


def _check_activations(group: QuantizationSettings) -> None:
    group.absent("output_activations")
    if (inputs := group.part("input_activations")) is not None:
        inputs.one_of("dynamic", (True,), False)  # scales in the file would be ignored


def _read_weights(weights: QuantizationSettings, name: str) -> _Weights:
    _, kind, widths, strategies = _FORMATS[name]
    weights.one_of("type", (kind,), "int")
    weights.absent("dynamic")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        weights.refuse("actorder", "null, weight and static")
    group = weights.group_size()
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
