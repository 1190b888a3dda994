"""RoBERTa (Liu et al., 2019): BERT with a different head, and with positions that start after the padding token's
row."""

from __future__ import annotations

import functools
from typing import Any

from chairlift.models.encoder_config import EncoderFamily
from chairlift.models.families.bert import BERT_DEFAULTS, BERT_TENSORS, read_bert
from chairlift.models.family import Fields

__all__ = ["ROBERTA", "roberta_family"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    return read_bert(fields, layers, fields.integer("pad_token_id", 0, 2**20) + 1)


roberta_family = functools.partial(
    EncoderFamily,
    read=_read,
    prefix="roberta.",
    tensors=BERT_TENSORS,
    head_tensors={"head.dense": "classifier.dense", "head.out": "classifier.out_proj"},
    ignored_tensors=r"^(roberta\.)?pooler\.|^lm_head\.|embeddings\.position_ids$",
)
"""Makes an EncoderFamily for a model type whose network is RoBERTa's. Its arguments are the remaining fields of
EncoderFamily, such as ``model_type`` and ``defaults``."""

ROBERTA = roberta_family(
    model_type="roberta", defaults={**BERT_DEFAULTS, "vocab_size": 50265, "pad_token_id": 1, "type_vocab_size": 2}
)
