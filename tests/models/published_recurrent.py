"""``config.json`` of published models with recurrent layers; see :mod:`tests.models.published`."""

from __future__ import annotations

from typing import Any

from tests.models.published_config import config_of

__all__ = ["PUBLISHED_RECURRENT"]


def _falcon_h1(**more: Any) -> dict[str, Any]:
    mamba = {"mamba_chunk_size": 16, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 16, "mamba_expand": 2}
    mamba |= {"mamba_d_ssm": 96, "mamba_d_state": 32, "mamba_n_groups": 1, "mamba_n_heads": 6, "mamba_use_mlp": True}
    mamba |= {"mamba_norm_before_gate": False, "mamba_proj_bias": False, "mamba_rms_norm": False}
    factors = {"attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "key_multiplier": 0.390625}
    factors |= {"embedding_multiplier": 5.656854249492381, "lm_head_multiplier": 0.0390625}
    factors |= {"mlp_multipliers": [0.8838834764831844, 0.5859375], "ssm_in_multiplier": 1.25}
    parts = [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738]
    factors |= {"ssm_multipliers": parts, "ssm_out_multiplier": 0.23570226039551587}
    other = {"attention_bias": False, "mlp_bias": False, "mlp_expansion_factor": 8, "projectors_bias": False}
    other |= {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 100000000000.0}
    given = {"head_dim": 16, "max_position_embeddings": 16384, "num_logits_to_keep": 1, "tie_word_embeddings": False}
    ids = {"bos_token_id": 1, "eos_token_id": 11, "pad_token_id": 0}
    return config_of("falcon_h1", "FalconH1ForCausalLM", "bfloat16", mamba, factors, other, given, ids, more)


def _nemotron_h(pattern: str, **more: Any) -> dict[str, Any]:
    mamba = {"conv_kernel": 4, "expand": 2, "mamba_head_dim": 16, "mamba_hidden_act": "silu", "mamba_num_heads": 8}
    mamba |= {"chunk_size": 16, "mamba_proj_bias": False, "n_groups": 2, "ssm_state_size": 16, "use_conv_bias": True}
    steps = {"time_step_floor": 0.0001, "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1}
    other = {"attention_bias": False, "layer_norm_epsilon": 1e-5, "mlp_bias": False, "mlp_hidden_act": "relu2"}
    other |= {"rescale_prenorm_residual": True, "residual_in_fp32": False, "sliding_window": None, "use_bias": False}
    given = {"head_dim": 16, "hidden_dropout": 0.0, "num_logits_to_keep": 1, "tie_word_embeddings": False}
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"}, "use_mamba_kernels": True}
    layers = {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern), "time_step_min": 0.001}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    parts = (mamba, steps, other, given, code, layers, ids, more)
    return config_of("nemotron_h", "NemotronHForCausalLM", "bfloat16", *parts)


def _granite4(layers: list[str], **more: Any) -> dict[str, Any]:
    mamba = {"mamba_chunk_size": 16, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 16}
    mamba |= {"mamba_d_state": 32, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 8, "mamba_proj_bias": False}
    factors = {"attention_multiplier": 0.0078125, "embedding_multiplier": 12, "logits_scaling": 8}
    factors |= {"residual_multiplier": 0.22, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000}
    other = {"attention_bias": False, "bos_token_id": 100257, "eos_token_id": 100257, "hidden_act": "silu"}
    other |= {"init_method": "mup", "max_position_embeddings": 131072, "normalization_function": "rmsnorm"}
    given = {"layer_types": layers, "num_hidden_layers": len(layers), "output_router_logits": False}
    given |= {"pad_token_id": 2, "position_embedding_type": "nope", "router_aux_loss_coef": 0.01}
    last = {"num_experts_per_tok": 2, "num_local_experts": 5, "shared_intermediate_size": 64, "intermediate_size": 48}
    last |= {"tie_word_embeddings": True}
    parts = (mamba, factors, other, given, last, more)
    return config_of("granitemoehybrid", "GraniteMoeHybridForCausalLM", "bfloat16", *parts)


def _lfm2(**more: Any) -> dict[str, Any]:
    block = {"block_auto_adjust_ff_dim": True, "block_dim": 64, "block_ff_dim": 96, "block_ffn_dim_multiplier": 1.0}
    block |= {"block_mlp_init_scale": 1.0, "block_multiple_of": 32, "block_norm_eps": 1e-5, "block_out_init_scale": 1.0}
    block |= {"block_use_swiglu": True, "block_use_xavier_init": True, "conv_L_cache": 3, "conv_bias": False}
    block |= {"conv_dim": 64, "conv_dim_out": 64, "conv_use_xavier_init": True, "eos_token_id": 7, "norm_eps": 1e-5}
    heads = {"full_attn_idxs": [1, 3], "num_heads": 4, "num_hidden_layers": 4, "pad_token_id": 0, "rope_theta": 1e6}
    last = {"bos_token_id": 1, "max_position_embeddings": 128000, "use_pos_enc": True, "intermediate_size": ...}
    return config_of("lfm2", "Lfm2ForCausalLM", "bfloat16", block, heads, last, more)


def _lfm2_moe(**more: Any) -> dict[str, Any]:
    experts = {"moe_intermediate_size": 40, "norm_topk_prob": True, "num_dense_layers": 1, "num_experts": 6}
    experts |= {"num_experts_per_tok": 3, "routed_scaling_factor": 1.0, "use_expert_bias": True}
    given = {"bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False, "eos_token_id": 7, "norm_eps": 1e-5}
    given |= {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4, "pad_token_id": 0}
    last = {"max_position_embeddings": 128000, "rope_theta": 1000000.0}
    return config_of("lfm2_moe", "Lfm2MoeForCausalLM", "bfloat16", experts, given, last, more)


def _mamba2(**more: Any) -> dict[str, Any]:
    given = {"chunk_size": 16, "conv_kernel": 4, "expand": 2, "head_dim": 16, "hidden_act": "silu", "num_heads": 8}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "n_groups": 2, "state_size": 32}
    other = {"layer_norm_epsilon": 1e-5, "norm_before_gate": True, "rescale_prenorm_residual": False, "rms_norm": True}
    steps = {"time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_limit": [0.0, float("inf")]}
    steps |= {"time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 4, "time_step_scale": 1.0}
    last = {"residual_in_fp32": True, "tie_word_embeddings": False, "use_bias": False, "use_conv_bias": True}
    gone = dict.fromkeys(("intermediate_size", "num_attention_heads", "num_key_value_heads", "attention_dropout"), ...)
    return config_of("mamba2", "Mamba2ForCausalLM", "bfloat16", given, ids, other, steps, last, gone, more)


_NETS = {
    **{"attention_bias": False, "bos_token_id": 151643, "eos_token_id": 151645, "full_attention_interval": 4},
    **{"head_dim": 32, "hidden_act": "silu", "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 32, "num_hidden_layers": 4},
    **{"max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "tie_word_embeddings": False},
}
_NET_EXPERTS = {
    **{"moe_intermediate_size": 40, "norm_topk_prob": True, "num_experts": 6, "num_experts_per_tok": 3},
    **{"output_router_logits": False, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 72},
}


def _qwen3_next(**more: Any) -> dict[str, Any]:
    rope = {"partial_rotary_factor": 0.25, "rope_scaling": None, "rope_theta": 10000000}
    last = {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}
    parts = (_NETS, _NET_EXPERTS, rope, last, more)
    return config_of("qwen3_next", "Qwen3NextForCausalLM", "bfloat16", *parts)


def _qwen3_5_text(family: str, name: str, *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    rope = {"mrope_interleaved": True, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
    given = {"attn_output_gate": True, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    given |= {"mtp_num_hidden_layers": 1, "rope_parameters": {**rope, "rope_theta": 10000000, "rope_type": "default"}}
    return config_of(family, name, "bfloat16", _NETS, given, *parts, more)


PUBLISHED_RECURRENT: dict[str, dict[str, dict[str, Any]]] = {
    "falcon_h1": {
        "Falcon-H1-0.5B-Instruct": _falcon_h1(),
        "Falcon-H1-1.5B-Deep-Base": _falcon_h1(
            mamba_rms_norm=True, mamba_n_groups=2, time_step_limit=[0.0, float("inf")], num_key_value_heads=4
        ),
    },
    "granitemoehybrid": {
        "granite-4.0-h-tiny": _granite4(["mamba", "mamba", "attention", "mamba"]),
        "granite-4.0-h-1b": _granite4(
            *(["mamba", "mamba", "attention", "mamba"],), num_local_experts=0, num_experts_per_tok=0
        ),
        "granite-4.0-micro": _granite4(
            *(["attention"] * 3,), num_local_experts=0, num_experts_per_tok=0, position_embedding_type="rope"
        ),
    },
    "lfm2": {
        "LFM2-1.2B": _lfm2(),
        "LFM2-2.6B": _lfm2(full_attn_idxs=..., layer_types=["conv", "full_attention", "conv", "full_attention"]),
    },
    "lfm2_moe": {"LFM2-8B-A1B": _lfm2_moe(), "LFM2-8B-A1B, tied by name": _lfm2_moe(tie_embedding=True)},
    "mamba2": {
        "Mamba-Codestral-7B-v0.1": _mamba2(),
        "mamba2-130m-hf": _mamba2(n_groups=1, tie_word_embeddings=True, torch_dtype="float32"),
    },
    "qwen3_5_moe_text": {
        "Qwen3.5-35B-A3B, its text": _qwen3_5_text("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _NET_EXPERTS)
    },
    "qwen3_5_text": {"Qwen3.5-27B, its text": _qwen3_5_text("qwen3_5_text", "Qwen3_5ForCausalLM")},
    "qwen3_next": {
        "Qwen3-Next-80B-A3B-Instruct": _qwen3_next(),
        "Qwen3-Coder-Next": _qwen3_next(rope_theta=5000000, bos_token_id=..., router_aux_loss_coef=0.0),
    },
    "nemotron_h": {
        "Nemotron-H-8B-Base-8K": _nemotron_h("M-M*-", max_position_embeddings=8192, rms_norm_eps=1e-5),
        "NVIDIA-Nemotron-Nano-9B-v2": _nemotron_h(
            *("M-MM*-",),
            **{"bos_token_id": 1, "eos_token_id": 12, "head_dim": 16, "max_position_embeddings": 131072},
        ),
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _nemotron_h(
            *("MEM*E",),
            **{"max_position_embeddings": 262144, "moe_intermediate_size": 48, "n_group": 1, "n_routed_experts": 8},
            **{"moe_shared_expert_intermediate_size": 96, "n_shared_experts": 1, "norm_topk_prob": True},
            **{"num_experts_per_tok": 3, "routed_scaling_factor": 2.5, "topk_group": 1},
        ),
    },
}
