"""Helium 1 (Kyutai, 2025): Llama with neighbouring dimensions rotated together."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import Family, Fields

__all__ = ["HELIUM"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    return {
        "qkv_bias": fields.boolean("attention_bias", False),
        "mlp_bias": fields.boolean("mlp_bias", False),
        "layer_windows": (None,) * layers,
    }


HELIUM = Family(
    model_type="helium",
    architecture="HeliumForCausalLM",
    models="Helium 1",
    differences="neighbours rotated together",
    read=_read,
    defaults={
        "eos_token_id": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "num_key_value_heads": 20,
        "rms_norm_eps": 1e-8,
        "rope_theta": 1e5,
    },
    interleaved=True,
)
