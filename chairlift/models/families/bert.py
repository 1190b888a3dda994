"""BERT (Devlin et al., 2018): learned positions, token types, norms after each sum, GELU."""

from __future__ import annotations

from typing import Any

from chairlift.models.encoder_config import EncoderFamily
from chairlift.models.family import Fields

__all__ = ["BERT", "BERT_DEFAULTS", "BERT_TENSORS", "read_bert"]


def read_bert(fields: Fields, layers: int, offset: int = 0) -> dict[str, Any]:
    """The fields of EncoderConfig that have the same keys in BERT and related families. The first token of a text uses
    row ``offset`` of the position table."""
    kind = fields.get("position_embedding_type")
    if kind not in (None, "absolute"):
        fields.fail(f"position_embedding_type {kind!r:.40} is not supported, only absolute")
    if fields.boolean("is_decoder", False):
        fields.fail("is_decoder is true, but only encoders of this family are supported")
    positions = fields.integer("max_position_embeddings", offset + 2, 2**20)
    return {
        "norm_eps": fields.number("layer_norm_eps", 0.0, 1.0),
        "num_positions": positions,
        "position_offset": offset,
        "max_model_len": positions - offset,
        "num_token_types": fields.integer("type_vocab_size", 1, 1024),
        "layer_windows": (None,) * layers,
    }


_LAYER = "layers.*"
_THEIRS = "encoder.layer.*"
BERT_TENSORS = {
    "embeddings.words": ("embeddings.word_embeddings",),
    "embeddings.positions": ("embeddings.position_embeddings",),
    "embeddings.types": ("embeddings.token_type_embeddings",),
    "embeddings.norm": ("embeddings.LayerNorm",),
    f"{_LAYER}.qkv": tuple(f"{_THEIRS}.attention.self.{name}" for name in ("query", "key", "value")),
    f"{_LAYER}.out": (f"{_THEIRS}.attention.output.dense",),
    f"{_LAYER}.attention_norm": (f"{_THEIRS}.attention.output.LayerNorm",),
    f"{_LAYER}.up": (f"{_THEIRS}.intermediate.dense",),
    f"{_LAYER}.down": (f"{_THEIRS}.output.dense",),
    f"{_LAYER}.mlp_norm": (f"{_THEIRS}.output.LayerNorm",),
}
"""Layer name in this package -> tensor names in a BERT checkpoint, without the checkpoint's prefix."""

BERT_DEFAULTS = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}

BERT = EncoderFamily(
    model_type="bert",
    read=read_bert,
    defaults=BERT_DEFAULTS,
    prefix="bert.",
    tensors=BERT_TENSORS,
    head_tensors={"head.dense": "bert.pooler.dense", "head.out": "classifier"},
    ignored_tensors=r"^(bert\.)?pooler\.|^cls\.|embeddings\.position_ids$",
)
