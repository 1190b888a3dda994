"""``config.json`` of published models with an image encoder; see :mod:`tests.models.published`. Tests compare texts."""

from __future__ import annotations

from typing import Any

__all__ = ["PUBLISHED_WHOLE"]

_SIZES: dict[str, Any] = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 3},
    **{"num_key_value_heads": 2, "vocab_size": 128},
}
_SIGLIP: dict[str, Any] = {
    **{"hidden_size": 48, "image_size": 24, "intermediate_size": 80, "num_attention_heads": 3},
    **{"num_hidden_layers": 2, "patch_size": 4},
}
_PIXTRAL: dict[str, Any] = {
    **{"attention_dropout": 0.0, "head_dim": 16, "hidden_act": "silu", "hidden_size": 48, "image_size": 28},
    **{"initializer_range": 0.02, "intermediate_size": 80, "model_type": "pixtral", "num_attention_heads": 3},
    **{"num_channels": 3, "num_hidden_layers": 2, "patch_size": 14},
}


def _gemma3(**more: Any) -> dict[str, Any]:
    text = {**_SIZES, "head_dim": 16, "model_type": "gemma3_text", "sliding_window": 9}
    text |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        **{"boi_token_index": 125, "eoi_token_index": 126, "eos_token_id": [1, 106], "image_token_index": 127},
        **{"initializer_range": 0.02, "mm_tokens_per_image": 9, "model_type": "gemma3"},
        "text_config": {**text, **more},
        **{"torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0"},
        "vision_config": {**_SIGLIP, "model_type": "siglip_vision_model", "vision_use_head": False},
    }


def _idefics(family: str, name: str, text: dict[str, Any], **more: Any) -> dict[str, Any]:
    usual = {**_SIZES, "model_type": "llama", "rms_norm_eps": 1e-5, "pad_token_id": 2, "torch_dtype": "bfloat16"}
    vision = {**_SIGLIP, "image_size": 32, "patch_size": 8, "num_attention_heads": 3, "model_type": family}
    vision |= {"max_image_size": {"longest_edge": 32}, "size": {"longest_edge": 64}, "tie_word_embeddings": False}
    return {
        "architectures": [name],
        **{"image_token_id": 127, "model_type": family, "pad_token_id": 2, "scale_factor": 2},
        "text_config": {**usual, **text},
        **{"tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.46.0"},
        **{"use_cache": True, "vision_config": vision, "vocab_size": 128},
        **more,
    }


def _llava(**more: Any) -> dict[str, Any]:
    text = {**_SIZES, "num_key_value_heads": 4, "_name_or_path": "lmsys/vicuna-7b-v1.5", "model_type": "llama"}
    text |= {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    clip = {"hidden_size": 48, "image_size": 24, "intermediate_size": 80, "model_type": "clip_vision_model"}
    clip |= {"num_attention_heads": 3, "num_hidden_layers": 3, "patch_size": 8, "projection_dim": 48, "vocab_size": 128}
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        **{"ignore_index": -100, "image_token_index": 120, "model_type": "llava", "pad_token_id": 121},
        **{"projector_hidden_act": "gelu", "text_config": {**text, "torch_dtype": "float16"}},
        **{"tie_word_embeddings": False, "torch_dtype": "float16", "transformers_version": "4.36.0.dev0"},
        **{"vision_config": clip, "vision_feature_layer": -2, "vision_feature_select_strategy": "default"},
        **more,
    }


def _mistral3(text: dict[str, Any], **more: Any) -> dict[str, Any]:
    usual = {**_SIZES, "attention_dropout": 0.0, "head_dim": 32, "hidden_act": "silu", "initializer_range": 0.02}
    usual |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "sliding_window": None, "use_cache": True}
    rope = {"rope_theta": 10000.0, "rope_type": "default"}
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        **{"image_token_index": 10, "model_type": "mistral3", "multimodal_projector_bias": False},
        **{"projector_hidden_act": "gelu", "spatial_merge_size": 2, "vision_feature_layer": -1},
        "text_config": {**usual, **text},
        "vision_config": {**_PIXTRAL, **({"rope_parameters": rope} if "rope_parameters" in text else {})},
        **more,
    }


_MISTRAL_SMALL = {"model_type": "mistral", "rope_theta": 1000000000.0}
_MINISTRAL_ROPE = {
    **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0},
    **{"mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0},
    **{"rope_type": "yarn", "type": "yarn"},
}


def _qwen2_5_vl(**more: Any) -> dict[str, Any]:
    vision = {"depth": 2, "fullatt_block_indexes": [1], "hidden_act": "silu", "hidden_size": 48, "in_chans": 3}
    vision |= {"intermediate_size": 80, "num_heads": 3, "out_hidden_size": 64, "patch_size": 4}
    vision |= {"spatial_merge_size": 2, "spatial_patch_size": 4, "temporal_patch_size": 2, "tokens_per_second": 2}
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        **{"attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "vision_start_token_id": 124},
        **{"vision_end_token_id": 125, "vision_token_id": 126, "image_token_id": 127, "video_token_id": 123},
        **{"hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 128000, "max_window_layers": 3},
        **{"model_type": "qwen2_5_vl", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": 32768},
        **{"tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False},
        "transformers_version": "4.41.2",
        "vision_config": {**vision, "window_size": 16},
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        **_SIZES,
        **more,
    }


def _qwen3_vl(**more: Any) -> dict[str, Any]:
    text = {**_SIZES, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16"}
    text |= {"eos_token_id": 151645, "head_dim": 32, "hidden_act": "silu", "initializer_range": 0.02}
    text |= {"max_position_embeddings": 262144, "model_type": "qwen3_vl_text", "rms_norm_eps": 1e-6, "use_cache": True}
    text |= {"rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"}}
    vision = {"deepstack_visual_indexes": [0, 1], "depth": 3, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 48}
    vision |= {"in_channels": 3, "initializer_range": 0.02, "intermediate_size": 80, "model_type": "qwen3_vl"}
    vision |= {"num_heads": 3, "num_position_embeddings": 36, "out_hidden_size": 64, "patch_size": 4}
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        **{"image_token_id": 127, "model_type": "qwen3_vl"},
        "text_config": {**text, "rope_theta": 5000000, "tie_word_embeddings": True, **more},
        **{"tie_word_embeddings": True, "transformers_version": "4.57.0.dev0", "video_token_id": 126},
        "vision_config": {**vision, "spatial_merge_size": 2, "temporal_patch_size": 2},
        **{"vision_end_token_id": 125, "vision_start_token_id": 124},
    }


def _qwen2_vl() -> dict[str, Any]:
    """The text model's keys are beside ``vision_config``, which gives the width of its results as ``hidden_size``."""
    vision = {"depth": 3, "embed_dim": 48, "hidden_size": 64, "in_channels": 3, "in_chans": 3, "mlp_ratio": 2}
    vision |= {"model_type": "qwen2_vl", "num_heads": 3, "patch_size": 4, "spatial_merge_size": 2}
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        **{"attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu"},
        **{"image_token_id": 127, "initializer_range": 0.02, "max_position_embeddings": 32768, "max_window_layers": 28},
        **{"model_type": "qwen2_vl", "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768},
        **{"tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.41.2"},
        **{"use_cache": True, "use_sliding_window": False, "video_token_id": 126, "vision_token_id": 123},
        "vision_config": {**vision, "spatial_patch_size": 4, "temporal_patch_size": 2},
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        **_SIZES,
    }


def _qwen3_vl_moe() -> dict[str, Any]:
    found = _qwen3_vl(decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=40, norm_topk_prob=True)
    found["text_config"] |= {"model_type": "qwen3_vl_moe_text", "num_experts": 6, "num_experts_per_tok": 3}
    found["text_config"] |= {"tie_word_embeddings": False}
    found["vision_config"] |= {"model_type": "qwen3_vl_moe"}
    architectures = ["Qwen3VLMoeForConditionalGeneration"]
    return {**found, "architectures": architectures, "model_type": "qwen3_vl_moe", "tie_word_embeddings": False}


def _internvl(text: dict[str, Any]) -> dict[str, Any]:
    vision = {"architectures": ["InternVisionModel"], "attention_bias": True, "attention_dropout": 0.0, "dropout": 0.0}
    vision |= {"hidden_act": "gelu", "hidden_size": 48, "image_size": [24, 24], "intermediate_size": 80}
    vision |= {"layer_norm_eps": 1e-06, "layer_scale_init_value": 0.1, "model_type": "internvl_vision"}
    vision |= {"norm_type": "layer_norm", "num_attention_heads": 3, "num_channels": 3, "num_hidden_layers": 2}
    vision |= {"patch_size": [4, 4], "use_absolute_position_embeddings": True, "use_mask_token": False}
    usual = {**_SIZES, "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu"}
    usual |= {"initializer_range": 0.02, "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "use_cache": True}
    usual |= {"rope_scaling": None, "rope_theta": 1000000.0, "tie_word_embeddings": False, "use_sliding_window": False}
    return {
        "architectures": ["InternVLForConditionalGeneration"],
        **{"downsample_ratio": 0.5, "image_seq_length": 9, "image_token_id": 127, "model_type": "internvl"},
        **{"projector_hidden_act": "gelu", "text_config": {**usual, **text}, "torch_dtype": "bfloat16"},
        **{"transformers_version": "4.52.0.dev0", "vision_feature_layer": -1, "tie_word_embeddings": False},
        **{"vision_config": {**vision, "use_qk_norm": False}, "vision_feature_select_strategy": "default"},
    }


def _qwen3_5(family: str, name: str, text: dict[str, Any], **more: Any) -> dict[str, Any]:
    nets = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_num_key_heads": 2}
    nets |= {"linear_num_value_heads": 4, "linear_value_head_dim": 32, "mamba_ssm_dtype": "float32"}
    usual = {**_SIZES, "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "head_dim": 32}
    usual |= {"dtype": "bfloat16", "eos_token_id": 248044, "full_attention_interval": 4, "hidden_act": "silu", **nets}
    usual |= {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_hidden_layers": 4}
    usual |= {"rms_norm_eps": 1e-6}
    usual |= {"max_position_embeddings": 262144, "model_type": f"{family}_text", "mtp_num_hidden_layers": 1}
    rope = {"mrope_interleaved": True, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
    usual |= {"mtp_use_dedicated_embeddings": False, "use_cache": True}
    usual |= {"rope_parameters": {**rope, "rope_theta": 10000000, "rope_type": "default"}}
    vision = {"deepstack_visual_indexes": [], "depth": 1, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 32}
    vision |= {"in_channels": 3, "initializer_range": 0.02, "intermediate_size": 48, "model_type": family}
    vision |= {"num_heads": 2, "num_position_embeddings": 36, "out_hidden_size": 64, "patch_size": 4}
    return {
        "architectures": [name],
        **{"image_token_id": 127, "model_type": family, "text_config": {**usual, **text}, "video_token_id": 126},
        **{"tie_word_embeddings": False, "transformers_version": "4.57.0.dev0"},
        "vision_config": {**vision, "spatial_merge_size": 2, "temporal_patch_size": 2},
        **{"vision_end_token_id": 125, "vision_start_token_id": 124},
        **more,
    }


_QWEN3_5_EXPERTS = {
    **{"moe_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 3, "output_router_logits": False},
    **{"router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 72},
}

PUBLISHED_WHOLE: dict[str, dict[str, dict[str, Any]]] = {
    "gemma3": {
        "gemma-3-4b-it": _gemma3(),
        "gemma-3-27b-it": _gemma3(query_pre_attn_scalar=168, num_key_value_heads=4),
    },
    "idefics3": {
        "Idefics3-8B-Llama3": _idefics(
            *("idefics3", "Idefics3ForConditionalGeneration"),
            {
                **{"_name_or_path": "HuggingFaceM4/idefics3", "max_position_embeddings": 131072},
                **{"rope_theta": 500000.0, "rope_scaling": None, "tie_word_embeddings": False},
            },
        ),
    },
    "internvl": {
        "InternVL3-8B-hf": _internvl({"max_window_layers": 70, "model_type": "qwen2", "sliding_window": None}),
        "InternVL3_5-8B-HF": _internvl({"head_dim": 16, "max_window_layers": 36, "model_type": "qwen3"}),
    },
    "llava": {"llava-1.5-7b-hf": _llava(), "llava-1.5-13b-hf": _llava(image_seq_length=9)},
    "mistral3": {
        "Mistral-Small-3.1-24B-Instruct-2503": _mistral3(_MISTRAL_SMALL, torch_dtype="bfloat16"),
        "Magistral-Small-2509": _mistral3(
            {**_MISTRAL_SMALL, "max_position_embeddings": 131072}, dtype="bfloat16", tie_word_embeddings=False
        ),
        "Ministral-3-8B-Instruct-2512": _mistral3(
            {
                **{"max_position_embeddings": 262144, "model_type": "ministral3", "rope_parameters": _MINISTRAL_ROPE},
                "tie_word_embeddings": False,
            },
            dtype="bfloat16",
            tie_word_embeddings=False,
        ),
    },
    "qwen2_5_vl": {
        "Qwen2.5-VL-3B-Instruct": _qwen2_5_vl(),
        "Qwen2.5-VL-7B-Instruct": _qwen2_5_vl(tie_word_embeddings=False),
    },
    "qwen2_vl": {"Qwen2-VL-7B-Instruct": _qwen2_vl()},
    "qwen3_vl_moe": {"Qwen3-VL-30B-A3B-Instruct": _qwen3_vl_moe()},
    "qwen3_5": {
        "Qwen3.5-27B": _qwen3_5("qwen3_5", "Qwen3_5ForConditionalGeneration", {}),
        "Qwen3.5-0.8B": _qwen3_5(
            *("qwen3_5", "Qwen3_5ForConditionalGeneration", {"tie_word_embeddings": True}), tie_word_embeddings=True
        ),
    },
    "qwen3_5_moe": {
        "Qwen3.5-35B-A3B": _qwen3_5("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", _QWEN3_5_EXPERTS),
    },
    "qwen3_vl": {"Qwen3-VL-4B-Instruct": _qwen3_vl(), "Qwen3-VL-2B-Thinking": _qwen3_vl(head_dim=32)},
    "smolvlm": {
        "SmolVLM-256M-Instruct": _idefics(
            *("smolvlm", "SmolVLMForConditionalGeneration"),
            {
                **{"_flash_attn_2_enabled": True, "head_dim": 16, "is_llama_config": True, "rope_interleaved": False},
                **{"max_position_embeddings": 8192, "pixel_shuffle_factor": 2, "rope_theta": 100000},
                **{"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}, "use_resampler": False},
            },
        ),
        "SmolVLM2-2.2B-Instruct": _idefics(
            *("smolvlm", "SmolVLMForConditionalGeneration"),
            {
                **{"max_position_embeddings": 8192, "rope_theta": 273768.0, "architectures": ["VLlama3ForCausalLM"]},
                **{"neftune_noise_alpha": 0.0, "qk_layer_norms": False},
            },
            image_seq_len=4,
        ),
    },
}
"""model_type -> model name -> ``config.json``: a part of :data:`tests.models.published.PUBLISHED`."""
