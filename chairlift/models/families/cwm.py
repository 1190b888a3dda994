"""Code World Model (Meta, 2025): Llama 3 in which the first of every four layers has full attention and the other three
have a sliding window."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import MAX_CONTEXT, Family, Fields, pattern_windows

__all__ = ["CWM"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    window = fields.optional_integer("sliding_window", 1, MAX_CONTEXT) if fields.get("sliding_window") else None
    pattern = ["sliding_attention" if layer % 4 else "full_attention" for layer in range(layers)]
    windows = pattern_windows(fields, layers, window, pattern)
    return {"mlp_bias": fields.boolean("mlp_bias", False), "layer_windows": windows}


CWM = Family(
    model_type="cwm",
    architecture="CwmForCausalLM",
    models="Code World Model",
    differences="windows in three of four layers",
    read=_read,
    defaults={
        "eos_token_id": [128001, 128008, 128009],
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "factor": 16.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_theta": 1e6,
            "rope_type": "llama3",
        },
        "rope_theta": 1e6,
        "sliding_window": 8192,
    },
)
