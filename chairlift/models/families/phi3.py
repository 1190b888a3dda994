"""Phi-3, Phi-3.5 and Phi-4 (Abdin et al., 2024): Llama with LongRoPE, and with q, k, v and with gate, up stored as one
tensor each."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import MAX_CONTEXT, Family, Fields

__all__ = ["PHI3"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    return {"layer_windows": (fields.optional_integer("sliding_window", 1, MAX_CONTEXT),) * layers}


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    models="Phi-3, Phi-3.5, Phi-4",
    differences="LongRoPE; a part of a head may be rotated",
    read=_read,
    defaults={
        "eos_token_id": 32000,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    known_code=("modeling_phi3.Phi3ForCausalLM",),
    rope_types={"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"},
    rope_keys=("short_factor", "long_factor"),
    partial_rotary=True,
    tensors={},
)
