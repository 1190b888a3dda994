"""Ling 2 and Ring 2 (inclusionAI, 2025): experts are chosen as in DeepSeek-V3, norms of heads, half a head rotated."""

from __future__ import annotations

import dataclasses
from typing import Any

from chairlift.models.family import EXPERT_NAMES, Family, Fields, read_experts

__all__ = ["BAILING_MOE", "BAILING_MOE_V2"]

_OURS = "model.layers.*"


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    scoring = fields.get("score_function")
    if scoring != "sigmoid":
        fields.fail(f"score_function {scoring!r:.40} is not supported, only sigmoid (Ling 2); Ling 1 is not supported")
    if fields.boolean("norm_head", False):
        fields.fail("norm_head is true, which is not supported")
    dense = fields.integer("first_k_dense_replace", 0, 1_024)
    size = fields.integer("moe_intermediate_size", 1, 2**20)
    return {
        "qkv_bias": fields.boolean("use_qkv_bias", False),
        "o_bias": fields.boolean("use_bias", False),
        "qk_norm": "head" if fields.boolean("use_qk_norm", False) else None,
        "layer_windows": (None,) * layers,
        "experts": read_experts(
            fields,
            tuple(layer >= dense for layer in range(layers)),
            size,
            shared_size=size * fields.integer("num_shared_experts", 0, 1_024),
            correction=fields.boolean("moe_router_enable_expert_bias", False),
            scoring="sigmoid",
            normalise=fields.integer("num_experts_per_tok", 1, 4_096) > 1,
            epsilon=1e-20,
            scale=fields.number("routed_scaling_factor", 0.0, 1e6),
            groups=fields.integer("n_group", 1, 4_096),
            kept_groups=fields.integer("topk_group", 1, 4_096),
        ),
    }


BAILING_MOE = Family(
    model_type="bailing_moe",
    architecture="BailingMoeV2ForCausalLM",
    models="Ling 2.0, Ring 2.0 (mini, flash, 1T)",
    differences="experts in groups, chosen with a correction; one for all tokens; norms of heads; half a head rotated",
    read=_read,
    defaults={
        "first_k_dense_replace": 0,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "n_group": 8,
        "num_shared_experts": 0,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 600_000.0,
        "routed_scaling_factor": 1.0,
        "topk_group": 4,
    },
    own_keys=("num_experts", "num_experts_per_tok"),
    known_code=("modeling_bailing_moe_v2.BailingMoeV2ForCausalLM",),
    partial_rotary=True,
    tensors={
        **EXPERT_NAMES,
        "model.embed_tokens": ("model.word_embeddings",),
        f"{_OURS}.self_attn.qkv_proj": (f"{_OURS}.attention.query_key_value",),
        f"{_OURS}.self_attn.o_proj": (f"{_OURS}.attention.dense",),
        f"{_OURS}.self_attn.q_norm": (f"{_OURS}.attention.query_layernorm",),
        f"{_OURS}.self_attn.k_norm": (f"{_OURS}.attention.key_layernorm",),
        f"{_OURS}.mlp.shared_expert.gate_up_proj": (
            f"{_OURS}.mlp.shared_experts.gate_proj",
            f"{_OURS}.mlp.shared_experts.up_proj",
        ),
        f"{_OURS}.mlp.shared_expert.down_proj": (f"{_OURS}.mlp.shared_experts.down_proj",),
    },
    renamed={f"{_OURS}.mlp.gate.e_score_correction_bias": f"{_OURS}.mlp.gate.expert_bias"},
)
BAILING_MOE_V2 = dataclasses.replace(BAILING_MOE, model_type="bailing_moe_v2", differences="as `bailing_moe`")
