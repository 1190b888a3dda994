"""Nomic Embed 1 and 1.5 (Nussbaum et al., 2024): BERT with rotated q and k, SwiGLU, and no biases in linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chairlift.models.encoder_config import EncoderFamily
from chairlift.models.family import Fields

__all__ = ["NOMIC_BERT"]

_FIXED = {
    **{"mlp_fc1_bias": False, "mlp_fc2_bias": False, "parallel_block": False, "prenorm": False},
    **{"qkv_proj_bias": False, "rotary_emb_interleaved": False, "use_rms_norm": False, "rotary_emb_fraction": 1.0},
}
"""Key of the publisher's ``config.json`` -> the value of all its embedding models, and of transformers' class."""


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    for key, value in _FIXED.items():
        if fields.get(key) not in (None, value):
            fields.fail(f"{key} = {fields.get(key)!r:.40} is not supported, only {value!r}")
    longest = fields.integer("max_position_embeddings", 2, 2**20)
    # For longer texts the publisher's code changes the base of the rotation, and transformers' class does not.
    trained = fields.integer("max_trained_positions", 2, 2**20, default=longest)
    return {
        "norm_eps": fields.number("layer_norm_eps", 0.0, 1.0),
        "num_token_types": fields.integer("type_vocab_size", 1, 1024),
        "max_model_len": min(longest, trained),
        "gated": True,
        "attention_bias": False,
        "mlp_bias": False,
        "layer_windows": (None,) * layers,
        "layer_thetas": (_theta(fields),) * layers,
    }


def _theta(fields: Fields) -> float:
    given = fields.get("rope_parameters")
    if given is None:
        return fields.number("rotary_emb_base", 0.0, 1e12)
    if not isinstance(given, Mapping) or given.get("rope_type", "default") != "default":
        fields.fail(f"rope_parameters must have a rope_type of default, got {given!r:.80}")
    return Fields(given, f"{fields.where}: rope_parameters").number("rope_theta", 0.0, 1e12, default=1000.0)


_LAYER = "layers.*"
_THEIRS = "encoder.layers.*"

NOMIC_BERT = EncoderFamily(
    model_type="nomic_bert",
    read=_read,
    defaults={
        "activation_function": "swiglu",
        "layer_norm_epsilon": 1e-12,
        "n_embd": 768,
        "n_head": 12,
        "n_inner": 3072,
        "n_layer": 12,
        "n_positions": 2048,
        "rotary_emb_base": 1000.0,
        "type_vocab_size": 2,
        "vocab_size": 30528,
    },
    keys={
        "hidden_act": "activation_function",
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "layer_norm_eps": "layer_norm_epsilon",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    either_key=True,
    activations={"silu": "silu", "swiglu": "silu"},
    prefix="bert.",
    tensors={
        "embeddings.words": ("embeddings.word_embeddings",),
        "embeddings.types": ("embeddings.token_type_embeddings",),
        "embeddings.norm": ("emb_ln",),
        f"{_LAYER}.qkv": (f"{_THEIRS}.attn.Wqkv",),
        f"{_LAYER}.out": (f"{_THEIRS}.attn.out_proj",),
        f"{_LAYER}.attention_norm": (f"{_THEIRS}.norm1",),
        f"{_LAYER}.up": (f"{_THEIRS}.mlp.fc12", f"{_THEIRS}.mlp.fc11"),
        f"{_LAYER}.down": (f"{_THEIRS}.mlp.fc2",),
        f"{_LAYER}.mlp_norm": (f"{_THEIRS}.norm2",),
    },
    head_tensors={},
    ignored_tensors=r"^cls\.|rotary_emb\.",
)
