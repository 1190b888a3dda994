"""Gemma 2 (Gemma Team, 2024): norms before and after attention and MLP, windows in every other layer, capped scores and
logits."""

from __future__ import annotations

from typing import Any

from chairlift.models.families.gemma import gemma_fields
from chairlift.models.families.gemma3_text import GEMMA3_TEXT
from chairlift.models.family import MAX_CONTEXT, Family, Fields, every_nth, pattern_windows

__all__ = ["GEMMA2"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    window = fields.optional_integer("sliding_window", 1, MAX_CONTEXT)
    scale = fields.number("query_pre_attn_scalar", 0.0, 1e6) ** -0.5
    return {
        **gemma_fields(fields),
        "block": "both",
        "layer_scales": (scale,) * layers,
        "layer_windows": pattern_windows(fields, layers, window, every_nth(fields, layers)),
        "score_cap": _cap(fields, "attn_logit_softcapping"),
        "logit_cap": _cap(fields, "final_logit_softcapping"),
    }


def _cap(fields: Fields, key: str) -> float | None:
    """Value of the cap ``key``. Null in the file means that there is no cap. A missing key means the default cap."""
    if key in fields.raw and fields.raw[key] is None:
        return None
    return fields.number(key, 0.0, 1e6)


GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    models="Gemma 2",
    differences="as `gemma`; norms around branches; caps of scores and logits; windows in every other layer",
    read=_read,
    defaults={
        "attn_logit_softcapping": 50.0,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
    keys={"hidden_act": "hidden_activation"},
    activations={"gelu_pytorch_tanh": "geglu_tanh"},
    own_keys=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    tensors=GEMMA3_TEXT.tensors,
)
