"""GLM-4 of 2024 (Zeng et al., 2024): Llama with biases on q, k and v, and rotation of half of each head's dimensions,
in neighbouring pairs."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import SPLIT_NAMES, Family, Fields

__all__ = ["GLM"]

_QKV = "model.layers.*.self_attn.qkv_proj"


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    return {"qkv_bias": fields.boolean("attention_bias", True), "layer_windows": (None,) * layers}


GLM = Family(
    model_type="glm",
    architecture="GlmForCausalLM",
    models="GLM-4-9B of 2024",
    differences="half a head rotated; biases",
    read=_read,
    defaults={
        "eos_token_id": [151329, 151336, 151338],
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
    },
    partial_rotary=True,
    interleaved=True,
    tensors={_QKV: SPLIT_NAMES[_QKV]},
)
