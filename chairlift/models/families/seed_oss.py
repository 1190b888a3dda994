"""Seed-OSS (ByteDance, 2025): Llama with biases on q, k and v, and a head size that is independent of the hidden
size."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import Family, Fields

__all__ = ["SEED_OSS"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    return {
        "qkv_bias": fields.boolean("attention_bias", True),
        "o_bias": fields.boolean("attention_out_bias", False),
        "mlp_bias": fields.boolean("mlp_bias", False),
        "layer_windows": (None,) * layers,
    }


SEED_OSS = Family(
    model_type="seed_oss",
    architecture="SeedOssForCausalLM",
    models="Seed-OSS",
    differences="biases",
    read=_read,
    defaults={
        "eos_token_id": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 524288,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
    },
)
