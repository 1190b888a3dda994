"""XLM-RoBERTa (Conneau et al., 2019): RoBERTa for a hundred languages. BGE-M3, multilingual E5 and the BGE rerankers
use it."""

from __future__ import annotations

from chairlift.models.families.bert import BERT_DEFAULTS
from chairlift.models.families.roberta import roberta_family

__all__ = ["XLM_ROBERTA"]

XLM_ROBERTA = roberta_family(model_type="xlm-roberta", defaults={**BERT_DEFAULTS, "pad_token_id": 1})
