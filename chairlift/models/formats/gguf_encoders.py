"""Encoders in GGUF files, and how a file's model turns texts into vectors. The module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from chairlift.errors import ModelLoadError
from chairlift.models.encoder_config import EncoderConfig
from chairlift.models.formats.gguf.reader import GGUFModel
from chairlift.models.formats.gguf_metadata import GGUFMetadata

__all__ = [
    "GGUF_ENCODERS",
    "HEAD_ROWS",
    "OTHER_ENCODERS",
    "gguf_encoder_config",
    "gguf_labels",
    "gguf_pooling",
    "is_reranker",
]

_POOLING: Final = {1: "MEAN", 2: "CLS", 3: "LAST"}
"""Value of ``pooling_type`` -> name of the pooling."""
_RANK: Final = 4
HEAD_ROWS: Final = "cls.output.weight"
"""Name of a tensor with one row per class."""
_DENSE: Final = "cls.weight"
OTHER_ENCODERS: Final = (
    *("eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "neo-bert", "nomic-bert-moe", "t5encoder"),
)
"""Values of ``general.architecture`` of encoders that are not read."""
_TYPE_COUNT: Final = "tokenizer.ggml.token_type_count"
_BERT_NAMES: Final = {
    "embeddings.words": ("token_embd",),
    "embeddings.positions": ("position_embd",),
    "embeddings.types": ("token_types",),
    "embeddings.norm": ("token_embd_norm",),
    "layers.*.qkv": ("blk.*.attn_q", "blk.*.attn_k", "blk.*.attn_v"),
    "layers.*.out": ("blk.*.attn_output",),
    "layers.*.attention_norm": ("blk.*.attn_output_norm",),
    "layers.*.up": ("blk.*.ffn_up",),
    "layers.*.down": ("blk.*.ffn_down",),
    "layers.*.mlp_norm": ("blk.*.layer_output_norm",),
    "head.dense": ("cls",),
    "head.out": ("cls.output",),
}
_NOMIC_NAMES: Final = {
    **{layer: names for layer, names in _BERT_NAMES.items() if layer != "embeddings.positions"},
    "layers.*.qkv": ("blk.*.attn_qkv",),
    "layers.*.up": ("blk.*.ffn_gate", "blk.*.ffn_up"),
}
_MODERN_NAMES: Final = {
    **{layer: names for layer, names in _BERT_NAMES.items() if not layer.startswith(("embeddings.", "head."))},
    "embeddings.words": ("token_embd",),
    "embeddings.norm": ("token_embd_norm",),
    "layers.*.qkv": ("blk.*.attn_qkv",),
    "layers.*.attention_norm": ("blk.*.attn_norm",),
    "layers.*.mlp_norm": ("blk.*.ffn_norm",),
    "final_norm": ("output_norm",),
}
GGUF_ENCODERS: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "bert": _BERT_NAMES,
    "modern-bert": _MODERN_NAMES,
    "nomic-bert": _NOMIC_NAMES,
}
"""``general.architecture`` -> layer name in this package (``*`` is a layer number) -> tensors in files that together
fill its rows. ``bert`` is BERT, DistilBERT, RoBERTa and XLM-RoBERTa; ``nomic-bert`` is Nomic Embed 1 and 1.5."""


def gguf_encoder_config(model: GGUFModel) -> EncoderConfig:
    """Read an encoder's shape from GGUF metadata. Raises :class:`~chairlift.errors.ModelLoadError`.

    In BERT, the first token of a text has the first row of the table of positions: llama.cpp's converter leaves out the
    rows before it, which RoBERTa does not use.
    """
    metadata = GGUFMetadata(model)
    hidden = _size(metadata, "embedding_length")
    heads = _size(metadata, "attention.head_count")
    if hidden % heads or hidden // heads % 2:
        metadata.fail("attention.head_count", f"is {heads}, of which embedding_length {hidden} is no even multiple")
    layers = metadata.layers()
    fields = _FIELDS[model.metadata["general.architecture"]](metadata, layers)
    return EncoderConfig(
        **{"max_model_len": _size(metadata, "context_length"), "layer_windows": (None,) * layers, **fields},
        vocab_size=metadata.shape("token_embd.weight")[0],
        hidden_size=hidden,
        intermediate_size=_size(metadata, "feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        norm_eps=float(metadata.need("attention.layer_norm_epsilon")),
        num_token_types=metadata.shape("token_types.weight")[0] if metadata.has("token_types.weight") else 0,
        dtype="float32" if all(model.info(name).type.name == "F32" for name in model) else "bfloat16",
    )


def _bert(metadata: GGUFMetadata, layers: int) -> dict[str, Any]:
    positions = metadata.shape("position_embd.weight")[0]
    if metadata.has("blk.0.ffn_gate.weight") or metadata.has("blk.0.attn_q_norm.weight"):
        metadata.fail("block_count", "layers have tensors that BERT does not have, such as gates")
    length = min(positions, _size(metadata, "context_length"))
    return {"model_type": "bert", "max_model_len": length, "num_positions": positions}


def _nomic(metadata: GGUFMetadata, layers: int) -> dict[str, Any]:
    theta = _unscaled(metadata)
    fields = {"model_type": "nomic_bert", "layer_thetas": (theta,) * layers}
    return fields | {"gated": True, "activation": "silu", "attention_bias": False, "mlp_bias": False}


def _modern(metadata: GGUFMetadata, layers: int) -> dict[str, Any]:
    """Fields of ModernBERT, in which every third layer, from the first on, has full attention."""
    theta = _unscaled(metadata)
    if is_reranker(metadata.model):
        metadata.fail("pooling_type", "is 4 (scores), which is not supported here; use the original safetensors, or")
    activation = metadata.text("hidden_activation", "gelu")
    if activation != "gelu":
        metadata.fail("hidden_activation", f"is {activation!r:.40}, which is not supported; only gelu is")
    window = metadata.number("attention.sliding_window", 0)
    kinds = metadata.windowed(layers, 3 if window else 1, full_first=True)
    full = [not window or kind == "full_attention" for kind in kinds]
    local = float(metadata.number("rope.freq_base_swa", theta))
    return {
        **{"model_type": "modernbert", "pre_norm": True, "gated": True},
        **{"attention_bias": False, "mlp_bias": False, "norm_bias": False},
        "layer_windows": tuple(None if each else window // 2 for each in full),
        "layer_thetas": tuple(theta if each else local for each in full),
    }


def _unscaled(metadata: GGUFMetadata) -> float:
    """Base of a rotation that is not scaled. Raises ModelLoadError for any other."""
    if metadata.text("rope.scaling.type", "none") != "none":
        metadata.fail("rope.scaling.type", "must be none")
    return float(metadata.need("rope.freq_base"))


_FIELDS: Final[Mapping[str, Callable[[GGUFMetadata, int], dict[str, Any]]]] = {
    "bert": _bert,
    "modern-bert": _modern,
    "nomic-bert": _nomic,
}
"""``general.architecture`` -> function from (metadata, number of layers) to the fields that differ between them."""


def gguf_pooling(model: GGUFModel) -> str | None:
    """Pooling of embeddings that the file names; None if it names none, or scores pairs. Raises ModelLoadError for
    unknown numbers."""
    metadata = GGUFMetadata(model)
    given = metadata.number("pooling_type", 0)
    if given and given not in (*_POOLING, _RANK):
        metadata.fail(
            "pooling_type", f"is {given!r:.40}; supported are 1 (mean), 2 (first token), 3 (last token), 4 (scores)"
        )
    return _POOLING.get(given)


def is_reranker(model: GGUFModel) -> bool:
    """Whether the file says that its model scores pairs of texts."""
    return bool(GGUFMetadata(model).number("pooling_type", 0) == _RANK)


def gguf_labels(model: GGUFModel) -> tuple[str, ...]:
    """Names of the classes of an encoder that scores pairs. Raises ModelLoadError if the file lacks a part of the
    classifier."""
    missing = next((name for name in (_DENSE, HEAD_ROWS) if name not in model), None)
    if missing is not None:
        raise ModelLoadError(
            f"{model.path}: pooling_type says that the model scores pairs, but tensor {missing} is missing (llama.cpp's"
            " converter leaves a part of BERT's classifier out); use the original model's safetensors"
        )
    count = model.info(HEAD_ROWS).shape[0] if len(model.info(HEAD_ROWS).shape) > 1 else 1
    named = model.metadata.get(f"{model.metadata['general.architecture']}.classifier.output_labels")
    if isinstance(named, list) and len(named) == count:
        return tuple(map(str, named))
    return tuple(f"LABEL_{index}" for index in range(count))


def _size(metadata: GGUFMetadata, name: str) -> int:
    value: Any = metadata.need(name)
    if type(value) is not int or not 1 <= value <= 2**24:
        metadata.fail(name, f"is {value!r:.40}; it must be a positive whole number")
    return int(value)
