"""``quant_method`` bitsandbytes: 4-bit codes of a table (nf4, fp4), and 8 bits with a scale for each row.

In 4 bits, consecutive numbers of the flattened weight form a block with a scale, the largest magnitude in it. A block
may cross rows. The scales may be codes of 8 bits of a second table in turn ("double quantisation").
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from chairlift.kernels.grouped import GroupKind
from chairlift.models.formats.quantized_checkpoints.layer import (
    FloatRows,
    IntegerRows,
    Method,
    StoredLayer,
    group_of_rows,
)
from chairlift.models.formats.quantized_checkpoints.settings import QuantizationSettings

__all__ = ["method"]

_STATES: Final = tuple(f"weight.quant_state.bitsandbytes__{name}" for name in ("nf4", "fp4"))
_ENDINGS: Final = frozenset(
    {
        *("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", *_STATES),
        *("weight", "SCB", "weight_format"),
    }
)
_LAYER: Final = re.compile(rf"(.+)\.({'|'.join(re.escape(each) for each in sorted(_ENDINGS, reverse=True))})")
_MOST_STATE_BYTES: Final = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FourBits(Method):
    marks: frozenset[str] = _ENDINGS - {"weight", "SCB", "weight_format"}
    companions: frozenset[str] = frozenset({"weight"})

    def split(self, name: str) -> tuple[str, str]:
        return _split(name)

    def rows(self, layer: StoredLayer) -> FloatRows:
        state = _State.of(layer)
        n, k = state.shape
        blocks = -(-n * k // state.block)
        weight = layer.take("weight", ("U8", "BF16", "F16", "F32"))
        table = layer.take("weight.quant_map", ("F32",), (16,)).read().clone()
        if weight.nbytes * 2 != n * k:
            layer.fail("weight", f"has {weight.nbytes:,} bytes, but 4-bit codes of shape {[n, k]} have {n * k // 2:,}")
        scales = _scales(layer, state, blocks)

        def read(first: int, last: int) -> Tensor:
            begin = first * k
            end = last * k
            packed = weight.bytes_of(begin // 2, end // 2)
            codes = torch.stack([packed >> 4, packed & 15], dim=-1).flatten()
            first_block = begin // state.block
            factors = scales(first_block, -(-end // state.block)).repeat_interleave(state.block)
            skipped = begin - first_block * state.block
            return (table[codes.int()] * factors[skipped : skipped + len(codes)]).view(last - first, k)

        return FloatRows((n, k), read)


@dataclasses.dataclass(frozen=True)
class _State:
    """The JSON text in the tensor ``quant_state``."""

    shape: tuple[int, int]
    block: int
    nested_block: int
    nested_offset: float

    @classmethod
    def of(cls, layer: StoredLayer) -> _State:
        ending = next((each for each in _STATES if each in layer), _STATES[0])
        stored = layer.take(ending, ("U8",), rank=1)
        try:
            if stored.shape[0] > _MOST_STATE_BYTES:
                raise ValueError("it is too long")
            raw = json.loads(stored.read().numpy().tobytes())
            n, k = map(_positive, raw["shape"])
            if k % 2:
                raise ValueError("rows of an odd number of columns")
            nested = raw.get("nested_blocksize")
            offset = float(raw.get("nested_offset") or 0.0)
            return cls((n, k), _positive(raw["blocksize"]), 0 if nested is None else _positive(nested), offset)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            layer.fail(ending, f"is not what bitsandbytes writes ({type(error).__name__}: {error!s:.80})")


def _positive(value: Any) -> int:
    if type(value) is not int or not 0 < value < 1 << 40:
        raise ValueError(f"{value!r:.40} is not a size")
    return value


def _scales(layer: StoredLayer, state: _State, blocks: int) -> Callable[[int, int], Tensor]:
    """Function from (first block, block after the last) to the largest magnitudes in these blocks, float32."""
    if not state.nested_block:
        return layer.take("weight.absmax", ("F32",), (blocks,)).rows
    codes = layer.take("weight.absmax", ("U8",), (blocks,))
    table = layer.take("weight.nested_quant_map", ("F32",), (256,))
    second = layer.take("weight.nested_absmax", ("F32",), (-(-blocks // state.nested_block),))
    if not math.isfinite(state.nested_offset):
        layer.fail("weight.absmax", "has an offset that is not finite")

    def scales(first: int, last: int) -> Tensor:
        factors = second.read()[torch.arange(first, last) // state.nested_block]
        return table.read()[codes.rows(first, last).int()].mul_(factors).add_(state.nested_offset)

    return scales


@dataclasses.dataclass(frozen=True, kw_only=True)
class _EightBits(Method):
    marks: frozenset[str] = frozenset({"SCB"})
    companions: frozenset[str] = frozenset({"weight", "weight_format"})

    def split(self, name: str) -> tuple[str, str]:
        return _split(name)

    def rows(self, layer: StoredLayer) -> IntegerRows:
        weight = layer.take("weight", ("I8",))
        n, k = weight.shape
        largest = layer.take("SCB", ("F32",), (n,))
        if "weight_format" in layer:
            order = layer.take("weight_format", ("U8",), (), (1,)).read()
            if bool(order.any()):
                layer.fail("weight_format", "is not 0 (row by row); save the model again with a new bitsandbytes")

        def codes(first: int, last: int) -> Tensor:
            return weight.rows(first, last).view(torch.uint8) ^ 128  # from signed bytes to unsigned: add 128

        def scales(first: int, last: int) -> Tensor:
            return largest.read()[first:last].view(-1, 1) / 127

        return IntegerRows((n, k), GroupKind(8, group_of_rows(k)), codes, scales, None)


def _split(name: str) -> tuple[str, str]:
    found = _LAYER.fullmatch(name)
    return (found[1], found[2]) if found else ("", name)


def method(settings: QuantizationSettings) -> Method:
    """Read the settings of bitsandbytes. ``llm_int8_threshold`` and the dtype of arithmetic have no effect."""
    if settings.flag("load_in_4bit", False) or settings.flag("_load_in_4bit", False):
        settings.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
        return _FourBits()
    if settings.flag("load_in_8bit", False) or settings.flag("_load_in_8bit", False):
        return _EightBits()
    settings.refuse("load_in_4bit", "true, or load_in_8bit = true")
