"""Qwen1.5-MoE and Qwen2-MoE (Yang et al., 2024): Qwen2 with experts, and one gated shared expert for all tokens."""

from __future__ import annotations

from typing import Any

from chairlift.models.families.qwen2 import QWEN2_DEFAULTS
from chairlift.models.family import (
    EXPERT_KEYS,
    EXPERT_NAMES,
    MAX_CONTEXT,
    ExpertLayers,
    Family,
    Fields,
    pattern_windows,
    read_experts,
    sparse_layers,
)

__all__ = ["QWEN2_MOE", "read_qwen_experts"]

_SHARED = "model.layers.*.mlp.shared_expert"


def read_qwen_experts(fields: Fields, layers: int, *, shared: bool, normalise: bool) -> ExpertLayers:
    """Read the experts in the layers that Qwen's keys name. ``shared`` adds a gated expert for all tokens.
    ``normalise`` is the default of ``norm_topk_prob``."""
    return read_experts(
        fields,
        sparse_layers(fields, layers),
        fields.integer("moe_intermediate_size", 1, 2**20),
        shared_size=fields.integer("shared_expert_intermediate_size", 1, 2**20) if shared else 0,
        shared_gate=shared,
        normalise=fields.boolean("norm_topk_prob", normalise),
    )


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    window = None
    last = 0
    if fields.boolean("use_sliding_window", False):
        window = fields.optional_integer("sliding_window", 1, MAX_CONTEXT)
        last = fields.integer("max_window_layers", 0, 1_024)
    # In Qwen2 the last layers have sliding windows. In Qwen2-MoE every other one of the first layers has a sliding
    # window.
    windowed = ["full_attention" if layer % 2 or layer >= last else "sliding_attention" for layer in range(layers)]
    return {
        "qkv_bias": fields.boolean("qkv_bias", True),
        "layer_windows": pattern_windows(fields, layers, window, windowed),
        "experts": read_qwen_experts(fields, layers, shared=True, normalise=False),
    }


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    architecture="Qwen2MoeForCausalLM",
    models="Qwen1.5-MoE, Qwen2-57B-A14B",
    differences="experts; a gated expert for all tokens",
    read=_read,
    defaults={
        **QWEN2_DEFAULTS,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 16,
        "shared_expert_intermediate_size": 5632,
    },
    own_keys=EXPERT_KEYS,
    tensors={**EXPERT_NAMES, f"{_SHARED}.gate_up_proj": (f"{_SHARED}.gate_proj", f"{_SHARED}.up_proj")},
)
