"""Which family a Hugging Face ``model_type`` is."""

from __future__ import annotations

from chairlift.models.family import Family
from chairlift.models.gpt2 import GPT2
from chairlift.models.llama import LLAMA
from chairlift.models.mistral import MISTRAL
from chairlift.models.qwen2 import QWEN2
from chairlift.models.qwen3 import QWEN3

__all__ = ["FAMILIES"]

FAMILIES: dict[str, Family] = {family.model_type: family for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3)}
