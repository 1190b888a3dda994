"""EXAONE 4 (LG AI Research, 2025): norms after attention and MLP; only layers with a sliding window rotate q and k."""

from __future__ import annotations

from typing import Any

from chairlift.models.families.olmo2 import POST_NORMS
from chairlift.models.family import MAX_CONTEXT, SPLIT_NAMES, Family, Fields, every_nth, pattern_windows

__all__ = ["EXAONE4"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    window = fields.optional_integer("sliding_window", 1, MAX_CONTEXT)
    mixed = window is not None and fields.get("layer_types") is None
    pattern = every_nth(fields, layers) if mixed else ["full_attention"] * layers
    windows = pattern_windows(fields, layers, window, pattern)
    return {
        "qk_norm": "head",
        "block": "post",
        "layer_windows": windows,
        "rope_layers": tuple(window is None or each is not None for each in windows),
    }


EXAONE4 = Family(
    model_type="exaone4",
    architecture="Exaone4ForCausalLM",
    models="EXAONE 4",
    differences="norms after attention and MLP; only layers with a window rotate",
    read=_read,
    defaults={
        "eos_token_id": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
    },
    tensors={**SPLIT_NAMES, **POST_NORMS},
)
