"""GPT-NeoX and Pythia (Black et al., 2022): attention and MLP in parallel, LayerNorm, GELU, a quarter of each head's
dimensions rotated."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import Family, Fields

__all__ = ["GPT_NEOX"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    biased = fields.boolean("attention_bias", True)
    return {
        "qkv_bias": biased,
        "o_bias": biased,
        "mlp_bias": True,
        "norm": "layer",
        "block": "parallel_two" if fields.boolean("use_parallel_residual", True) else "pre",
        "layer_windows": (None,) * layers,
    }


_LAYER = "model.layers.*"
_THEIRS = "gpt_neox.layers.*"

GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    models="GPT-NeoX, Pythia",
    differences="as `phi`; q, k and v head by head on disk",
    read=_read,
    defaults={
        "eos_token_id": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "rotary_emb_base": 1e4,
        "rotary_pct": 0.25,
    },
    keys={
        "num_key_value_heads": "num_attention_heads",
        "partial_rotary_factor": "rotary_pct",
        "rms_norm_eps": "layer_norm_eps",
        "rope_theta": "rotary_emb_base",
    },
    activations={"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh"},
    partial_rotary=True,
    tensors={
        "model.embed_tokens": ("gpt_neox.embed_in",),
        f"{_LAYER}.input_layernorm": (f"{_THEIRS}.input_layernorm",),
        f"{_LAYER}.self_attn.qkv_proj": (f"{_THEIRS}.attention.query_key_value",),
        f"{_LAYER}.self_attn.o_proj": (f"{_THEIRS}.attention.dense",),
        f"{_LAYER}.post_attention_layernorm": (f"{_THEIRS}.post_attention_layernorm",),
        f"{_LAYER}.mlp.up_proj": (f"{_THEIRS}.mlp.dense_h_to_4h",),
        f"{_LAYER}.mlp.down_proj": (f"{_THEIRS}.mlp.dense_4h_to_h",),
        "model.norm": ("gpt_neox.final_layer_norm",),
        "lm_head": ("embed_out",),
    },
    qkv_by_head=True,
    ignored_tensors=r"rotary_emb\.inv_freq|\.attention\.(masked_)?bias$",
)
