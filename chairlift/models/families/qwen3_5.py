"""Qwen3.5 and Qwen3.6 (2026): gated delta nets in three of four layers, gated attention in the fourth."""

from __future__ import annotations

import dataclasses
from typing import Any

from chairlift.models.families.qwen3_next import QWEN3_NEXT, read_delta_net
from chairlift.models.family import SPLIT_NAMES, Fields, read_experts

__all__ = ["QWEN3_5", "QWEN3_5_MOE", "QWEN3_5_MOE_TEXT", "QWEN3_5_TEXT"]

_MIXER = "model.layers.*.mixer"
_STORED = "model.layers.*.linear_attn"

_AXES = ("mrope_section", "mrope_interleaved")
"""Keys that say which rotary frequencies encode positions in time, height and width. They are ignored, because the
three positions are equal for text."""

_NETS = {
    f"{_MIXER}.in_proj": (f"{_STORED}.in_proj_qkv", f"{_STORED}.in_proj_z"),
    f"{_MIXER}.rates_proj": (f"{_STORED}.in_proj_b", f"{_STORED}.in_proj_a"),
    f"{_MIXER}.norm": (f"{_STORED}.norm",),
    f"{_MIXER}.out_proj": (f"{_STORED}.out_proj",),
}


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    return read_delta_net(fields, layers, by_key_head=False)


def _read_moe(fields: Fields, layers: int) -> dict[str, Any]:
    size = fields.integer("moe_intermediate_size", 1, 2**20)
    shared = fields.integer("shared_expert_intermediate_size", 1, 2**20)
    experts = read_experts(fields, (True,) * layers, size, shared_size=shared, shared_gate=True, normalise=True)
    return {**_read(fields, layers), "experts": experts, "intermediate_size": size}


_WHOLE: dict[str, Any] = {
    "other_names": {"model.language_model.": "model."},
    "ignored_tensors": rf"{QWEN3_NEXT.ignored_tensors}|^model\.visual\.",
    "called_out": "the image encoder",
    "encoder": "learned_patches",
    "rope_sections": (11, 11, 10),
    "interleaved_sections": True,
}

QWEN3_5_TEXT = dataclasses.replace(
    QWEN3_NEXT,
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    models="Qwen3.5, Qwen3.6 (text part)",
    differences="gated delta nets in three of four layers; gated attention",
    read=_read,
    defaults={
        **{key: value for key, value in QWEN3_NEXT.defaults.items() if "expert" not in key and "moe" not in key},
        **{"hidden_size": 4096, "intermediate_size": 12288, "num_key_value_heads": 4},
    },
    own_keys=(),
    rope_keys=_AXES,
    tensors={**SPLIT_NAMES, **_NETS},
)
QWEN3_5_MOE_TEXT = dataclasses.replace(
    QWEN3_NEXT,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    models="Qwen3.5-35B-A3B, Qwen3.6-35B-A3B (text part)",
    differences="as `qwen3_5_text`; experts; a gated expert for all tokens",
    read=_read_moe,
    defaults={**QWEN3_NEXT.defaults, "num_experts": 256, "num_experts_per_tok": 8},
    rope_keys=_AXES,
    tensors={**QWEN3_NEXT.tensors, **_NETS},
)

QWEN3_5 = dataclasses.replace(
    QWEN3_5_TEXT,
    model_type="qwen3_5",
    architecture="Qwen3_5ForConditionalGeneration",
    text_type="qwen3_5_text",
    models="Qwen3.5, Qwen3.6",
    differences="as `qwen3_5_text`; reads images: positions on three axes",
    **_WHOLE,
)
QWEN3_5_MOE = dataclasses.replace(
    QWEN3_5_MOE_TEXT,
    model_type="qwen3_5_moe",
    architecture="Qwen3_5MoeForConditionalGeneration",
    text_type="qwen3_5_moe_text",
    models="Qwen3.5-35B-A3B, Qwen3.6-35B-A3B",
    differences="as `qwen3_5_moe_text`; reads images: positions on three axes",
    **_WHOLE,
)
