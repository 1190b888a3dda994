"""Command R and Aya (Cohere, 2024): attention and MLP in parallel after one LayerNorm without a bias."""

from __future__ import annotations

import dataclasses
from typing import Any

from chairlift.models.families.cohere2 import COHERE2
from chairlift.models.family import Fields, NotNative

__all__ = ["COHERE"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    if fields.boolean("use_qk_norm", False):
        raise NotNative(
            f"{fields.where}: use_qk_norm is true, which is not supported for model_type 'cohere'", "use_qk_norm"
        )
    biased = fields.boolean("attention_bias", False)
    return {
        "qkv_bias": biased,
        "o_bias": biased,
        "norm": "layer_no_bias",
        "block": "parallel",
        "logit_scale": fields.number("logit_scale", 0.0, 1e6),
        "layer_windows": (None,) * layers,
    }


COHERE = dataclasses.replace(
    COHERE2,
    model_type="cohere",
    architecture="CohereForCausalLM",
    models="Command R, Aya Expanse, Aya 23",
    differences="as `cohere2`, with full attention in all layers",
    read=_read,
    defaults={
        **{key: value for key, value in COHERE2.defaults.items() if key != "sliding_window"},
        "rope_theta": 500_000.0,
    },
)
