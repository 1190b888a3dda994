"""Gemma (Gemma Team, 2024): embeddings are multiplied by sqrt(D), norms by 1 + weight, and the MLP's gate uses GELU."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import Family, Fields

__all__ = ["GEMMA"]


def gemma_fields(fields: Fields) -> dict[str, Any]:
    """Fields of ModelConfig that all generations of Gemma share."""
    biased = fields.boolean("attention_bias", False)
    return {
        "qkv_bias": biased,
        "o_bias": biased,
        "norm": "rms_offset",
        "embedding_scale": fields.integer("hidden_size", 1, 65_536) ** 0.5,
        "rounds_embedding_scale": True,
    }


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    return {**gemma_fields(fields), "layer_windows": (None,) * layers}


GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    models="Gemma",
    differences="norms times 1 + weight, GELU in the gate, a factor for embeddings",
    read=_read,
    defaults={
        "eos_token_id": 1,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    # The oldest files name "gelu", but the models were trained with its approximation by tanh.
    activations={"gelu": "geglu_tanh", "gelu_pytorch_tanh": "geglu_tanh"},
)
