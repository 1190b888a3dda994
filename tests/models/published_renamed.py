"""``config.json`` of published models that transformers does not have, or has under another name; see
:mod:`tests.models.published`."""

from __future__ import annotations

from typing import Any

from tests.models.published_config import config_of

__all__ = ["PUBLISHED_RENAMED"]


def _code(name: str, module: str) -> dict[str, Any]:
    model = module.removeprefix("modeling_")
    return {"auto_map": {"AutoConfig": f"configuration_{model}.Config", "AutoModelForCausalLM": f"{module}.{name}"}}


def _mimo(**more: Any) -> dict[str, Any]:
    usual = {"eos_token_id": 151643, "head_dim": 16, "hidden_act": "silu", "max_position_embeddings": 32768}
    given = {"max_window_layers": 28, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-5, "rope_scaling": None}
    last = {"rope_theta": 640000, "sliding_window": 32768, "tie_word_embeddings": False, "use_mrope": False}
    code = {**_code("MiMoForCausalLM", "modeling_mimo"), "use_sliding_window": False}
    return config_of("mimo", "MiMoForCausalLM", "bfloat16", usual, given, last, code, more)


def _ling(**more: Any) -> dict[str, Any]:
    usual = {"eos_token_id": 156892, "embedding_dropout": 0.0, "hidden_act": "silu", "output_dropout": 0.0}
    experts = {"first_k_dense_replace": 1, "moe_intermediate_size": 40, "n_group": 4, "norm_topk_prob": True}
    experts |= {"num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 1, "topk_group": 2}
    routing = {"moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": 40, "router_dtype": "fp32"}
    routing |= {"routed_scaling_factor": 2.5, "score_function": "sigmoid", "scoring_func": "sigmoid", "seq_aux": True}
    routing |= {"topk_method": "noaux_tc", "output_router_logits": False, "num_nextn_predict_layers": 0}
    given = {"max_position_embeddings": 32768, "max_window_layers": 20, "rms_norm_eps": 1e-6, "head_dim": 32}
    rope = {"partial_rotary_factor": 0.5, "rope_scaling": None, "rope_theta": 600000, "tie_word_embeddings": False}
    flags = {"use_bias": False, "use_qk_norm": True, "use_qkv_bias": False, "use_rmsnorm": True}
    code = _code("BailingMoeV2ForCausalLM", "modeling_bailing_moe_v2")
    parts = (usual, experts, routing, given, rope, flags, code, more)
    return config_of("bailing_moe", "BailingMoeV2ForCausalLM", "bfloat16", *parts)


PUBLISHED_RENAMED: dict[str, dict[str, dict[str, Any]]] = {
    "bailing_moe": {"Ling-mini-2.0": _ling(), "Ling-1T": _ling(rope_theta=50000, first_k_dense_replace=2)},
    "bailing_moe_v2": {"Ling-flash-2.0, under its other name": _ling(model_type="bailing_moe_v2")},
    "mimo": {"MiMo-7B-Base": _mimo(), "MiMo-7B-RL": _mimo(num_key_value_heads=4)},
}
"""model_type -> model name -> ``config.json``. ``test_renamed_families.py`` writes their weights with the class of
transformers that computes the same, and compares with it."""
