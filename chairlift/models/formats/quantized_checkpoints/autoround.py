"""``quant_method`` auto-round (Intel): the tensors of GPTQ or AWQ, with other names for the settings."""

from __future__ import annotations

from collections.abc import Mapping

from chairlift.models.formats.quantized_checkpoints import awq, gptq
from chairlift.models.formats.quantized_checkpoints.layer import Method
from chairlift.models.formats.quantized_checkpoints.mixed import one_method
from chairlift.models.formats.quantized_checkpoints.settings import QuantizationSettings

__all__ = ["method"]

_GPTQ = ("auto_round:auto_gptq", "auto_round:gptq", "auto_round:exllamav2", "auto_gptq")
_AWQ = ("auto_round:auto_awq", "auto_round:awq", "auto_awq")
_FLOAT_BITS = 16
"""Layers of ``extra_config`` with this number of bits, or more, are not quantised."""


def method(settings: QuantizationSettings) -> Method:
    """Read the settings of AutoRound. Raises ModelLoadError for other packings and for numbers that are not
    integers."""
    settings.one_of("data_type", ("int",), "int")
    packing = settings.one_of("packing_format", (*_GPTQ, *_AWQ), _GPTQ[0])
    variants = [settings]
    layers = settings.part("extra_config")
    for name in () if layers is None else layers.keys():
        layer = layers.part(name) if layers is not None else None
        if layer is None or layer.get("bits", 0) == 0 or layer.get("bits") >= _FLOAT_BITS:
            continue
        variants.append(settings.changed({key: layer.get(key) for key in ("bits", "group_size", "sym")}))
    return one_method([_of(each, packing) for each in variants])


def _of(settings: QuantizationSettings, packing: str) -> Method:
    if packing in _AWQ:
        settings.one_of("bits", (4,))
        return awq.of_group(settings.group_size())
    given: Mapping[str, object] = {"checkpoint_format": "gptq", "format": None, "desc_act": False, "dynamic": None}
    return gptq.method(settings.changed(given))
