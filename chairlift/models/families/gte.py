"""GTE of 2024 and Snowflake Arctic Embed 2 (Zhang et al., 2024): BERT with rotated q and k, and gates in the MLP."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from chairlift.models.encoder_config import EncoderFamily
from chairlift.models.family import Fields

__all__ = ["GTE", "NEW"]

_FIXED = {
    **{"layer_norm_type": "layer_norm", "logn_attention_scale": False, "pack_qkv": True},
    "position_embedding_type": "rope",
}
"""Key of the publishers' ``config.json`` -> the value of all their embedding models, and of transformers' class."""


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    for key, value in _FIXED.items():
        if fields.get(key) not in (None, value):
            fields.fail(f"{key} = {fields.get(key)!r:.40} is not supported, only {value!r}")
    theta, divisor = _rotation(fields)
    return {
        "norm_eps": fields.number("layer_norm_eps", 0.0, 1.0),
        "num_token_types": fields.integer("type_vocab_size", 0, 1024),
        "max_model_len": fields.integer("max_position_embeddings", 2, 2**20),
        "gated": True,
        "up_bias": False,
        "layer_windows": (None,) * layers,
        "layer_thetas": (theta,) * layers,
        "rope_divisor": divisor,
    }


def _rotation(fields: Fields) -> tuple[float, float]:
    """(base of the rotation, divisor of its frequencies). ``ntk`` multiplies the base by a factor, and divides the
    frequencies so that the slowest becomes slower by this factor (Su, 2023)."""
    given = fields.get("rope_parameters")
    if given is None:
        theta = fields.number("rope_theta", 0.0, 1e12)
        given = fields.get("rope_scaling") or {}
    elif isinstance(given, Mapping):
        theta = Fields(given, f"{fields.where}: rope_parameters").number("rope_theta", 0.0, 1e12, default=160_000.0)
    rope = Fields(given if isinstance(given, Mapping) else {}, f"{fields.where}: rope_scaling")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "linear", "ntk") or rope.get("mixed_b") is not None:
        fields.fail(f"rope_scaling must have the type default, linear or ntk, without mixed_b, got {given!r:.80}")
    if kind == "default":
        return theta, 1.0
    factor = rope.number("factor", 0.0, 1e6)
    if kind == "linear":
        return theta, factor
    heads = fields.integer("num_attention_heads", 1, 1_024)
    return theta * factor, factor ** (2 * heads / fields.integer("hidden_size", 1, 65_536))


_LAYER = "layers.*"
_THEIRS = "encoder.layer.*"

GTE = EncoderFamily(
    model_type="gte",
    read=_read,
    defaults={
        "hidden_act": "gelu",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 8192,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "rope_theta": 160_000.0,
        "type_vocab_size": 1,
        "vocab_size": 250_048,
    },
    prefix="new.",
    tensors={
        "embeddings.words": ("embeddings.word_embeddings",),
        "embeddings.types": ("embeddings.token_type_embeddings",),
        "embeddings.norm": ("embeddings.LayerNorm",),
        f"{_LAYER}.qkv": (f"{_THEIRS}.attention.qkv_proj",),
        f"{_LAYER}.out": (f"{_THEIRS}.attention.o_proj",),
        f"{_LAYER}.attention_norm": (f"{_THEIRS}.attn_ln",),
        f"{_LAYER}.up": (f"{_THEIRS}.mlp.up_gate_proj",),
        f"{_LAYER}.down": (f"{_THEIRS}.mlp.down_proj",),
        f"{_LAYER}.mlp_norm": (f"{_THEIRS}.mlp_ln",),
    },
    gates_behind=True,
    head_tensors={},
    ignored_tensors=r"^lm_head\.|^pooler\.|^new\.pooler\.|^classifier\.|rotary_emb\.",
)

NEW = dataclasses.replace(
    GTE, model_type="new", defaults={**GTE.defaults, "rope_theta": 10_000.0, "hidden_act": "gelu"}
)
