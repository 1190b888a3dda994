"""LFM2 (Liquid AI, 2025): short gated convolutions in most layers, attention in the others."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import SPLIT_NAMES, Family, Fields
from chairlift.models.mixers import ShortConvConfig

__all__ = ["LFM2", "lfm2_layers"]

_LAYER = "model.layers.*"
_MOST_TAPS = 64


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    return {"intermediate_size": _inner(fields), **lfm2_layers(fields, layers)}


def lfm2_layers(fields: Fields, layers: int) -> dict[str, Any]:
    """The fields of NetworkConfig that say which layers are convolutions, and what the others are."""
    kinds = fields.get("layer_types")
    if kinds is None:
        attending = fields.get("full_attn_idxs")
        attending = range(layers) if attending is None else attending
        if not isinstance(attending, (list, range)):
            fields.fail(f"full_attn_idxs must be a list of layer numbers, got {attending!r:.80}")
        kinds = ["full_attention" if layer in attending else "conv" for layer in range(layers)]
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or not {"full_attention", "conv"}.issuperset(map(str, kinds))
    ):
        fields.fail(f"layer_types must name full_attention or conv for each of {layers} layers, got {kinds!r:.160}")
    conv = ShortConvConfig(taps=fields.integer("conv_L_cache", 2, _MOST_TAPS), bias=fields.boolean("conv_bias", False))
    return {
        "layer_windows": (None,) * layers,
        "mixers": tuple(conv if kind == "conv" else None for kind in kinds),
        "qk_norm": "head",
        "rope_layers": tuple(kind == "full_attention" for kind in kinds),
        **(
            {}
            if fields.get("tie_embedding") is None
            else {"tie_word_embeddings": fields.boolean("tie_embedding", True)}
        ),
    }


def _inner(fields: Fields) -> int:
    """Inner width of the MLP. The first checkpoints do not store this width, but a number from which it is computed, as
    ``block_ff_dim``."""
    key = "intermediate_size" if fields.get("block_ff_dim") is None else "block_ff_dim"
    size = fields.integer(key, 1, 2**20)
    if fields.boolean("block_auto_adjust_ff_dim", True):
        size = int(2 * size / 3)
        if fields.get("block_ffn_dim_multiplier") is not None:
            size = int(fields.number("block_ffn_dim_multiplier", 0.0, 64.0) * size)
            multiple = fields.integer("block_multiple_of", 1, 65_536)
            size = -(-size // multiple) * multiple
    if size < 1:
        fields.fail(f"{key} and block_ffn_dim_multiplier make an MLP without an inner width")
    return size


LFM2 = Family(
    model_type="lfm2",
    architecture="Lfm2ForCausalLM",
    models="LFM2",
    differences="short convolutions in most layers; norms of heads",
    read=_read,
    keys={"rms_norm_eps": "norm_eps"},
    defaults={
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 3,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    tensors={
        f"{_LAYER}.self_attn.qkv_proj": SPLIT_NAMES[f"{_LAYER}.self_attn.qkv_proj"],
        f"{_LAYER}.self_attn.o_proj": (f"{_LAYER}.self_attn.out_proj",),
        f"{_LAYER}.self_attn.q_norm": (f"{_LAYER}.self_attn.q_layernorm",),
        f"{_LAYER}.self_attn.k_norm": (f"{_LAYER}.self_attn.k_layernorm",),
        f"{_LAYER}.mlp.gate_up_proj": (f"{_LAYER}.feed_forward.w1", f"{_LAYER}.feed_forward.w3"),
        f"{_LAYER}.mlp.down_proj": (f"{_LAYER}.feed_forward.w2",),
        f"{_LAYER}.input_layernorm": (f"{_LAYER}.operator_norm",),
        f"{_LAYER}.post_attention_layernorm": (f"{_LAYER}.ffn_norm",),
        f"{_LAYER}.mixer.in_proj": (f"{_LAYER}.conv.in_proj",),
        f"{_LAYER}.mixer.conv": (f"{_LAYER}.conv.conv",),
        f"{_LAYER}.mixer.out_proj": (f"{_LAYER}.conv.out_proj",),
        "model.norm": ("model.embedding_norm",),
    },
)
