"""Ministral 3 (Mistral AI, 2025): Mistral in which queries are multiplied by a factor that depends on the position, as
in Llama 4."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from chairlift.models.families.mistral import MISTRAL
from chairlift.models.family import MAX_CONTEXT, Family, Fields
from chairlift.models.rope_config import WITH_ORIGINAL, original_length

__all__ = ["MINISTRAL3", "MISTRAL3"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    given = fields.get("rope_scaling") or fields.get("rope_parameters") or _ROPE
    rope = Fields(given if isinstance(given, Mapping) else {}, f"{fields.where}: rope parameters")
    found = dict(MISTRAL.read(fields, layers))
    if not rope.get("llama_4_scaling_beta"):
        return found
    if (rope.get("rope_type") or rope.get("type")) in WITH_ORIGINAL:
        original = original_length(fields, rope, fields.integer("max_position_embeddings", 1, MAX_CONTEXT))
    else:
        original = rope.integer("original_max_position_embeddings", 1, MAX_CONTEXT)
    return {**found, "query_scaling": (rope.number("llama_4_scaling_beta", 0.0, 1e6), original)}


_ROPE = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 16.0,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16384,
    "rope_theta": 1e6,
    "rope_type": "yarn",
}

MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    models="Ministral 3",
    differences="queries grow with the position",
    called_out="scale of queries",
    read=_read,
    defaults={
        **MISTRAL.defaults,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _ROPE,
        "sliding_window": None,
    },
    rope_keys=("llama_4_scaling_beta", "max_position_embeddings"),
)
_WHOLE: dict[str, Any] = {
    "model_type": "mistral3",
    "architecture": "Mistral3ForConditionalGeneration",
    "other_names": {
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        "model.language_model.": "model.",
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    },
    "called_out": "scale of queries, the image encoder",
    "encoder": "lines",
    "ignored_tensors": rf"{MINISTRAL3.ignored_tensors}|^(model\.)?(vision_tower|multi_modal_projector)\.",
}
MISTRAL3 = dataclasses.replace(
    MINISTRAL3,
    **_WHOLE,
    text_type="ministral3",
    text_variants={"mistral": dataclasses.replace(MISTRAL, **_WHOLE, text_type="mistral")},
    models="Ministral 3, Mistral Small 3.1 and 3.2, Magistral Small, Devstral Small 2",
    defaults={**MINISTRAL3.defaults, "tie_word_embeddings": True},
    differences="as `ministral3`, or as `mistral` in Mistral Small; reads images: Pixtral, squares of patches merged",
)
