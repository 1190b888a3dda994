"""``config.json`` of published models with experts, as on the Hub except for smaller sizes and padding token ids."""

from __future__ import annotations

from typing import Any

from tests.models.published_config import config_of

__all__ = ["PUBLISHED_EXPERTS"]


def _mixtral(**more: Any) -> dict[str, Any]:
    usual = {"bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1000000.0}
    experts = {"num_experts_per_tok": 2, "num_local_experts": 6, "output_router_logits": False}
    given = {"max_position_embeddings": 32768, "router_aux_loss_coef": 0.02, "sliding_window": None}
    last = {"tie_word_embeddings": False}
    return config_of("mixtral", "MixtralForCausalLM", "bfloat16", usual, experts, given, last, more)


def _qwen2_moe(**more: Any) -> dict[str, Any]:
    usual = {"bos_token_id": 151643, "eos_token_id": 151643, "hidden_act": "silu", "rms_norm_eps": 1e-6}
    experts = {"decoder_sparse_step": 1, "moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 4}
    routing = {"norm_topk_prob": False, "output_router_logits": False, "router_aux_loss_coef": 0.001}
    given = {"rope_theta": 1000000.0, "shared_expert_intermediate_size": 96, "use_sliding_window": False}
    last = {"max_window_layers": 3, "tie_word_embeddings": False}
    return config_of("qwen2_moe", "Qwen2MoeForCausalLM", "bfloat16", usual, experts, routing, given, last, more)


def _qwen3_moe(**more: Any) -> dict[str, Any]:
    usual = {"bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu", "head_dim": 32, "rms_norm_eps": 1e-6}
    experts = {"decoder_sparse_step": 1, "moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 3}
    routing = {"mlp_only_layers": [], "norm_topk_prob": True, "output_router_logits": False}
    given = {"attention_bias": False, "rope_scaling": None, "router_aux_loss_coef": 0.001, "sliding_window": None}
    last = {"max_window_layers": 3, "tie_word_embeddings": False, "use_sliding_window": False}
    return config_of("qwen3_moe", "Qwen3MoeForCausalLM", "bfloat16", usual, experts, routing, given, last, more)


_QWEN3_CODER = {
    **{"bos_token_id": ..., "max_position_embeddings": 262144, "qkv_bias": False, "rope_theta": 10000000},
    **{"router_aux_loss_coef": 0.0, "shared_expert_intermediate_size": 0, "use_qk_norm": True},
}


def _olmoe(dtype: str, **more: Any) -> dict[str, Any]:
    usual = {"attention_bias": False, "eos_token_id": 50279, "hidden_act": "silu", "pad_token_id": 1}
    experts = {"num_experts": 6, "num_experts_per_tok": 4, "router_aux_loss_coef": 0.01}
    given = {"clip_qkv": None, "max_position_embeddings": 4096, "norm_topk_prob": False, "rms_norm_eps": 1e-5}
    last = {"num_key_value_heads": 4, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False}
    return config_of("olmoe", "OlmoeForCausalLM", dtype, usual, experts, given, last, more)


def _granitemoe(**more: Any) -> dict[str, Any]:
    usual = {"attention_bias": False, "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu", "pad_token_id": 0}
    factors = {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
    experts = {"num_experts_per_tok": 4, "num_local_experts": 6, "output_router_logits": False}
    given = {"logits_scaling": 6.0, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_scaling": None}
    last = {"rope_theta": 10000, "router_aux_loss_coef": 0.0, "tie_word_embeddings": True}
    return config_of("granitemoe", "GraniteMoeForCausalLM", "bfloat16", usual, factors, experts, given, last, more)


_GRANITE_31 = {"attention_dropout": 0.1, "max_position_embeddings": 131072}


def _glm4_moe(**more: Any) -> dict[str, Any]:
    usual = {"attention_bias": True, "eos_token_id": [151329, 151336, 151338], "head_dim": 32, "hidden_act": "silu"}
    experts = {"moe_intermediate_size": 48, "n_routed_experts": 6, "n_shared_experts": 1, "num_experts_per_tok": 3}
    routing = {"first_k_dense_replace": 1, "n_group": 1, "norm_topk_prob": True, "topk_group": 1}
    given = {"max_position_embeddings": 131072, "num_nextn_predict_layers": 1, "pad_token_id": 3}
    rope = {"partial_rotary_factor": 0.5, "rope_scaling": None, "rope_theta": 1000000, "rms_norm_eps": 1e-5}
    last = {"routed_scaling_factor": 1.0, "tie_word_embeddings": False, "use_qk_norm": False}
    name = "Glm4MoeForCausalLM"
    return config_of("glm4_moe", name, "bfloat16", usual, experts, routing, given, rope, last, more)


_GLM_45 = {"first_k_dense_replace": 3, "num_hidden_layers": 5, "routed_scaling_factor": 2.5, "use_qk_norm": True}

PUBLISHED_EXPERTS: dict[str, dict[str, dict[str, Any]]] = {
    "glm4_moe": {
        "GLM-4.5-Air": _glm4_moe(),
        "GLM-4.5": _glm4_moe(**_GLM_45),
        "GLM-4.6": _glm4_moe(**_GLM_45, max_position_embeddings=202752),
    },
    "granitemoe": {
        "granite-3.0-1b-a400m-base": _granitemoe(torch_dtype=...),
        "granite-3.1-3b-a800m-base": _granitemoe(**_GRANITE_31, rope_theta=10000000.0),
        "granite-3.1-1b-a400m-base": _granitemoe(**_GRANITE_31, rope_theta=1500000.0),
        "PowerMoE-3b": _granitemoe(torch_dtype="float32", activation_function="silu", router_jitter_noise=0.0),
    },
    "mixtral": {
        "Mixtral-8x7B-v0.1": _mixtral(),
        "Mixtral-8x7B-Instruct-v0.1, as saved by transformers 4.48": _mixtral(head_dim=16),
        "smol-8x101-ft": _mixtral(
            **{"attention_bias": False, "output_router_logits": True, "pretraining_tp": 1, "rope_scaling": None},
            **{"rope_theta": 10000.0, "router_aux_loss_coef": 0.001, "sliding_window": 9, "use_cache": False},
        ),
    },
    "olmoe": {
        "OLMoE-1B-7B-0924": _olmoe("bfloat16"),
        "OLMoE-1B-7B-0125": _olmoe("float32"),
        "OLMoE-1B-7B-0125-Instruct": _olmoe("bfloat16", bos_token_id=None, output_router_logits=False),
    },
    "qwen2_moe": {
        "Qwen1.5-MoE-A2.7B": _qwen2_moe(max_position_embeddings=8192, num_key_value_heads=4, sliding_window=32768),
        "Qwen1.5-MoE-A2.7B-Chat": _qwen2_moe(
            **{"eos_token_id": 151645, "max_position_embeddings": 32768, "num_key_value_heads": 4},
            sliding_window=32768,
        ),
        "Qwen2-57B-A14B": _qwen2_moe(max_position_embeddings=131072, sliding_window=131072),
    },
    "qwen3_moe": {
        "Qwen3-30B-A3B": _qwen3_moe(max_position_embeddings=40960, rope_theta=1000000.0),
        "Qwen3-235B-A22B-Instruct-2507": _qwen3_moe(max_position_embeddings=262144, rope_theta=5000000),
        "Qwen3-Coder-30B-A3B-Instruct": _qwen3_moe(**_QWEN3_CODER),
        "Qwen3-Coder-480B-A35B-Instruct": _qwen3_moe(**_QWEN3_CODER, attention_bias=...),
    },
}
"""model_type -> model name -> ``config.json``: a part of :data:`tests.models.published.PUBLISHED`."""
