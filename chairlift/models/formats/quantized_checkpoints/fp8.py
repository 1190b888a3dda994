"""``quant_method`` fp8, used by DeepSeek and Qwen, and written by transformers and AutoFP8."""

from __future__ import annotations

import dataclasses

from chairlift.models.formats.quantized_checkpoints.float8 import float8_rows
from chairlift.models.formats.quantized_checkpoints.layer import FloatRows, StoredLayer
from chairlift.models.formats.quantized_checkpoints.settings import QuantizationSettings

__all__ = ["method"]

_INVERSE = "weight_scale_inv"
"""Name ending of the tensor with the scales. In spite of "inv" in the name, the weight is multiplied by the scales."""


@dataclasses.dataclass(frozen=True)
class _Fp8:
    block: tuple[int, int] | None
    marks: frozenset[str] = frozenset({_INVERSE, "weight_scale"})
    companions: frozenset[str] = frozenset({"weight"})

    def rows(self, layer: StoredLayer) -> FloatRows:
        if _INVERSE in layer and "weight_scale" in layer:
            layer.fail("weight_scale", f"is stored beside {_INVERSE}, and one is enough")
        return float8_rows(layer, _INVERSE if _INVERSE in layer else "weight_scale", self.block)


def method(settings: QuantizationSettings) -> _Fp8:
    """Read the settings of fp8. Raises ModelLoadError if the file contains scales for activations."""
    settings.one_of("activation_scheme", ("dynamic",), "dynamic")
    return _Fp8(settings.block("weight_block_size"))
