"""Maps Hugging Face's ``model_type`` to the family that implements it."""

from __future__ import annotations

from typing import Final

from chairlift.base.plugins import is_plugin, load_value
from chairlift.errors import ConfigError
from chairlift.models.families.arcee import ARCEE
from chairlift.models.families.bailing_moe import BAILING_MOE, BAILING_MOE_V2
from chairlift.models.families.cohere import COHERE
from chairlift.models.families.cohere2 import COHERE2
from chairlift.models.families.cwm import CWM
from chairlift.models.families.ernie4_5 import ERNIE4_5
from chairlift.models.families.exaone import EXAONE
from chairlift.models.families.exaone4 import EXAONE4
from chairlift.models.families.falcon import FALCON
from chairlift.models.families.falcon_h1 import FALCON_H1
from chairlift.models.families.gemma import GEMMA
from chairlift.models.families.gemma2 import GEMMA2
from chairlift.models.families.gemma3 import GEMMA3
from chairlift.models.families.gemma3_text import GEMMA3_TEXT
from chairlift.models.families.glm import GLM
from chairlift.models.families.glm4 import GLM4
from chairlift.models.families.glm4_moe import GLM4_MOE
from chairlift.models.families.gpt2 import GPT2
from chairlift.models.families.gpt_neo import GPT_NEO
from chairlift.models.families.gpt_neox import GPT_NEOX
from chairlift.models.families.gpt_oss import GPT_OSS
from chairlift.models.families.granite import GRANITE
from chairlift.models.families.granitemoe import GRANITEMOE
from chairlift.models.families.granitemoehybrid import GRANITEMOEHYBRID
from chairlift.models.families.helium import HELIUM
from chairlift.models.families.hunyuan_v1_dense import HUNYUAN_V1_DENSE
from chairlift.models.families.hyperclovax import HYPERCLOVAX
from chairlift.models.families.internlm3 import INTERNLM3
from chairlift.models.families.internvl import INTERNVL
from chairlift.models.families.lfm2 import LFM2
from chairlift.models.families.lfm2_moe import LFM2_MOE
from chairlift.models.families.llama import LLAMA
from chairlift.models.families.llava import LLAVA
from chairlift.models.families.lstm import GRU, LSTM
from chairlift.models.families.mamba2 import MAMBA2
from chairlift.models.families.mimo import MIMO
from chairlift.models.families.ministral import MINISTRAL
from chairlift.models.families.ministral3 import MINISTRAL3, MISTRAL3
from chairlift.models.families.mistral import MISTRAL
from chairlift.models.families.mixtral import MIXTRAL
from chairlift.models.families.nemotron_h import NEMOTRON_H
from chairlift.models.families.olmo2 import OLMO2
from chairlift.models.families.olmo3 import OLMO3
from chairlift.models.families.olmoe import OLMOE
from chairlift.models.families.opt import OPT
from chairlift.models.families.phi import PHI
from chairlift.models.families.phi3 import PHI3
from chairlift.models.families.qwen2 import QWEN2
from chairlift.models.families.qwen2_moe import QWEN2_MOE
from chairlift.models.families.qwen3 import QWEN3
from chairlift.models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from chairlift.models.families.qwen3_moe import QWEN3_MOE
from chairlift.models.families.qwen3_next import QWEN3_NEXT
from chairlift.models.families.qwen_vl import QWEN2_5_VL, QWEN2_VL, QWEN3_VL, QWEN3_VL_MOE
from chairlift.models.families.seed_oss import SEED_OSS
from chairlift.models.families.smollm3 import SMOLLM3
from chairlift.models.families.smolvlm import IDEFICS3, SMOLVLM
from chairlift.models.families.stablelm import STABLELM
from chairlift.models.families.starcoder2 import STARCODER2
from chairlift.models.family import Family

__all__ = ["FAMILIES", "named_family"]

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        ARCEE,
        BAILING_MOE,
        BAILING_MOE_V2,
        COHERE,
        COHERE2,
        CWM,
        ERNIE4_5,
        EXAONE,
        EXAONE4,
        FALCON,
        FALCON_H1,
        GEMMA,
        GEMMA2,
        GEMMA3,
        GEMMA3_TEXT,
        GLM,
        GLM4,
        GLM4_MOE,
        GPT2,
        GPT_NEO,
        GPT_NEOX,
        GPT_OSS,
        GRANITE,
        GRANITEMOE,
        GRANITEMOEHYBRID,
        GRU,
        HELIUM,
        HUNYUAN_V1_DENSE,
        HYPERCLOVAX,
        IDEFICS3,
        INTERNLM3,
        INTERNVL,
        LFM2,
        LFM2_MOE,
        LLAMA,
        LLAVA,
        LSTM,
        MAMBA2,
        MIMO,
        MINISTRAL,
        MINISTRAL3,
        MISTRAL,
        MISTRAL3,
        MIXTRAL,
        NEMOTRON_H,
        OLMO2,
        OLMO3,
        OLMOE,
        OPT,
        PHI,
        PHI3,
        QWEN2,
        QWEN2_5_VL,
        QWEN2_MOE,
        QWEN2_VL,
        QWEN3,
        QWEN3_5,
        QWEN3_5_MOE,
        QWEN3_5_MOE_TEXT,
        QWEN3_5_TEXT,
        QWEN3_MOE,
        QWEN3_NEXT,
        QWEN3_VL,
        QWEN3_VL_MOE,
        SEED_OSS,
        SMOLLM3,
        SMOLVLM,
        STABLELM,
        STARCODER2,
    )
}
"""``model_type`` -> family. :func:`named_family` adds families from outside the package."""
_OWN: Final = frozenset(FAMILIES)


def named_family(model_impl: str) -> Family | None:
    """The family that the setting ``model_impl`` names as ``module:FAMILY``, which joins :data:`FAMILIES`. None for the
    other values of the setting.

    Raises ConfigError if the value cannot be imported, is not a :class:`Family`, or has the ``model_type`` of a family
    of this package.
    """
    if not is_plugin(model_impl):
        return None
    family = load_value("model_impl", model_impl, Family, "a file in chairlift/models/families")
    if family.model_type in _OWN:
        raise ConfigError(
            f"model_impl {model_impl!r} is for model_type {family.model_type!r}, which Chairlift has itself; use the"
            " setting 'native', or give the family and the model's config.json another model_type"
        )
    FAMILIES[family.model_type] = family
    return family
