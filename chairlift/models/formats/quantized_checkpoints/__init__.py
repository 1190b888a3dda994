"""Readers for directories with quantised weights: one module for each ``quant_method`` of config.json.

A quantised layer is stored in several tensors. The loader sees them as one tensor with the layer's name and shape in
the original model. Unquantised layers are recognised by the names in the files, so the lists and patterns of ``ignore``
and ``modules_to_not_convert`` are not needed. Settings for the rounding of activations are ignored: the kernels round
in their own way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from chairlift.errors import ModelLoadError
from chairlift.models.formats.quantized_checkpoints import awq, compressed_tensors, fp8, gptq, mxfp4
from chairlift.models.formats.quantized_checkpoints.layer import Method, StoredLayer
from chairlift.models.formats.quantized_checkpoints.settings import QuantizationSettings
from chairlift.models.hf_config import read_json

__all__ = ["with_whole_weights"]

_METHODS: Final[Mapping[str, Callable[[QuantizationSettings], Method]]] = {
    "awq": awq.method,
    "compressed-tensors": compressed_tensors.method,
    "fp8": fp8.method,
    "gptq": gptq.method,
    "mxfp4": mxfp4.method,
}
_NAMES: Final[Mapping[str, tuple[str, str]]] = {"mxfp4": ("_", "")}
"""``quant_method`` -> (separator between a layer's name and the suffixes of its tensors, suffix of the original
weight). Methods that are not listed have ``.`` and ``.weight``."""


def with_whole_weights(tensors: dict[str, Any], model_dir: Path) -> dict[str, Any]:
    """``tensors`` (name -> open file) of a directory, with every quantised layer as one tensor of
    :class:`~chairlift.models.formats.stored_rows.StoredRows`.

    Raises :class:`~chairlift.errors.ModelLoadError` for an unsupported method or variant, and for tensors that do not
    fit together. Only names, shapes and small tensors are read.
    """
    path = model_dir / "config.json"
    config = read_json(path) if path.is_file() else {}
    # ``compression_config`` is the key of old compressed-tensors versions.
    raw = config.get("quantization_config") or config.get("compression_config")
    if not raw:
        return tensors
    if not isinstance(raw, Mapping):
        given = type(raw).__name__
        raise ModelLoadError(f"{path}: quantization_config must be an object, not a {given}; download it again")
    settings = QuantizationSettings(raw, f"{path}: quantization_config")
    name_of_method = settings.one_of("quant_method", tuple(_METHODS))
    method, (separator, original) = _METHODS[name_of_method](settings), _NAMES.get(name_of_method, (".", ".weight"))
    layers: dict[str, dict[str, Any]] = {}
    for name, file in tensors.items():
        layer, _, ending = name.rpartition(separator)
        if ending in method.marks:
            layers.setdefault(layer, {})[ending] = file
    found = {}
    for name, file in tensors.items():
        layer, _, ending = name.rpartition(separator)
        if layer in layers and ending in method.marks | method.companions:
            layers[layer][ending] = file
        else:
            found[name] = file
    for layer, files in layers.items():
        whole = f"{layer}{original}"
        if whole in found:
            both = f"{whole} and {layer}{separator}{min(files)}"
            raise ModelLoadError(f"{model_dir}: {both} are both stored; remove one, or download the model again")
        found[whole] = method.rows(StoredLayer(layer, str(model_dir), files, separator))
    return found
