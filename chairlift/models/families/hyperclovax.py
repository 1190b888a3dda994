"""HyperCLOVA X SEED (NAVER, 2025): Granite with additional norms after attention and MLP; logits are multiplied by the
factor, not divided."""

from __future__ import annotations

from typing import Any

from chairlift.models.families.granite import GRANITE
from chairlift.models.families.llama import LLAMA
from chairlift.models.family import SPLIT_NAMES, Family, Fields

__all__ = ["HYPERCLOVAX"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    keys = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    embedding, residual, logits = (fields.number(key, 0.0, 1e6, default=1.0) for key in keys)
    scale = fields.optional_number("attention_multiplier", 0.0, 1e6)
    return {
        **LLAMA.read(fields, layers),
        **({} if scale is None else {"layer_scales": (scale,) * layers}),
        "block": "both" if fields.boolean("use_post_norm", True) else "pre",
        "embedding_scale": embedding,
        "residual_scale": residual,
        "logit_scale": logits,
    }


_LAYER = "model.layers.*"

HYPERCLOVAX = Family(
    model_type="hyperclovax",
    architecture="HyperCLOVAXForCausalLM",
    models="HyperCLOVA X SEED Think",
    differences="as `granite`, with norms before and after attention and MLP",
    read=_read,
    defaults=GRANITE.defaults,
    own_keys=(*GRANITE.own_keys, "use_post_norm"),
    tensors={
        **SPLIT_NAMES,
        f"{_LAYER}.attention_out_norm": (f"{_LAYER}.post_norm1",),
        f"{_LAYER}.mlp_out_norm": (f"{_LAYER}.post_norm2",),
    },
)
