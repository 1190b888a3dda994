"""Falcon 1 and 2 (Almazrouei et al., 2023): attention and MLP in parallel, LayerNorm, GELU, few heads of k and v."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import Family, Fields

__all__ = ["FALCON"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    biased = fields.boolean("bias", False)
    heads = fields.integer("num_attention_heads", 1, 1_024)
    grouped = fields.boolean("new_decoder_architecture", False)
    norms = fields.integer("num_ln_in_parallel_attn", 1, 2, default=2 if grouped else 1)
    parallel = fields.boolean("parallel_attn", True)
    if norms == 2 and not grouped:
        fields.fail("num_ln_in_parallel_attn is 2, which is not supported without new_decoder_architecture")
    if grouped and not parallel:
        fields.fail("parallel_attn is false, which is not supported with new_decoder_architecture")
    if grouped:
        kv_heads = fields.integer("num_key_value_heads", 1, heads, default=heads)
    else:
        kv_heads = 1 if fields.boolean("multi_query", True) else heads
    hidden = fields.integer("hidden_size", 1, 65_536)
    return {
        "intermediate_size": fields.integer("intermediate_size", 1, 2**20, default=4 * hidden),
        "num_key_value_heads": kv_heads,
        "qkv_bias": biased,
        "o_bias": biased,
        "mlp_bias": biased,
        "norm": "layer",
        "block": ("parallel_two" if norms == 2 else "parallel") if parallel else "pre",
        "layer_windows": (None,) * layers,
    }


_OURS = "model.layers.*"
_THEIRS = "transformer.h.*"

FALCON = Family(
    model_type="falcon",
    architecture="FalconForCausalLM",
    models="Falcon 7B, 11B, 40B, 180B",
    differences="LayerNorm, GELU; attention and MLP side by side; q, k and v group by group on disk",
    read=_read,
    defaults={
        "activation": "gelu",
        "eos_token_id": 11,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    keys={
        "hidden_act": "activation",
        "intermediate_size": "ffn_hidden_size",
        "num_key_value_heads": "num_kv_heads",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    activations={"gelu": "gelu", "relu": "relu"},
    known_code=("modeling_falcon.FalconForCausalLM",),
    tensors={
        "model.embed_tokens": ("transformer.word_embeddings",),
        f"{_OURS}.input_layernorm": (f"{_THEIRS}.input_layernorm",),
        f"{_OURS}.self_attn.qkv_proj": (f"{_THEIRS}.self_attention.query_key_value",),
        f"{_OURS}.self_attn.o_proj": (f"{_THEIRS}.self_attention.dense",),
        f"{_OURS}.post_attention_layernorm": (f"{_THEIRS}.post_attention_layernorm",),
        f"{_OURS}.mlp.up_proj": (f"{_THEIRS}.mlp.dense_h_to_4h",),
        f"{_OURS}.mlp.down_proj": (f"{_THEIRS}.mlp.dense_4h_to_h",),
        "model.norm": ("transformer.ln_f",),
    },
    block_tensors={
        "parallel_two": {
            f"{_OURS}.input_layernorm": (f"{_THEIRS}.ln_attn",),
            f"{_OURS}.post_attention_layernorm": (f"{_THEIRS}.ln_mlp",),
        }
    },
    qkv_by_head=True,
)
