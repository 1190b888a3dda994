"""OPT (Zhang et al., 2022) and Galactica: learned positions, of which position 0 is row 2, LayerNorm, biases, and relu
or GELU."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import Family, Fields

__all__ = ["OPT"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    hidden = fields.integer("hidden_size", 1, 65_536)
    before = fields.boolean("do_layer_norm_before", True)
    if not fields.boolean("layer_norm_elementwise_affine", True):
        fields.fail("layer_norm_elementwise_affine false is not supported")
    if fields.boolean("_remove_final_layer_norm", False):
        fields.fail("_remove_final_layer_norm true is not supported")
    width = fields.integer("word_embed_proj_dim", 1, 65_536, default=hidden)
    return {
        **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), fields.boolean("enable_bias", True)),
        "embedding_width": None if width == hidden else width,
        "norm": "layer",
        "block": "pre" if before else "post_sum",
        "layer_windows": (None,) * layers,
        "learned_positions": True,
        "first_position_row": 2,
    }


_LAYER = "model.layers.*"
_THEIRS = "model.decoder.layers.*"

OPT = Family(
    model_type="opt",
    architecture="OPTForCausalLM",
    models="OPT, Galactica",
    differences="learned positions, LayerNorm, relu or GELU; norms after the additions (350M)",
    read=_read,
    defaults={
        "activation_function": "relu",
        "eos_token_id": 2,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    keys={
        "hidden_act": "activation_function",
        "intermediate_size": "ffn_dim",
        "num_key_value_heads": "num_attention_heads",
    },
    activations={"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh"},
    rotary=False,
    tensors={
        "model.embed_tokens": ("model.decoder.embed_tokens",),
        "model.embed_positions": ("model.decoder.embed_positions",),
        "model.project_in": ("model.decoder.project_in",),
        "model.project_out": ("model.decoder.project_out",),
        f"{_LAYER}.input_layernorm": (f"{_THEIRS}.self_attn_layer_norm",),
        f"{_LAYER}.self_attn.qkv_proj": tuple(f"{_THEIRS}.self_attn.{name}_proj" for name in "qkv"),
        f"{_LAYER}.self_attn.o_proj": (f"{_THEIRS}.self_attn.out_proj",),
        f"{_LAYER}.post_attention_layernorm": (f"{_THEIRS}.final_layer_norm",),
        f"{_LAYER}.mlp.up_proj": (f"{_THEIRS}.fc1",),
        f"{_LAYER}.mlp.down_proj": (f"{_THEIRS}.fc2",),
        "model.norm": ("model.decoder.final_layer_norm",),
    },
)
