"""EXAONE 3.0 and 3.5 (LG AI Research, 2024): Llama with other names of keys and tensors."""

from __future__ import annotations

from chairlift.models.families.llama import LLAMA
from chairlift.models.family import Family

__all__ = ["EXAONE"]

_OURS = "model.layers.*"
_THEIRS = "transformer.h.*"
_ATTENTION = f"{_THEIRS}.attn.attention"

EXAONE = Family(
    model_type="exaone",
    architecture="ExaoneForCausalLM",
    models="EXAONE 3.0, 3.5, Deep",
    differences="none but names",
    read=LLAMA.read,
    defaults={
        "activation_function": "silu",
        "eos_token_id": 361,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 8,
        "rope_theta": 500_000.0,
    },
    keys={
        "hidden_act": "activation_function",
        "num_hidden_layers": "num_layers",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    either_key=True,
    library_type="llama",
    known_code=("modeling_exaone.ExaoneForCausalLM",),
    tensors={
        "model.embed_tokens": ("transformer.wte",),
        f"{_OURS}.input_layernorm": (f"{_THEIRS}.ln_1",),
        f"{_OURS}.self_attn.qkv_proj": tuple(f"{_ATTENTION}.{name}_proj" for name in "qkv"),
        f"{_OURS}.self_attn.o_proj": (f"{_ATTENTION}.out_proj",),
        f"{_OURS}.post_attention_layernorm": (f"{_THEIRS}.ln_2",),
        f"{_OURS}.mlp.gate_up_proj": (f"{_THEIRS}.mlp.c_fc_0", f"{_THEIRS}.mlp.c_fc_1"),
        f"{_OURS}.mlp.down_proj": (f"{_THEIRS}.mlp.c_proj",),
        "model.norm": ("transformer.ln_f",),
    },
)
