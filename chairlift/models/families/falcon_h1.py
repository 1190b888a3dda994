"""Falcon-H1 (TII, 2025): Mamba-2 and attention side by side in each layer, with a constant factor for many intermediate
results."""

from __future__ import annotations

from typing import Any

from chairlift.models.families.granitemoehybrid import HYBRID_KEYS
from chairlift.models.families.mamba2 import read_mamba2
from chairlift.models.family import SPLIT_NAMES, Family, Fields

__all__ = ["FALCON_H1"]

_LAYER = "model.layers.*"


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    embedding, logits, key, attention_in, attention_out, mixer_in, mixer_out = (
        fields.number(name, 0.0, 1e6, default=1.0) for name in _FACTORS
    )
    width = fields.optional_integer("mamba_d_ssm", 1, 2**20)
    norm = fields.boolean("mamba_rms_norm", False)
    mixer = read_mamba2(
        fields,
        HYBRID_KEYS,
        inner=width,
        norm=norm,
        norm_first=fields.boolean("mamba_norm_before_gate", True),
        factors=_listed(fields, "ssm_multipliers", 5),
        out_bias=fields.boolean("projectors_bias", False),
    )
    head_dim = fields.optional_integer("head_dim", 1, 1_024)
    if head_dim is None:
        head_dim = fields.integer("hidden_size", 1, 65_536) // fields.integer("num_attention_heads", 1, 1_024)
    return {
        **dict.fromkeys(("qkv_bias", "o_bias"), fields.boolean("attention_bias", False)),
        "attention_layers": (True,) * layers,
        "attention_scales": (attention_in, attention_out),
        "embedding_scale": embedding,
        # Falcon-H1 multiplies K by ``key`` before the rotation. Here the attention scores are multiplied by ``key``,
        # which gives the same result.
        "layer_scales": (key * head_dim**-0.5,) * layers,
        "layer_windows": (None,) * layers,
        "logit_scale": logits,
        "mixer_scales": (mixer_in, mixer_out),
        "mixers": (mixer,) * layers,
        "mlp_bias": fields.boolean("mlp_bias", False),
        "mlp_scales": _listed(fields, "mlp_multipliers", 2),
    }


def _listed(fields: Fields, key: str, count: int) -> tuple[float, ...]:
    """The ``count`` factors in the list under ``key``; all are 1 if the file has no such key."""
    given = fields.get(key)
    if given is None:
        return (1.0,) * count
    numbers = (
        [each for each in given if isinstance(each, (int, float)) and 0 < each <= 1e6]
        if isinstance(given, list)
        else []
    )
    if not isinstance(given, list) or not len(given) == len(numbers) == count:
        fields.fail(f"{key} must be a list of {count} numbers above 0, got {given!r:.80}")
    return tuple(map(float, numbers))


_FACTORS = (
    "embedding_multiplier",
    "lm_head_multiplier",
    "key_multiplier",
    "attention_in_multiplier",
    "attention_out_multiplier",
    "ssm_in_multiplier",
    "ssm_out_multiplier",
)

FALCON_H1 = Family(
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    models="Falcon-H1",
    differences="Mamba-2 and attention side by side in all layers; factors for each part",
    read=_read,
    defaults={
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "mamba_conv_bias": True,
        "mamba_d_conv": 4,
        "mamba_d_head": "auto",
        "mamba_d_ssm": 1024,
        "mamba_d_state": 256,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
        "max_position_embeddings": 8192,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128_000,
    },
    own_keys=_FACTORS,
    tensors={
        f"{_LAYER}.self_attn.qkv_proj": SPLIT_NAMES[f"{_LAYER}.self_attn.qkv_proj"],
        f"{_LAYER}.mlp.gate_up_proj": (f"{_LAYER}.feed_forward.gate_proj", f"{_LAYER}.feed_forward.up_proj"),
        f"{_LAYER}.mlp.down_proj": (f"{_LAYER}.feed_forward.down_proj",),
        f"{_LAYER}.post_attention_layernorm": (f"{_LAYER}.pre_ff_layernorm",),
        f"{_LAYER}.mixer": (f"{_LAYER}.mamba",),
        f"{_LAYER}.mixer.conv": (f"{_LAYER}.mamba.conv1d",),
        **{f"{_LAYER}.mixer.{name}": (f"{_LAYER}.mamba.{name}",) for name in ("in_proj", "norm", "out_proj")},
        "model.norm": ("model.final_layernorm",),
    },
    ignored_tensors=r"rotary_emb\.inv_freq|mamba\.mup_vector",
)
