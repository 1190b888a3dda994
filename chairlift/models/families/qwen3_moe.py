"""Qwen3-MoE (Yang et al., 2025): Qwen3 with experts in all layers or in some layers."""

from __future__ import annotations

from typing import Any

from chairlift.models.families.qwen2 import QWEN2_DEFAULTS
from chairlift.models.families.qwen2_moe import read_qwen_experts
from chairlift.models.family import (
    EXPERT_KEYS,
    EXPERT_NAMES,
    MAX_CONTEXT,
    Family,
    Fields,
    layer_windows,
)

__all__ = ["QWEN3_MOE"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    biased = fields.boolean("attention_bias", False)
    window = None
    if fields.boolean("use_sliding_window", False):
        window = fields.optional_integer("sliding_window", 1, MAX_CONTEXT)
    return {
        "qkv_bias": biased,
        "o_bias": biased,
        "qk_norm": "head",
        "layer_windows": layer_windows(fields, layers, window, 0),
        "experts": read_qwen_experts(fields, layers, shared=False, normalise=False),
    }


QWEN3_MOE = Family(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    models="Qwen3-30B-A3B, Qwen3-235B-A22B",
    differences="experts; norms of heads",
    read=_read,
    defaults={
        **QWEN2_DEFAULTS,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
    },
    own_keys=EXPERT_KEYS,
    tensors=EXPERT_NAMES,
)
