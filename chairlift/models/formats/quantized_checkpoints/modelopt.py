"""``quant_method`` modelopt, written by NVIDIA's Model Optimizer: FP8, MXFP8 and NVFP4.

Older versions write the settings to ``hf_quant_config.json`` instead of ``config.json``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Final

from chairlift.models.formats.quantized_checkpoints.float4 import nvfp4_rows
from chairlift.models.formats.quantized_checkpoints.float8 import float8_rows, mxfp8_rows
from chairlift.models.formats.quantized_checkpoints.ignored_settings import (
    ACTIVATION_SCALES,
    KV_SCALES,
    STATIC_NOTE,
    kv_notes,
)
from chairlift.models.formats.quantized_checkpoints.layer import Method, StoredLayer
from chairlift.models.formats.quantized_checkpoints.mixed import one_method
from chairlift.models.formats.quantized_checkpoints.settings import QuantizationSettings
from chairlift.models.formats.stored_rows import StoredRows

__all__ = ["method"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Float8(Method):
    marks: frozenset[str] = frozenset({"weight_scale"})
    companions: frozenset[str] = frozenset({"weight"})

    def rows(self, layer: StoredLayer) -> StoredRows:
        return float8_rows(layer, "weight_scale", None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Mxfp8(Method):
    marks: frozenset[str] = frozenset({"weight_scale"})
    companions: frozenset[str] = frozenset({"weight"})

    def rows(self, layer: StoredLayer) -> StoredRows:
        return mxfp8_rows(layer, "weight_scale")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Nvfp4(Method):
    marks: frozenset[str] = frozenset({"weight_scale", "weight_scale_2"})
    companions: frozenset[str] = frozenset({"weight", "pre_quant_scale"})

    def rows(self, layer: StoredLayer) -> StoredRows:
        return nvfp4_rows(layer, "weight", "weight_scale", "weight_scale_2", columns="pre_quant_scale")


_READERS: Final[Mapping[str, tuple[Callable[..., Method], ...]]] = {
    "FP8": (_Float8,),
    "FP8_PER_CHANNEL_PER_TOKEN": (_Float8,),
    "MXFP8": (_Mxfp8,),
    "NVFP4": (_Nvfp4,),
    "NVFP4_AWQ": (_Nvfp4,),
    "W4A16_NVFP4": (_Nvfp4,),
    "MIXED_PRECISION": (_Float8, _Mxfp8, _Nvfp4),
}
"""``quant_algo`` -> classes that read the weights of its layers."""


def method(settings: QuantizationSettings) -> Method:
    """Read the settings of modelopt. Raises ModelLoadError for another ``quant_algo``."""
    kv = kv_notes(settings, "kv_cache_quant_algo", "kv_cache_scheme")
    if kv and "quant_algo" not in settings:  # only the KV cache is quantised
        return _Float8(marks=frozenset(), companions=frozenset(), dropped=KV_SCALES, notes=kv)
    algorithm = settings.one_of("quant_algo", tuple(_READERS))
    if algorithm.startswith("NVFP4"):
        settings.one_of("group_size", (16,), 16)
    fixed = not algorithm.startswith("W4A16") and algorithm not in ("MXFP8", "FP8_PER_CHANNEL_PER_TOKEN")
    dropped = ACTIVATION_SCALES | (KV_SCALES if kv else frozenset())
    notes = ((STATIC_NOTE,) if fixed else ()) + kv
    return one_method([reader(dropped=dropped, notes=notes) for reader in _READERS[algorithm]])
