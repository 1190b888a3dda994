"""Llama 1 to 3.2 and models with the same architecture (Touvron et al., 2023)."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import Family, Fields, layer_windows

__all__ = ["LLAMA"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    biased = fields.boolean("attention_bias", False)
    return {
        "qkv_bias": biased,
        "o_bias": biased,
        "mlp_bias": fields.boolean("mlp_bias", False),
        "layer_windows": layer_windows(fields, layers, None, 0),
    }


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    models="Llama 1 to 3.2, SmolLM2, Yi, DeepSeek Coder",
    read=_read,
    defaults={"eos_token_id": 2, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6},
)
