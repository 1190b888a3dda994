"""Idefics 3 and SmolVLM: Llama with an image encoder (Laurencon et al., 2024; Marafioti et al., 2025)."""

from __future__ import annotations

import dataclasses

from chairlift.models.families.llama import LLAMA
from chairlift.models.family import inner_names

__all__ = ["IDEFICS3", "SMOLVLM"]

IDEFICS3 = dataclasses.replace(
    LLAMA,
    model_type="idefics3",
    architecture="Idefics3ForConditionalGeneration",
    models="Idefics 3",
    differences="reads images: SigLIP, squares of patches merged",
    called_out="the image encoder",
    tensors=inner_names("model.text_model."),
    encoder="tiles",
    text_type="llama",
    ignored_tensors=r"rotary_emb\.inv_freq|^model\.(vision_model|connector)\.",
    defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5},
)
SMOLVLM = dataclasses.replace(
    IDEFICS3,
    model_type="smolvlm",
    architecture="SmolVLMForConditionalGeneration",
    models="SmolVLM, SmolVLM 2",
    differences="as `idefics3`",
)
