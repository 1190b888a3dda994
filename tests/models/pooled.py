"""Tiny random encoders, embedding models and classifiers that transformers writes, and their reference results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedModel

__all__ = ["EMBEDDERS", "TEXTS", "expected_classes", "expected_embeddings", "pooled_model", "sentence_files"]

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
    "pad_token_id": 1,
}
_SPECIAL: dict[str, Any] = {"eos_token_id": 2, "bos_token_id": 0}
EMBEDDERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"type_vocab_size": 1, **_SPECIAL},
    "xlm-roberta": {**_SPECIAL},
    "modernbert": {"local_attention": 10, "cls_token_id": 3, "sep_token_id": 4, **_SPECIAL},
    "distilbert": {"dim": 64, "hidden_dim": 96, "n_layers": 4, "n_heads": 4},
    "mpnet": {**_SPECIAL},
    "nomic_bert": {"pad_token_id": 1},
    "gte": {"type_vocab_size": 1},
    "qwen3": {"head_dim": 32, "num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "llama": {"num_key_value_heads": 2},
    "mistral": {"sliding_window": 24, "num_key_value_heads": 2},
    "gpt2": {"n_inner": 96, **_SPECIAL},
}
"""Family -> fields of its tiny config. Encoders come first."""


def _texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(5, 128, (n,), generator=generator).tolist() for n in (1, 7, 40, 3, 150, 17, 7, 64)]


TEXTS = _texts()
"""Texts of different lengths; two of them have equal lengths."""


def pooled_model(folder: Path, family: str, *, labels: int = 0, **overrides: Any) -> tuple[Path, PreTrainedModel]:
    """Write a random model with matrices of standard deviation 0.25. Returns its directory and transformers' model.

    With ``labels`` the model is a classifier with that many classes. ``overrides`` are fields of the family's
    transformers config.
    """
    fields = {**_SIZES, **EMBEDDERS.get(family, {}), **({"num_labels": labels} if labels else {}), **overrides}
    config = AutoConfig.for_model(family, **fields)
    build: Any = AutoModelForSequenceClassification if labels else AutoModel
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        model: PreTrainedModel = build.from_config(config).eval()
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            norm = "norm" in name.lower() or ("ln_" in name and name.endswith("weight"))
            parameter.copy_(1 + 0.1 * values if norm else 0.25 * values)
    where = folder / f"{family}-{labels}"
    model.save_pretrained(where)
    return where, model


def sentence_files(where: Path, mode: str = "mean_tokens", *, normalize: bool = True, **settings: Any) -> None:
    """Write the files of sentence-transformers. ``settings`` are written to config_sentence_transformers.json."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": paths[i], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (where / "modules.json").write_text(json.dumps(modules))
    (where / "1_Pooling").mkdir(exist_ok=True)
    (where / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 64, "pooling_mode_max_tokens": False, f"pooling_mode_{mode}": True})
    )
    if settings:
        (where / "config_sentence_transformers.json").write_text(json.dumps(settings))


def _padded(model: PreTrainedModel, texts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, texts))
    ids = torch.full((len(texts), width), 1)
    mask = torch.zeros((len(texts), width), dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
        mask[row, : len(text)] = 1
    return ids, mask


def expected_embeddings(
    model: PreTrainedModel, texts: Sequence[list[int]], pooling: str, *, normalize: bool = True
) -> Tensor:
    """Embeddings as in sentence-transformers, in one padded batch: pooled over unmasked tokens, and divided by their
    length."""
    ids, mask = _padded(model, texts)
    with torch.no_grad():
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    if pooling == "MEAN":
        wide = mask[:, :, None].to(hidden.dtype)
        pooled = (hidden * wide).sum(1) / wide.sum(1).clamp(min=1e-9)
    elif pooling == "CLS":
        pooled = hidden[:, 0]
    else:
        pooled = hidden[torch.arange(len(texts)), mask.sum(1) - 1]
    return torch.nn.functional.normalize(pooled, p=2, dim=1) if normalize else pooled


def expected_classes(model: PreTrainedModel, texts: Sequence[list[int]], types: Sequence[Any] | None = None) -> Tensor:
    """Logits of each text, computed separately."""
    rows = []
    with torch.no_grad():
        for row, text in enumerate(texts):
            given = {} if types is None else {"token_type_ids": torch.tensor([types[row]])}
            rows.append(model(input_ids=torch.tensor([text]), **given).logits[0])
    return torch.stack(rows)


def write_tokenizer(where: Path, *, pairs: bool = True) -> None:
    """Write a tokenizer with one token per letter, and the special tokens [CLS] and [SEP] around texts and between the
    two texts of a pair."""
    special = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
    letters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: index for index, token in enumerate([*special, *letters])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1" if pairs else None,
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    tokenizer.save(str(where / "tokenizer.json"))
    (where / "tokenizer_config.json").write_text("{}")
