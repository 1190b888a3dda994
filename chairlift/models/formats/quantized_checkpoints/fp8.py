"""``quant_method`` fp8, used by DeepSeek, Qwen and Mistral AI, and written by transformers and AutoFP8.

``fbgemm_fp8``, used by Meta, has the same tensors with a scale for each row.
"""

from __future__ import annotations

import dataclasses

from chairlift.models.formats.quantized_checkpoints.float8 import float8_rows
from chairlift.models.formats.quantized_checkpoints.ignored_settings import (
    ACTIVATION_SCALES,
    KV_SCALES,
    STATIC_NOTE,
    kv_notes,
)
from chairlift.models.formats.quantized_checkpoints.layer import Method, StoredLayer
from chairlift.models.formats.quantized_checkpoints.settings import QuantizationSettings
from chairlift.models.formats.stored_rows import StoredRows

__all__ = ["fbgemm", "method"]

_INVERSE = "weight_scale_inv"
"""Name ending of the tensor with the scales. In spite of "inv" in the name, the weight is multiplied by the scales."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fp8(Method):
    block: tuple[int, int] | None
    marks: frozenset[str] = frozenset({_INVERSE, "weight_scale"})
    companions: frozenset[str] = frozenset({"weight"})

    def rows(self, layer: StoredLayer) -> StoredRows:
        if _INVERSE in layer and "weight_scale" in layer:
            layer.fail("weight_scale", f"is stored beside {_INVERSE}, and one is enough")
        return float8_rows(layer, _INVERSE if _INVERSE in layer else "weight_scale", self.block)


def method(settings: QuantizationSettings) -> _Fp8:
    """Read the settings of fp8."""
    static = settings.one_of("activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    kv = kv_notes(settings, "kv_cache_scheme")
    return _Fp8(
        block=settings.block("weight_block_size"),
        dropped=(ACTIVATION_SCALES if static else frozenset()) | (KV_SCALES if kv else frozenset()),
        notes=((STATIC_NOTE,) if static else ()) + kv,
    )


def fbgemm(settings: QuantizationSettings) -> _Fp8:
    """Read the settings of fbgemm_fp8. Its upper bound of the scales of activations has no effect: FP8 activations are
    not used."""
    return _Fp8(block=None, dropped=frozenset({"input_scale_ub"}))
