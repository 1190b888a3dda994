"""Qwen3-Next (2025): gated delta nets in three of four layers, gated attention in the fourth, and experts."""

from __future__ import annotations

from typing import Any

from chairlift.models.families.qwen2 import QWEN2_DEFAULTS
from chairlift.models.families.qwen2_moe import read_qwen_experts
from chairlift.models.family import EXPERT_KEYS, EXPERT_NAMES, Family, Fields
from chairlift.models.mixers import DeltaNetConfig

__all__ = ["DELTA_NET_DEFAULTS", "DELTA_NET_RENAMED", "QWEN3_NEXT", "read_delta_net"]

_LAYER = "model.layers.*"
_SHARED = f"{_LAYER}.mlp.shared_expert"
_MOST_HEADS = 1_024
_WIDEST = 1_024
_MOST_TAPS = 64

DELTA_NET_DEFAULTS = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "num_attention_heads": 16,
    "partial_rotary_factor": 0.25,
}
"""Key of ``config.json`` -> transformers' default, for the keys that :func:`read_delta_net` reads and for the attention
layers of such models."""

DELTA_NET_RENAMED = {
    f"{_LAYER}.mixer.conv": f"{_LAYER}.linear_attn.conv1d.weight",
    f"{_LAYER}.mixer.decay_log": f"{_LAYER}.linear_attn.A_log",
    f"{_LAYER}.mixer.step_bias": f"{_LAYER}.linear_attn.dt_bias",
}
"""Parameter of a delta net that does not belong to a linear layer -> its name in a checkpoint."""


def read_delta_net(fields: Fields, layers: int, *, by_key_head: bool) -> dict[str, Any]:
    """Fields of ModelConfig for models with delta nets in some layers and gated attention in the others."""
    kinds = fields.get("layer_types")
    if kinds is None:
        interval = fields.integer("full_attention_interval", 1, 1_024, default=4)
        kinds = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]
    known = {"full_attention", "linear_attention"}
    if not isinstance(kinds, list) or len(kinds) != layers or not known.issuperset(map(str, kinds)):
        fields.fail(
            f"layer_types must name full_attention or linear_attention for each of {layers} layers, got {kinds!r:.160}"
        )
    net = DeltaNetConfig(
        key_heads=fields.integer("linear_num_key_heads", 1, _MOST_HEADS),
        value_heads=fields.integer("linear_num_value_heads", 1, _MOST_HEADS),
        key_dim=fields.integer("linear_key_head_dim", 1, _WIDEST),
        value_dim=fields.integer("linear_value_head_dim", 1, _WIDEST),
        taps=fields.integer("linear_conv_kernel_dim", 2, _MOST_TAPS),
        by_key_head=by_key_head,
    )
    if net.value_heads % net.key_heads:
        fields.fail(
            f"linear_num_value_heads {net.value_heads} is not a multiple of linear_num_key_heads {net.key_heads}"
        )
    biased = fields.boolean("attention_bias", False)
    return {
        "layer_windows": (None,) * layers,
        "mixers": tuple(net if kind == "linear_attention" else None for kind in kinds),
        "norm": "rms_offset",
        "output_gate": True,
        "qk_norm": "head",
        "qkv_bias": biased,
        "o_bias": biased,
        "rope_layers": tuple(kind == "full_attention" for kind in kinds),
    }


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    return {
        **read_delta_net(fields, layers, by_key_head=True),
        "experts": read_qwen_experts(fields, layers, shared=True, normalise=True),
    }


QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    models="Qwen3-Next-80B-A3B",
    differences="gated delta nets in three of four layers; gated attention; experts; a gated expert for all tokens",
    read=_read,
    defaults={
        **QWEN2_DEFAULTS,
        **DELTA_NET_DEFAULTS,
        "intermediate_size": 5632,
        "moe_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512,
    },
    own_keys=EXPERT_KEYS,
    partial_rotary=True,
    tensors={
        **EXPERT_NAMES,
        f"{_SHARED}.gate_up_proj": (f"{_SHARED}.gate_proj", f"{_SHARED}.up_proj"),
        f"{_LAYER}.mixer.in_proj": (f"{_LAYER}.linear_attn.in_proj_qkvz",),
        f"{_LAYER}.mixer.rates_proj": (f"{_LAYER}.linear_attn.in_proj_ba",),
        f"{_LAYER}.mixer.norm": (f"{_LAYER}.linear_attn.norm",),
        f"{_LAYER}.mixer.out_proj": (f"{_LAYER}.linear_attn.out_proj",),
    },
    renamed=DELTA_NET_RENAMED,
    ignored_tensors=r"rotary_emb\.inv_freq|^mtp\.",
)
