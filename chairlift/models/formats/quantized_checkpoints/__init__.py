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
from chairlift.models.formats.quantized_checkpoints import (
    autoround,
    awq,
    bitsandbytes,
    compressed_tensors,
    fp8,
    gptq,
    mlx,
    modelopt,
    mxfp4,
)
from chairlift.models.formats.quantized_checkpoints.layer import Method, StoredLayer
from chairlift.models.formats.quantized_checkpoints.names import FORMAT_NAMES, refuse_method
from chairlift.models.formats.quantized_checkpoints.settings import QuantizationSettings
from chairlift.models.hf_config import read_json

__all__ = ["quantization_notes", "with_whole_weights"]

_METHODS: Final[Mapping[str, Callable[[QuantizationSettings], Method]]] = {
    "auto-round": autoround.method,
    "awq": awq.method,
    "bitsandbytes": bitsandbytes.method,
    "compressed-tensors": compressed_tensors.method,
    "fbgemm_fp8": fp8.fbgemm,
    "fp8": fp8.method,
    "gptq": gptq.method,
    "modelopt": modelopt.method,
    "mxfp4": mxfp4.method,
}
_OTHER_NAMES: Final = {
    **dict.fromkeys(("inc", "intel/auto-round"), "auto-round"),
    **dict.fromkeys(("modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8"), "modelopt"),
}
"""Other value of ``quant_method`` -> the usual one."""
_MLX: Final = "mlx"
"""Name in :data:`FORMAT_NAMES` of the only format that has no ``quant_method``."""
_MODELOPT_FILE: Final = "hf_quant_config.json"


def with_whole_weights(tensors: dict[str, Any], model_dir: Path) -> dict[str, Any]:
    """``tensors`` (name -> open file) of a directory, with every quantised layer as one tensor of
    :class:`~chairlift.models.formats.stored_rows.StoredRows`.

    Raises :class:`~chairlift.errors.ModelLoadError` for an unsupported method or variant, and for tensors that do not
    fit together. Only names, shapes and small tensors are read.
    """
    settings = _settings(model_dir)
    if settings is None:
        return tensors
    method = _method(settings, model_dir)
    tensors = {name: file for name, file in tensors.items() if name.rpartition(".")[2] not in method.dropped}
    layers: dict[str, dict[str, Any]] = {}
    for name, file in tensors.items():
        layer, ending = method.split(name)
        if ending in method.marks:
            layers.setdefault(layer, {})[ending] = file
    found = {}
    for name, file in tensors.items():
        layer, ending = method.split(name)
        if layer in layers and ending in method.marks | method.companions:
            layers[layer][ending] = file
        else:
            found[name] = file
    for layer, files in layers.items():
        rows = method.rows(StoredLayer(layer, str(model_dir), files, method.separator))
        bare = rows.stacked and layer.rpartition(".")[0].endswith(".experts")  # such a stack is no module
        whole = layer if bare else f"{layer}{method.original}"
        if whole in found:
            both = f"{whole} and {layer}{method.separator}{min(files)}"
            raise ModelLoadError(f"{model_dir}: {both} are both stored; remove one, or download the model again")
        found[whole] = rows
    return found


def quantization_notes(model_dir: Path) -> tuple[str, ...]:
    """Settings of a quantised directory that are not followed, one line each. Empty for other models and for GGUF
    files. Raises ModelLoadError like :func:`with_whole_weights`."""
    settings = _settings(model_dir) if model_dir.is_dir() else None
    return () if settings is None else _method(settings, model_dir).notes


def _settings(model_dir: Path) -> QuantizationSettings | None:
    """How the directory's config says that its weights are quantised; None if it says nothing."""
    path = model_dir / "config.json"
    config = read_json(path) if path.is_file() else {}
    text = config.get("text_config")
    # ``compression_config`` is the key of old compressed-tensors versions. Some models that read images have the key
    # only beside the keys of their text model.
    places = (config, text if isinstance(text, Mapping) else {})
    named = (each.get(key) for each in places for key in ("quantization_config", "compression_config"))
    raw = next(filter(None, named), None)
    if _is_mlx(config.get("quantization")) and not (isinstance(raw, Mapping) and "quant_method" in raw):
        return QuantizationSettings(config["quantization"], f"{path}: quantization", FORMAT_NAMES[_MLX])
    if not raw:
        return _settings_of_modelopt(model_dir / _MODELOPT_FILE)
    if not isinstance(raw, Mapping):
        given = type(raw).__name__
        raise ModelLoadError(f"{path}: quantization_config must be an object, not a {given}; download it again")
    return QuantizationSettings(raw, f"{path}: quantization_config")


def _is_mlx(quantization: Any) -> bool:
    return isinstance(quantization, Mapping) and "group_size" in quantization and "bits" in quantization


def _settings_of_modelopt(path: Path) -> QuantizationSettings | None:
    """Settings in the file of ModelOpt's older versions; None if there is none, or if it says that nothing is
    quantised."""
    config = read_json(path) if path.is_file() else {}
    raw = config.get("quantization")
    if not isinstance(raw, Mapping) or not (raw.get("quant_algo") or raw.get("kv_cache_quant_algo")):
        return None
    return QuantizationSettings({**raw, "quant_method": "modelopt"}, f"{path}: quantization")


def _method(settings: QuantizationSettings, model_dir: Path) -> Method:
    """Reader of the method. Raises ModelLoadError that begins with the name of the format."""
    given = settings.get("quant_method")
    if given is None and _is_mlx(settings.whole()):
        return mlx.method(settings, read_json(model_dir / "config.json").get("model_type"))
    name = _OTHER_NAMES.get(given, given) if isinstance(given, str) else ""
    if name not in _METHODS:
        refuse_method(settings, tuple(_METHODS))
    return _METHODS[name](settings.named(FORMAT_NAMES[name]))
