"""Dense Hunyuan (Tencent, 2025): Llama with a norm on each head of q and k after the rotation."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import SPLIT_NAMES, Family, Fields

__all__ = ["HUNYUAN_V1_DENSE"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    biased = fields.boolean("attention_bias", False)
    return {"qkv_bias": biased, "o_bias": biased, "qk_norm": "rotated", "layer_windows": (None,) * layers}


_ATTENTION = "model.layers.*.self_attn"

HUNYUAN_V1_DENSE = Family(
    model_type="hunyuan_v1_dense",
    architecture="HunYuanDenseV1ForCausalLM",
    models="Hunyuan (dense)",
    differences="norms of heads after the rotation",
    called_out="rotation and norm",
    read=_read,
    defaults={"eos_token_id": 2, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    rope_keys=("alpha",),
    tensors={
        **SPLIT_NAMES,
        f"{_ATTENTION}.q_norm": (f"{_ATTENTION}.query_layernorm",),
        f"{_ATTENTION}.k_norm": (f"{_ATTENTION}.key_layernorm",),
    },
)
