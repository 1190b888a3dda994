"""Gemma 3 with images (Gemma Team, 2025): the text model of ``gemma3_text``, and SigLIP as its image encoder.

The rows of an image attend to each other both ways, so an image is always computed in one step.
"""

from __future__ import annotations

import dataclasses

from chairlift.models.families.gemma3_text import GEMMA3_TEXT

__all__ = ["GEMMA3"]

_TEXT = "model."
_TOWER = "vision_tower."
_PROJECTOR = "multi_modal_projector."

GEMMA3 = dataclasses.replace(
    GEMMA3_TEXT,
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    models="Gemma 3 (4B to 27B)",
    differences="as `gemma3_text`; reads images: SigLIP, squares of patches averaged, rows attend both ways",
    called_out="the image encoder",
    other_names={
        "language_model.model.": _TEXT,
        "language_model.lm_head.": "lm_head.",
        "model.language_model.": _TEXT,
        "vision_tower.vision_model.": _TOWER,
        "model.vision_tower.vision_model.": _TOWER,
        "model.vision_tower.": _TOWER,
        "model.multi_modal_projector.": _PROJECTOR,
    },
    encoder="pooled",
    text_type="gemma3_text",
    ignored_tensors=r"rotary_emb\.inv_freq|^vision_tower\.|^multi_modal_projector\.",
    defaults={
        **GEMMA3_TEXT.defaults,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "vocab_size": 262_208,
    },
)
