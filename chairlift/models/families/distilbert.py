"""DistilBERT (Sanh et al., 2019): BERT with half of the layers, without token types."""

from __future__ import annotations

from typing import Any

from chairlift.models.encoder_config import EncoderFamily
from chairlift.models.family import Fields

__all__ = ["DISTILBERT"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    positions = fields.integer("max_position_embeddings", 2, 2**20)
    return {
        "norm_eps": 1e-12,
        "num_positions": positions,
        "max_model_len": positions,
        "layer_windows": (None,) * layers,
        "head_activation": "relu",
    }


_LAYER = "layers.*"
_THEIRS = "transformer.layer.*"

DISTILBERT = EncoderFamily(
    model_type="distilbert",
    read=_read,
    defaults={
        "activation": "gelu",
        "dim": 768,
        "hidden_dim": 3072,
        "max_position_embeddings": 512,
        "n_heads": 12,
        "n_layers": 6,
        "vocab_size": 30522,
    },
    keys={
        "hidden_act": "activation",
        "hidden_size": "dim",
        "intermediate_size": "hidden_dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    },
    prefix="distilbert.",
    tensors={
        "embeddings.words": ("embeddings.word_embeddings",),
        "embeddings.positions": ("embeddings.position_embeddings",),
        "embeddings.norm": ("embeddings.LayerNorm",),
        f"{_LAYER}.qkv": tuple(f"{_THEIRS}.attention.{name}_lin" for name in "qkv"),
        f"{_LAYER}.out": (f"{_THEIRS}.attention.out_lin",),
        f"{_LAYER}.attention_norm": (f"{_THEIRS}.sa_layer_norm",),
        f"{_LAYER}.up": (f"{_THEIRS}.ffn.lin1",),
        f"{_LAYER}.down": (f"{_THEIRS}.ffn.lin2",),
        f"{_LAYER}.mlp_norm": (f"{_THEIRS}.output_layer_norm",),
    },
    head_tensors={"head.dense": "pre_classifier", "head.out": "classifier"},
    ignored_tensors=r"^vocab_|^qa_outputs\.|embeddings\.position_ids$",
)
