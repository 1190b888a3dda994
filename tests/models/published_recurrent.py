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
    # time_step_floor is a setting for the start of training. transformers also applies it to prompts.
    steps = {"time_step_floor": 0.0001, "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1}
    other = {"attention_bias": False, "layer_norm_epsilon": 1e-5, "mlp_bias": False, "mlp_hidden_act": "relu2"}
    other |= {"rescale_prenorm_residual": True, "residual_in_fp32": False, "sliding_window": None, "use_bias": False}
    given = {"head_dim": 16, "hidden_dropout": 0.0, "num_logits_to_keep": 1, "tie_word_embeddings": False}
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"}, "use_mamba_kernels": True}
    layers = {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern), "time_step_min": 1e-12}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    parts = (mamba, steps, other, given, code, layers, ids, more)
    return config_of("nemotron_h", "NemotronHForCausalLM", "bfloat16", *parts)


PUBLISHED_RECURRENT: dict[str, dict[str, dict[str, Any]]] = {
    "falcon_h1": {
        "Falcon-H1-0.5B-Instruct": _falcon_h1(),
        "Falcon-H1-1.5B-Deep-Base": _falcon_h1(
            mamba_rms_norm=True, mamba_n_groups=2, time_step_limit=[0.0, float("inf")], num_key_value_heads=4
        ),
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
