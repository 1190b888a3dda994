"""Which family a Hugging Face ``model_type`` is."""

from __future__ import annotations

from chairlift.models.arcee import ARCEE
from chairlift.models.cwm import CWM
from chairlift.models.ernie4_5 import ERNIE4_5
from chairlift.models.family import Family
from chairlift.models.gpt2 import GPT2
from chairlift.models.helium import HELIUM
from chairlift.models.hunyuan_v1_dense import HUNYUAN_V1_DENSE
from chairlift.models.internlm3 import INTERNLM3
from chairlift.models.llama import LLAMA
from chairlift.models.ministral import MINISTRAL
from chairlift.models.ministral3 import MINISTRAL3
from chairlift.models.mistral import MISTRAL
from chairlift.models.qwen2 import QWEN2
from chairlift.models.qwen3 import QWEN3
from chairlift.models.seed_oss import SEED_OSS

__all__ = ["FAMILIES"]

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        ARCEE,
        CWM,
        ERNIE4_5,
        GPT2,
        HELIUM,
        HUNYUAN_V1_DENSE,
        INTERNLM3,
        LLAMA,
        MINISTRAL,
        MINISTRAL3,
        MISTRAL,
        QWEN2,
        QWEN3,
        SEED_OSS,
    )
}
