"""Phi-1, Phi-1.5 and Phi-2 (Microsoft, 2023): attention and MLP in parallel after one LayerNorm, biases everywhere,
GELU."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import SPLIT_NAMES, Family, Fields

__all__ = ["PHI"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    return {
        **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "head_bias"), True),
        "norm": "layer",
        "block": "parallel",
        "layer_windows": (None,) * layers,
    }


_LAYER = "model.layers.*"

PHI = Family(
    model_type="phi",
    architecture="PhiForCausalLM",
    models="Phi-1, Phi-1.5, Phi-2",
    differences="as `stablelm`, side by side, GELU, biases",
    read=_read,
    defaults={
        "eos_token_id": 2,
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "partial_rotary_factor": 0.5,
    },
    keys={"rms_norm_eps": "layer_norm_eps"},
    activations={"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"},
    known_code=("modeling_phi.PhiForCausalLM",),
    partial_rotary=True,
    tensors={
        f"{_LAYER}.self_attn.qkv_proj": SPLIT_NAMES[f"{_LAYER}.self_attn.qkv_proj"],
        f"{_LAYER}.self_attn.o_proj": (f"{_LAYER}.self_attn.dense",),
        f"{_LAYER}.mlp.up_proj": (f"{_LAYER}.mlp.fc1",),
        f"{_LAYER}.mlp.down_proj": (f"{_LAYER}.mlp.fc2",),
        "model.norm": ("model.final_layernorm",),
    },
)
