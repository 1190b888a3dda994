"""gpt-oss (OpenAI, 2025): experts with biases and clamped gates, attention sinks, windows in every other layer,
YaRN."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import (
    EXPERT_KEYS,
    MAX_CONTEXT,
    SPLIT_NAMES,
    Family,
    Fields,
    every_nth,
    pattern_windows,
    read_experts,
)

__all__ = ["GPT_OSS"]

_QKV = "model.layers.*.self_attn.qkv_proj"
_EXPERTS = "model.layers.*.mlp.experts"


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    biased = fields.boolean("attention_bias", True)
    window = fields.optional_integer("sliding_window", 1, MAX_CONTEXT)
    return {
        "qkv_bias": biased,
        "o_bias": biased,
        "sinks": True,
        "layer_windows": pattern_windows(fields, layers, window, every_nth(fields, layers)),
        "experts": read_experts(
            fields,
            (True,) * layers,
            fields.integer("intermediate_size", 1, 2**20),
            count_keys=("num_local_experts", "num_experts"),
            bias=True,
            clamp=(fields.number("swiglu_alpha", 0.0, 1e6), fields.number("swiglu_limit", 0.0, 1e6)),
            scoring="softmax_chosen",
        ),
    }


GPT_OSS = Family(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    models="gpt-oss-20b, gpt-oss-120b",
    differences="experts with biases and clamped gates; sinks; windows in every other layer; MXFP4",
    read=_read,
    defaults={
        "head_dim": 64,
        "hidden_act": "silu",
        "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    own_keys=EXPERT_KEYS,
    tensors={_QKV: SPLIT_NAMES[_QKV], "model.layers.*.mlp.gate": ("model.layers.*.mlp.router",)},
    transposed=("down_proj", "gate_up_proj"),
    paired_gates=True,
    renamed={
        f"{_EXPERTS}.{name}.{attribute}": f"{_EXPERTS}.{name}{ending}"
        for name in ("down_proj", "gate_up_proj")
        for attribute, ending in (("weight", ""), ("bias", "_bias"))
    },
)
