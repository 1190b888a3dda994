"""ModernBERT (Warner et al., 2024): rotated q and k, GeGLU, norms before branches, windows in two of three layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chairlift.models.encoder_config import EncoderFamily
from chairlift.models.family import Fields

__all__ = ["MODERNBERT"]

_KINDS = ("full_attention", "sliding_attention")


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    activation = fields.get("classifier_activation")
    if activation != "gelu":
        fields.fail(f"classifier_activation {activation!r:.40} is not supported, only gelu")
    pooling = fields.get("classifier_pooling")
    if pooling not in ("cls", "mean"):
        fields.fail(f"classifier_pooling must be cls or mean, got {pooling!r:.40}")
    kinds = _layer_kinds(fields, layers)
    window = fields.integer("local_attention", 2, 2**20) // 2
    bases = {kind: _theta(fields, kind) for kind in _KINDS}
    return {
        "norm_eps": fields.number("norm_eps", 0.0, 1.0),
        "max_model_len": fields.integer("max_position_embeddings", 2, 2**20),
        "pre_norm": True,
        "gated": True,
        "attention_bias": fields.boolean("attention_bias", False),
        "mlp_bias": fields.boolean("mlp_bias", False),
        "norm_bias": fields.boolean("norm_bias", False),
        "layer_windows": tuple(window if kind == "sliding_attention" else None for kind in kinds),
        "layer_thetas": tuple(bases[kind] for kind in kinds),
        "head_bias": fields.boolean("classifier_bias", False),
        "head_norm": True,
        "head_activation": "gelu",
        "head_pooling": pooling.upper(),
    }


def _layer_kinds(fields: Fields, layers: int) -> list[str]:
    kinds = fields.get("layer_types")
    if kinds is None:
        every = fields.integer("global_attn_every_n_layers", 1, 1_024)
        return [_KINDS[bool(layer % every)] for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= set(_KINDS):
        fields.fail(f"layer_types must name {' or '.join(_KINDS)} for each of {layers} layers")
    return list(kinds)


def _theta(fields: Fields, kind: str) -> float:
    """Base of the rotation in layers of the type ``kind``: from ``rope_parameters`` (transformers 5), otherwise from
    older keys of ``config.json``."""
    given = fields.get("rope_parameters")
    if given is not None:
        rope = given.get(kind) if isinstance(given, Mapping) else None
        if not isinstance(rope, Mapping) or rope.get("rope_type", "default") != "default":
            fields.fail(f"rope_parameters must give {kind} a rope_type of default, got {rope!r:.80}")
        return Fields(rope, f"{fields.where}: rope_parameters.{kind}").number("rope_theta", 0.0, 1e12)
    if fields.get("rope_scaling"):
        fields.fail("rope_scaling is not supported for this family")
    if kind == "sliding_attention":
        local = fields.optional_number("local_rope_theta", 0.0, 1e12)
        return fields.number("global_rope_theta", 0.0, 1e12) if local is None else local
    return fields.number("global_rope_theta", 0.0, 1e12)


MODERNBERT = EncoderFamily(
    model_type="modernbert",
    read=_read,
    defaults={
        "vocab_size": 50368,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "hidden_activation": "gelu",
        "max_position_embeddings": 8192,
        "norm_eps": 1e-5,
        "global_attn_every_n_layers": 3,
        "local_attention": 128,
        "global_rope_theta": 160_000.0,
        "local_rope_theta": 10_000.0,
        "classifier_activation": "gelu",
        "classifier_pooling": "cls",
    },
    keys={"hidden_act": "hidden_activation"},
    prefix="model.",
    tensors={
        "embeddings.words": ("embeddings.tok_embeddings",),
        "embeddings.norm": ("embeddings.norm",),
        "layers.*.qkv": ("layers.*.attn.Wqkv",),
        "layers.*.out": ("layers.*.attn.Wo",),
        "layers.*.attention_norm": ("layers.*.attn_norm",),
        "layers.*.up": ("layers.*.mlp.Wi",),
        "layers.*.down": ("layers.*.mlp.Wo",),
        "layers.*.mlp_norm": ("layers.*.mlp_norm",),
        "final_norm": ("final_norm",),
    },
    head_tensors={"head.dense": "head.dense", "head.norm": "head.norm", "head.out": "classifier"},
    ignored_tensors=r"^head\.|^decoder\.|rotary_emb\.",
)
