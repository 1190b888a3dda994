"""GLM-4.5 (Z.ai, 2025): experts are chosen as in DeepSeek-V3, one shared expert serves all tokens, and half of each
head's dimensions are rotated."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import EXPERT_NAMES, Family, Fields, read_experts

__all__ = ["GLM4_MOE"]

_KEYS = ("n_routed_experts", "num_local_experts", "num_experts_per_tok")
_OURS = "model.layers.*.mlp.shared_expert"
_THEIRS = "model.layers.*.mlp.shared_experts"


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    dense = fields.integer("first_k_dense_replace", 0, 1_024)
    size = fields.integer("moe_intermediate_size", 1, 2**20)
    return {
        "qkv_bias": fields.boolean("attention_bias", False),
        "qk_norm": "head" if fields.boolean("use_qk_norm", False) else None,
        "layer_windows": (None,) * layers,
        "experts": read_experts(
            fields,
            tuple(layer >= dense for layer in range(layers)),
            size,
            count_keys=_KEYS[:2],
            shared_size=size * fields.integer("n_shared_experts", 1, 1_024),
            correction=True,
            scoring="sigmoid",
            normalise=fields.boolean("norm_topk_prob", True),
            epsilon=1e-20,
            scale=fields.number("routed_scaling_factor", 0.0, 1e6),
            groups=fields.integer("n_group", 1, 4_096),
            kept_groups=fields.integer("topk_group", 1, 4_096),
        ),
    }


GLM4_MOE = Family(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    models="GLM-4.5, GLM-4.5-Air",
    differences="experts in groups, chosen with a correction; one for all tokens; half a head rotated",
    read=_read,
    defaults={
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "intermediate_size": 10944,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
    },
    own_keys=_KEYS,
    partial_rotary=True,
    tensors={
        **EXPERT_NAMES,
        f"{_OURS}.gate_up_proj": (f"{_THEIRS}.gate_proj", f"{_THEIRS}.up_proj"),
        f"{_OURS}.down_proj": (f"{_THEIRS}.down_proj",),
    },
    # Extra layers that predict further tokens follow the last layer: layer 46 of GLM-4.5-Air, layer 92 of GLM-4.5.
    ignored_tensors=r"rotary_emb\.inv_freq|^model\.layers\.(46|92)\.",
)
