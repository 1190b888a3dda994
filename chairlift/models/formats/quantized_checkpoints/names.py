"""Names of formats of quantised weights, as their publishers write them. A refusal begins with such a name."""

from __future__ import annotations

from typing import Final, NoReturn

from chairlift.errors import ModelLoadError
from chairlift.models.formats.quantized_checkpoints.settings import QuantizationSettings

__all__ = ["FORMAT_NAMES", "refuse_method"]

FORMAT_NAMES: Final = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "awq": "AWQ",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "eetq": "EETQ",
    "exl2": "EXL2 (ExLlamaV2)",
    "exl3": "EXL3 (ExLlamaV3)",
    "fbgemm_fp8": "FBGEMM FP8",
    "fp8": "FP8",
    "fp_quant": "FP-Quant",
    "gptq": "GPTQ",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "inc": "AutoRound",
    "intel/auto-round": "AutoRound",
    "metal": "Metal",
    "mlx": "MLX",
    "modelopt": "ModelOpt",
    "modelopt_fp4": "ModelOpt",
    "modelopt_mixed": "ModelOpt",
    "mxfp4": "MXFP4",
    "quanto": "Quanto",
    "quark": "Quark (AMD)",
    "quip": "QuIP#",
    "quip_sharp": "QuIP#",
    "quipsharp": "QuIP#",
    "spqr": "SpQR",
    "sinq": "SINQ",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
"""``quant_method`` -> name of the format in messages, for the methods that are read and those that are not."""


def refuse_method(settings: QuantizationSettings, supported: tuple[str, ...]) -> NoReturn:
    """Raise ModelLoadError for a ``quant_method`` that is not one of ``supported``."""
    given = settings.get("quant_method")
    name = FORMAT_NAMES.get(given.lower(), "") if isinstance(given, str) else ""
    first = f"{name} weights are not read: " if name else ""
    raise ModelLoadError(
        f"{first}{settings.where}: quant_method = {given!r:.80} is not supported; supported:"
        f" {', '.join(sorted(supported))}; use a version of the model in one of them, a GGUF file, or the original"
        " weights, which --quantization int8 or int4 rounds while they are loaded"
    )
