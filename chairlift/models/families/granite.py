"""Granite 3 (IBM, 2024): Llama with constant factors for embeddings, attention and MLP results, scores and logits."""

from __future__ import annotations

from typing import Any

from chairlift.models.families.llama import LLAMA
from chairlift.models.family import Family, Fields

__all__ = ["GRANITE", "read_factors"]


def read_factors(fields: Fields, layers: int) -> dict[str, Any]:
    """Fields of ModelConfig with constant factors: for scores, embeddings, attention and MLP results, and logits."""
    scale, embedding, residual, logits = (fields.number(key, 0.0, 1e6, default=1.0) for key in _FACTORS)
    return {
        "layer_scales": (scale,) * layers,
        "embedding_scale": embedding,
        "residual_scale": residual,
        "logit_scale": 1 / logits,
    }


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    return {**LLAMA.read(fields, layers), **read_factors(fields, layers)}


_FACTORS = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")

GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    models="Granite 3",
    differences="factors for embeddings, branches, scores, logits",
    read=_read,
    defaults=LLAMA.defaults,
    own_keys=_FACTORS,
)
