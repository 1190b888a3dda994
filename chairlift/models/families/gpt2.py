"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, GELU, and weights stored as [in, out]."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import Family, Fields

__all__ = ["GPT2"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    hidden = fields.integer("hidden_size", 1, 65_536)
    head_dim = hidden // fields.integer("num_attention_heads", 1, 1_024)
    scale = head_dim**-0.5 if fields.boolean("scale_attn_weights", True) else 1.0
    by_layer = fields.boolean("scale_attn_by_inverse_layer_idx", False)
    return {
        "intermediate_size": fields.integer("intermediate_size", 1, 2**20, default=4 * hidden),
        "layer_scales": tuple(scale / (layer + 1) if by_layer else scale for layer in range(layers)),
        "layer_windows": (None,) * layers,
        "learned_positions": True,
        "norm": "layer",
        **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), True),
    }


_LAYER = "model.layers.*"
_THEIRS = "transformer.h.*"

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    models="GPT-2, Cerebras-GPT",
    differences="learned positions, LayerNorm, GELU",
    read=_read,
    defaults={
        "activation_function": "gelu_new",
        "eos_token_id": 50256,
        "layer_norm_epsilon": 1e-5,
        "n_positions": 1024,
        "tie_word_embeddings": True,
    },
    keys={
        "hidden_act": "activation_function",
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "num_key_value_heads": "n_head",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    activations={"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"},
    rotary=False,
    tensors={
        "model.embed_tokens": ("transformer.wte",),
        "model.embed_positions": ("transformer.wpe",),
        f"{_LAYER}.input_layernorm": (f"{_THEIRS}.ln_1",),
        f"{_LAYER}.self_attn.qkv_proj": (f"{_THEIRS}.attn.c_attn",),
        f"{_LAYER}.self_attn.o_proj": (f"{_THEIRS}.attn.c_proj",),
        f"{_LAYER}.post_attention_layernorm": (f"{_THEIRS}.ln_2",),
        f"{_LAYER}.mlp.up_proj": (f"{_THEIRS}.mlp.c_fc",),
        f"{_LAYER}.mlp.down_proj": (f"{_THEIRS}.mlp.c_proj",),
        "model.norm": ("transformer.ln_f",),
    },
    transposed=("qkv_proj", "o_proj", "up_proj", "down_proj"),
    ignored_tensors=r"\.attn\.(masked_)?bias$",
)
