"""MPNet (Song et al., 2020): BERT without token types, and with a bias on attention scores for the distance of two
tokens, as in T5 (Raffel et al., 2020)."""

from __future__ import annotations

from typing import Any

from chairlift.models.encoder_config import EncoderFamily
from chairlift.models.families.bert import BERT_DEFAULTS, BERT_TENSORS
from chairlift.models.family import Fields

__all__ = ["MPNET"]

_OFFSET = 2
"""Row of the position table for the first token: the row after that of padding, whose id is 1."""
_BUCKETS = 32
"""Number of classes of distances. transformers computes this number of classes for every model."""


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    positions = fields.integer("max_position_embeddings", _OFFSET + 2, 2**20)
    return {
        "norm_eps": fields.number("layer_norm_eps", 0.0, 1.0),
        "num_positions": positions,
        "position_offset": _OFFSET,
        "max_model_len": positions - _OFFSET,
        "layer_windows": (None,) * layers,
        "distance_classes": fields.integer("relative_attention_num_buckets", _BUCKETS, _BUCKETS),
    }


_LAYER = "layers.*"
_THEIRS = "encoder.layer.*"

MPNET = EncoderFamily(
    model_type="mpnet",
    read=_read,
    defaults={**BERT_DEFAULTS, "vocab_size": 30527, "relative_attention_num_buckets": _BUCKETS},
    prefix="mpnet.",
    tensors={
        **{name: tensors for name, tensors in BERT_TENSORS.items() if name != "embeddings.types"},
        "distances": ("encoder.relative_attention_bias",),
        f"{_LAYER}.qkv": tuple(f"{_THEIRS}.attention.attn.{name}" for name in "qkv"),
        f"{_LAYER}.out": (f"{_THEIRS}.attention.attn.o",),
        f"{_LAYER}.attention_norm": (f"{_THEIRS}.attention.LayerNorm",),
    },
    head_tensors={"head.dense": "classifier.dense", "head.out": "classifier.out_proj"},
    ignored_tensors=r"^(mpnet\.)?pooler\.|^lm_head\.|embeddings\.position_ids$",
)
