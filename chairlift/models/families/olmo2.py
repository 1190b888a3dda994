"""OLMo 2 (Walsh et al., 2024): norms after attention and MLP, and a norm over all heads of q and of k together."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import SPLIT_NAMES, Family, Fields

__all__ = ["OLMO2", "POST_NORMS"]


POST_NORMS = {
    "model.layers.*.attention_out_norm": ("model.layers.*.post_attention_layernorm",),
    "model.layers.*.mlp_out_norm": ("model.layers.*.post_feedforward_layernorm",),
}
"""Our name of a norm after attention or MLP -> its name in the checkpoint."""


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    biased = fields.boolean("attention_bias", False)
    return {
        "qkv_bias": biased,
        "o_bias": biased,
        "qk_norm": "all",
        "block": "post",
        "layer_windows": (None,) * layers,
    }


OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    models="OLMo 2",
    differences="norms after attention and MLP, and over all heads",
    read=_read,
    defaults={"eos_token_id": 50279, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    tensors={**SPLIT_NAMES, **POST_NORMS},
)
