"""``quantization_config`` as publishers write it, and packers that store a weight in this form.

The settings are from public model pages; nothing of them is changed for the small size of the models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from tests.models.quantized import packers
from tests.models.quantized.make import Pack
from tests.models.quantized.test_compressed_tensors import int_weights, settings_and_pack
from tests.models.quantized.test_layouts import bitsandbytes_4bit, mlx, modelopt_nvfp4, small_floats

__all__ = ["PACKS", "SETTINGS"]

_AWQ: Final = {"bits": 4, "group_size": 128, "quant_method": "awq", "version": "gemm", "zero_point": True}
_THE_BLOKE_GPTQ: Final = {
    **{"bits": 4, "group_size": 128, "damp_percent": 0.1, "desc_act": True, "sym": True, "true_sequential": True},
    **{"model_name_or_path": None, "model_file_base_name": "model", "quant_method": "gptq"},
}
_OPTIMUM_GPTQ: Final = {
    **{"batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True, "damp_percent": 0.01},
    **{
        "dataset": None,
        "desc_act": False,
        "exllama_config": {"version": 1},
        "group_size": 128,
        "max_input_length": None,
    },
    **{"model_seqlen": None, "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None},
    **{"pad_token_id": None, "quant_method": "gptq", "sym": True, "tokenizer": None, "true_sequential": True},
    **{"use_cuda_fp16": False, "use_exllama": True},
}
_GPTQMODEL: Final = {
    **{"bits": 4, "checkpoint_format": "gptq", "desc_act": True, "dynamic": None, "group_size": 128, "lm_head": False},
    "meta": {
        **{"damp_auto_increment": 0.0025, "damp_percent": 0.01, "mse": 0.0, "quantizer": ["gptqmodel:1.4.0"]},
        **{"static_groups": False, "true_sequential": True, "uri": "https://github.com/modelcloud/gptqmodel"},
    },
    **{"quant_method": "gptq", "sym": True},
}
_FP8_BLOCKS: Final = {
    **{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
}
_NF4: Final = {
    **{"_load_in_4bit": True, "_load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16"},
    **{"bnb_4bit_quant_storage": "uint8", "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    **{"llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False, "llm_int8_skip_modules": None},
    **{"llm_int8_threshold": 6.0, "load_in_4bit": True, "load_in_8bit": False, "quant_method": "bitsandbytes"},
}
_AUTOROUND: Final = {
    **{"amp": True, "autoround_version": "0.4.5", "batch_size": 8, "bits": 4, "damp_percent": 0.01, "data_type": "int"},
    **{"desc_act": False, "enable_minmax_tuning": True, "enable_norm_bias_tuning": False, "group_size": 128},
    **{"enable_quanted_input": True, "gradient_accumulate_steps": 1, "iters": 200, "low_gpu_mem_usage": True},
    **{"lr": 0.005, "minmax_lr": 0.005, "nsamples": 512, "quant_method": "intel/auto-round", "seqlen": 2048},
    **{"scale_dtype": "torch.float16", "sym": True, "packing_format": "auto_round:auto_gptq"},
}
_OSS: Final = {
    "modules_to_not_convert": [
        *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"),
    ],
    "quant_method": "mxfp4",
}


def _scheme(bits: int, kind: str, strategy: str, group: int | None = None, **more: Any) -> dict[str, Any]:
    """Arguments of weights or activations, with every key that LLM Compressor writes."""
    return {
        **{"actorder": None, "block_structure": None, "dynamic": False, "group_size": group, "num_bits": bits},
        **{"observer": "minmax", "observer_kwargs": {}, "strategy": strategy, "symmetric": True, "type": kind},
        **more,
    }


def _compressed(form: str, weights: dict[str, Any], activations: Any = None, **more: Any) -> dict[str, Any]:
    """compressed-tensors, as LLM Compressor writes it."""
    group = {"input_activations": activations, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        **{
            "config_groups": {"group_0": group},
            "format": form,
            "global_compression_ratio": 1.239,
            "ignore": ["lm_head"],
        },
        **{"kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed"},
        **more,
    }


_TOKENS: Final = {"dynamic": True, "observer": None}
_FP8_TOKENS: Final = _scheme(8, "float", "token", **_TOKENS)
_INT8_TOKENS: Final = _scheme(8, "int", "token", **_TOKENS)
_FP8_TENSOR: Final = _scheme(8, "float", "tensor")
_NV_WEIGHTS: Final = _scheme(4, "float", "tensor_group", 16)
_W4: Final = _scheme(4, "int", "group", 128, actorder="weight")
_W4_ASYMMETRIC: Final = _scheme(4, "int", "group", 32, symmetric=False, observer="mse")

SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "awq": {**_AWQ, "modules_to_not_convert": None},
    "awq, older": _AWQ,
    "awq beside images": {**_AWQ, "modules_to_not_convert": ["visual"]},
    "awq of experts": {**_AWQ, "modules_to_not_convert": ["mlp.gate."]},
    "gptq": _OPTIMUM_GPTQ,
    "gptq 8 bits": {**_OPTIMUM_GPTQ, "bits": 8},
    "gptq in another order": _THE_BLOKE_GPTQ,
    "gptq, older": {**_THE_BLOKE_GPTQ, "desc_act": False, "damp_percent": 0.01},
    "gptqmodel": _GPTQMODEL,
    "gptqmodel of experts": {
        **_GPTQMODEL,
        **{"desc_act": False, "pack_dtype": "int32", "dynamic": {"-:.*mlp\\.gate$": {}, "-:.*shared_expert_gate": {}}},
    },
    "fp8 in blocks": _FP8_BLOCKS,
    "fp8 in blocks, of experts": {**_FP8_BLOCKS, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]},
    "fp8 static": {"activation_scheme": "static", "ignored_layers": ["lm_head"], "quant_method": "fp8"},
    "fp8 static, and KV": {
        **{"activation_scheme": "static", "ignored_layers": ["lm_head"], "kv_cache_scheme": "static"},
        **{"quant_method": "fp8"},
    },
    "fp8 of Mistral": {
        **{"activation_scheme": "static", "dequantize": False, "quant_method": "fp8", "weight_block_size": None},
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    },
    "fbgemm": {
        **{"activation_scale_ub": 1200.0, "quant_method": "fbgemm_fp8"},
        "modules_to_not_convert": ["model.layers.0.self_attn.q_proj", "lm_head"],
    },
    "FP8-dynamic": _compressed("float-quantized", _scheme(8, "float", "channel"), _FP8_TOKENS),
    "FP8": _compressed("float-quantized", _FP8_TENSOR, _FP8_TENSOR),
    "FP8, and KV": _compressed(
        "float-quantized", _FP8_TENSOR, _FP8_TENSOR, kv_cache_scheme=_scheme(8, "float", "tensor")
    ),
    "w8a8": _compressed("int-quantized", _scheme(8, "int", "channel", observer="mse"), _INT8_TOKENS),
    "w8a16": _compressed("pack-quantized", _scheme(8, "int", "channel", observer="mse")),
    "w4a16": _compressed("pack-quantized", _W4),
    "w4a16 in groups of 32": _compressed("pack-quantized", _W4_ASYMMETRIC),
    "NVFP4": _compressed("nvfp4-pack-quantized", _NV_WEIGHTS, _scheme(4, "float", "tensor_group", 16, dynamic="local")),
    "modelopt FP8": {
        **{"producer": {"name": "modelopt", "version": "0.23.0"}},
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    },
    "modelopt FP4": {
        **{"producer": {"name": "modelopt", "version": "0.27.0"}},
        "quantization": {
            **{"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]},
        },
    },
    "modelopt NVFP4": {
        "config_groups": {
            "group_0": {
                **{"input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}},
                **{"weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}},
                "targets": ["Linear"],
            }
        },
        **{"ignore": ["lm_head"], "quant_algo": "NVFP4", "producer": {"name": "modelopt", "version": "0.35.0"}},
        **{"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}, "quant_method": "modelopt"},
    },
    "nf4": _NF4,
    "nf4 with layers left out": {
        **_NF4,
        "llm_int8_skip_modules": ["lm_head", "multi_modal_projector", "model.layers.0.mlp", "model.layers.1.self_attn"],
    },
    "mlx": {"group_size": 64, "bits": 4},
    "mlx 8 bits": {"group_size": 64, "bits": 8},
    "mlx affine": {"group_size": 64, "bits": 4, "mode": "affine"},
    "autoround": _AUTOROUND,
    "autoround of experts": {
        **_AUTOROUND,
        "extra_config": {f"model.layers.{layer}.mlp.gate": {"bits": 16, "data_type": "float"} for layer in range(2)},
    },
    "autoround as gptq": {
        **{key: value for key, value in _AUTOROUND.items() if key not in ("packing_format", "scale_dtype")},
        **{"quant_method": "gptq", "provider": "auto-round", "true_sequential": False, "lm_head": False},
    },
    "mxfp4": _OSS,
}
"""Name of a layout -> what ``quantization_config``, MLX's ``quantization`` or ``hf_quant_config.json`` holds."""


def _static(name: str, shape: tuple[int, ...] = ()) -> Pack:
    """FP8 with one scale, and a fixed scale of activations named ``input_scale``."""
    _, pack = packers.tensor_fp8("weight_scale", shape)
    return lambda weight: _and_input(pack(weight), name, torch.full(shape, 0.5))


def _and_input(packed: tuple[Mapping[str, Tensor], Tensor], name: str, scale: Tensor) -> Any:
    tensors, worth = packed
    return {**tensors, name: scale}, worth


def _fp8_rows(dtype: torch.dtype) -> Pack:
    """FP8 with a scale for each row [out, 1]."""

    def pack(weight: Tensor) -> tuple[Mapping[str, Tensor], Tensor]:
        scale = (torch.rand(len(weight), 1, generator=torch.Generator().manual_seed(len(weight))) / 100).to(dtype)
        stored = (weight * 80).to(torch.float8_e4m3fn)
        return {"weight": stored, "weight_scale": scale}, stored.float() * scale.float()

    return pack


_AWQ_PACK: Final = packers.awq(128)[1]
_GPTQ_PACK: Final = packers.gptq(4, 128, order="given")[1]
_GPTQ_ORDER: Final = packers.gptq(4, 128, order="random")[1]
_BLOCKS: Final = packers.block_fp8(dtype=torch.bfloat16)[1]
_MISTRAL: Final = packers.static_fp8("weight_scale_inv", "activation_scale")[1]
_NVFP4_PACK: Final = small_floats("nvfp4-pack-quantized", 16)[1]

PACKS: Final[dict[str, Pack]] = {
    **dict.fromkeys(("awq", "awq, older", "awq beside images", "awq of experts"), _AWQ_PACK),
    **dict.fromkeys(("gptq", "gptq, older", "gptqmodel of experts"), _GPTQ_PACK),
    **dict.fromkeys(("autoround", "autoround of experts", "autoround as gptq"), packers.gptq(4, 128)[1]),
    **dict.fromkeys(("gptq in another order", "gptqmodel"), _GPTQ_ORDER),
    "gptq 8 bits": packers.gptq(8, 128, order="given")[1],
    **dict.fromkeys(("fp8 in blocks", "fp8 in blocks, of experts"), _BLOCKS),
    **dict.fromkeys(("fp8 static", "fp8 static, and KV", "modelopt FP8"), _static("input_scale")),
    "fp8 of Mistral": _MISTRAL,
    "fbgemm": _fp8_rows(torch.float32),
    "FP8-dynamic": _fp8_rows(torch.bfloat16),
    **dict.fromkeys(("FP8", "FP8, and KV"), _static("input_scale", (1,))),
    "w8a8": settings_and_pack("int-quantized", int_weights(8, "channel"))[1],
    "w8a16": settings_and_pack("pack-quantized", int_weights(8, "channel"))[1],
    "w4a16": settings_and_pack("pack-quantized", int_weights(4, "group", group=128))[1],
    "w4a16 in groups of 32": settings_and_pack("pack-quantized", int_weights(4, "group", group=32, symmetric=False))[1],
    "NVFP4": lambda weight: _and_input(_NVFP4_PACK(weight), "input_global_scale", torch.tensor([300.0])),
    **dict.fromkeys(("modelopt FP4", "modelopt NVFP4"), modelopt_nvfp4()[1]),
    **dict.fromkeys(("nf4", "nf4 with layers left out"), bitsandbytes_4bit(nested=True)[1]),
    **dict.fromkeys(("mlx", "mlx affine"), mlx(4, 64)[1]),
    "mlx 8 bits": mlx(8, 64)[1],
}
"""Name of a layout -> packer of one weight. Layouts with weights of whole stacks are not here."""
