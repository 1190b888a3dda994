"""Ministral 3 (Mistral AI, 2025): Mistral in which queries are multiplied by a factor that depends on the position, as
in Llama 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chairlift.models.family import MAX_CONTEXT, Family, Fields
from chairlift.models.mistral import MISTRAL

__all__ = ["MINISTRAL3"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    given = fields.get("rope_scaling") or fields.get("rope_parameters") or _ROPE
    rope = Fields(given if isinstance(given, Mapping) else {}, f"{fields.where}: rope parameters")
    beta = rope.optional_number("llama_4_scaling_beta", 0.0, 1e6) if rope.get("llama_4_scaling_beta") else None
    original = rope.integer("original_max_position_embeddings", 1, MAX_CONTEXT, default=MAX_CONTEXT)
    return {**MISTRAL.read(fields, layers), "query_scaling": None if beta is None else (beta, original)}


_ROPE = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 16.0,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16384,
    "rope_theta": 1e6,
    "rope_type": "yarn",
}

MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    models="Ministral 3",
    differences="queries grow with the position",
    called_out="scale of queries",
    read=_read,
    defaults={
        **MISTRAL.defaults,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _ROPE,
        "sliding_window": None,
    },
    rope_keys=("llama_4_scaling_beta", "max_position_embeddings"),
)
