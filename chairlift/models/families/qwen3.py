"""Qwen3 (2025): Qwen2 with a norm on each head of q and k, and a head size that is independent of the hidden size."""

from __future__ import annotations

from typing import Any

from chairlift.models.families.qwen2 import QWEN2_DEFAULTS, qwen2_windows
from chairlift.models.family import Family, Fields

__all__ = ["QWEN3"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    biased = fields.boolean("attention_bias", False)
    return {"qkv_bias": biased, "o_bias": biased, "qk_norm": "head", "layer_windows": qwen2_windows(fields, layers)}


QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    models="Qwen3",
    differences="norms of heads",
    read=_read,
    defaults={**QWEN2_DEFAULTS, "head_dim": 128},
)
