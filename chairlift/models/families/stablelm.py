"""StableLM (Stability AI, 2023): Llama with LayerNorm, rotation of a quarter of each head's dimensions, and optionally
attention and MLP in parallel."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import Family, Fields

__all__ = ["STABLELM"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    return {
        "qkv_bias": fields.boolean("use_qkv_bias", False),
        "norm": "layer",
        "block": "parallel" if fields.boolean("use_parallel_residual", False) else "pre",
        "layer_windows": (None,) * layers,
    }


STABLELM = Family(
    model_type="stablelm",
    architecture="StableLmForCausalLM",
    models="StableLM",
    differences="LayerNorm; a part of a head rotated; branches may be side by side",
    read=_read,
    defaults={
        "eos_token_id": 0,
        "hidden_act": "silu",
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.25,
    },
    keys={"rms_norm_eps": "layer_norm_eps"},
    partial_rotary=True,
)
