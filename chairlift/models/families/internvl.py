"""InternVL 3 and 3.5 in the layout of transformers (Zhu et al., 2025): Qwen2 or Qwen3 that reads images."""

from __future__ import annotations

import dataclasses
from typing import Any

from chairlift.models.families.qwen2 import QWEN2
from chairlift.models.families.qwen3 import QWEN3

__all__ = ["INTERNVL"]

_WHOLE: dict[str, Any] = {
    "model_type": "internvl",
    "architecture": "InternVLForConditionalGeneration",
    "called_out": "the image encoder",
    "encoder": "aspect_tiles",
    "other_names": {
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        "model.language_model.": "model.",
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    },
    "ignored_tensors": r"rotary_emb\.inv_freq|^vision_tower\.|^multi_modal_projector\.",
}

INTERNVL = dataclasses.replace(
    QWEN2,
    **_WHOLE,
    models="InternVL3, InternVL3.5 with Qwen2 or Qwen3 (names end in -hf)",
    differences="as `qwen2` or `qwen3`; reads images: a vision transformer over tiles, squares of patches merged",
    text_type="qwen2",
    text_variants={"qwen3": dataclasses.replace(QWEN3, **_WHOLE, text_type="qwen3")},
)
