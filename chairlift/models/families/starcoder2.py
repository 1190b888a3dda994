"""StarCoder2 (Lozhkov et al., 2024): Mistral with LayerNorm, biases, and GELU without a gate."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import MAX_CONTEXT, SPLIT_NAMES, Family, Fields

__all__ = ["STARCODER2"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    window = fields.optional_integer("sliding_window", 1, MAX_CONTEXT)
    return {
        **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), fields.boolean("use_bias", True)),
        "norm": "layer",
        "layer_windows": (window,) * layers,
    }


_MLP = "model.layers.*.mlp"

STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    models="StarCoder2",
    differences="LayerNorm, GELU, biases",
    read=_read,
    defaults={
        "eos_token_id": 50256,
        "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "norm_epsilon": 1e-5,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    keys={"rms_norm_eps": "norm_epsilon"},
    activations={"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"},
    tensors={**SPLIT_NAMES, f"{_MLP}.up_proj": (f"{_MLP}.c_fc",), f"{_MLP}.down_proj": (f"{_MLP}.c_proj",)},
)
