"""GLM-4 of 2025 (Z.ai): norms before and after attention and MLP, and rotation of half of each head's dimensions, in
neighbouring pairs."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import SPLIT_NAMES, Family, Fields

__all__ = ["GLM4"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    return {
        "qkv_bias": fields.boolean("attention_bias", True),
        "block": "both",
        "layer_windows": (None,) * layers,
    }


_LAYER = "model.layers.*"

GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    models="GLM-4-0414",
    differences="norms before and after attention and MLP; half a head rotated",
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
    tensors={
        f"{_LAYER}.self_attn.qkv_proj": SPLIT_NAMES[f"{_LAYER}.self_attn.qkv_proj"],
        f"{_LAYER}.attention_out_norm": (f"{_LAYER}.post_self_attn_layernorm",),
        f"{_LAYER}.mlp_out_norm": (f"{_LAYER}.post_mlp_layernorm",),
    },
)
