"""OLMoE (Muennighoff et al., 2024): Llama with experts, a norm over all heads of q and of k, and optional clipping of
q, k and v."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import EXPERT_KEYS, EXPERT_NAMES, Family, Fields, read_experts

__all__ = ["OLMOE"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    biased = fields.boolean("attention_bias", False)
    return {
        "qkv_bias": biased,
        "o_bias": biased,
        "qk_norm": "all",
        "qkv_clip": fields.optional_number("clip_qkv", 0.0, 1e6),
        "layer_windows": (None,) * layers,
        "experts": read_experts(
            fields,
            (True,) * layers,
            fields.integer("intermediate_size", 1, 2**20),
            normalise=fields.boolean("norm_topk_prob", False),
        ),
    }


OLMOE = Family(
    model_type="olmoe",
    architecture="OlmoeForCausalLM",
    models="OLMoE",
    differences="experts; norms over all heads; q, k and v may be clipped",
    called_out="clip",
    read=_read,
    defaults={
        "eos_token_id": 50279,
        "hidden_act": "silu",
        "intermediate_size": 2048,
        "max_position_embeddings": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "rms_norm_eps": 1e-5,
    },
    own_keys=(*EXPERT_KEYS, "clip_qkv"),
    tensors=EXPERT_NAMES,
)
