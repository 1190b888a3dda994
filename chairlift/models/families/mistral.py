"""Mistral 7B (Jiang et al., 2023): Llama in which every layer, or no layer, has a sliding window."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import MAX_CONTEXT, Family, Fields, layer_types

__all__ = ["MISTRAL"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    window = fields.optional_integer("sliding_window", 1, MAX_CONTEXT)
    kinds = layer_types(fields, layers)
    if kinds is not None and kinds != ["full_attention" if window is None else "sliding_attention"] * layers:
        fields.fail(f"layer_types of a mistral model must be all alike and agree with sliding_window {window}")
    return {"layer_windows": (window,) * layers}


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    models="Mistral 7B, Nemo, Small 3",
    differences="windows in all layers where the config says so",
    read=_read,
    defaults={
        "eos_token_id": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
)
