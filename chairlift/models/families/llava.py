"""LLaVA: Llama with CLIP as its image encoder (Liu et al., 2023)."""

from __future__ import annotations

import dataclasses

from chairlift.models.families.llama import LLAMA
from chairlift.models.family import inner_names

__all__ = ["LLAVA"]

_TEXT = "language_model.model."
_TOWER = "vision_tower."
_PROJECTOR = "multi_modal_projector."

LLAVA = dataclasses.replace(
    LLAMA,
    model_type="llava",
    architecture="LlavaForConditionalGeneration",
    models="LLaVA 1.5 with Llama",
    differences="reads images: CLIP, two linear layers",
    called_out="the image encoder",
    tensors=inner_names(_TEXT),
    other_names={
        "language_model.lm_head.": "lm_head.",
        "model.language_model.": _TEXT,
        "vision_tower.vision_model.": _TOWER,
        "model.vision_tower.vision_model.": _TOWER,
        "model.vision_tower.": _TOWER,
        "model.multi_modal_projector.": _PROJECTOR,
    },
    encoder="clip",
    text_type="llama",
    ignored_tensors=r"rotary_emb\.inv_freq|^vision_tower\.|^multi_modal_projector\.",
    defaults={
        **LLAMA.defaults,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "vocab_size": 32000,
    },
)
