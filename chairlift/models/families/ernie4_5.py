"""Dense ERNIE 4.5 (Baidu, 2025): Llama with rotation of neighbouring dimensions, tied embeddings, and one config key
for all biases."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import Family, Fields

__all__ = ["ERNIE4_5"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    biased = fields.boolean("use_bias", False)
    return {"qkv_bias": biased, "o_bias": biased, "mlp_bias": biased, "layer_windows": (None,) * layers}


ERNIE4_5 = Family(
    model_type="ernie4_5",
    architecture="Ernie4_5ForCausalLM",
    models="ERNIE 4.5 (dense)",
    differences="neighbours rotated together",
    read=_read,
    defaults={
        "eos_token_id": 2,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
    },
    interleaved=True,
)
