"""GPT-Neo (Black et al., 2021): GPT-2 with windows in every other layer. Scores are not divided by the root of the head
size."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import MAX_CONTEXT, Family, Fields

__all__ = ["GPT_NEO"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    window = fields.integer("window_size", 1, MAX_CONTEXT)
    windows = {"global": None, "local": window}
    return {
        "intermediate_size": fields.integer(
            "intermediate_size", 1, 2**20, default=4 * fields.integer("hidden_size", 1, 65_536)
        ),
        "layer_scales": (1.0,) * layers,
        "layer_windows": tuple(windows[kind] for kind in _kinds(fields, layers)),
        "learned_positions": True,
        "norm": "layer",
        **dict.fromkeys(("o_bias", "mlp_bias"), True),
    }


def _kinds(fields: Fields, layers: int) -> list[str]:
    """``global`` or ``local`` for each layer. ``attention_types`` is a list of pairs: kinds, and how often they
    repeat."""
    given = fields.get("attention_types")
    problem = f"attention_types must be lists of global and local with counts, for {layers} layers in total"
    found: list[str] = []
    for pair in given if isinstance(given, list) else ():
        good = isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], list) and type(pair[1]) is int
        if not good or not 0 < pair[1] <= layers or not {"global", "local"}.issuperset(map(str, pair[0])):
            fields.fail(f"{problem}, got {given!r:.80}")
        found += list(map(str, pair[0])) * pair[1]
    if len(found) != layers:
        fields.fail(f"{problem}, got {given!r:.80}")
    return found


_OURS = "model.layers.*"
_THEIRS = "transformer.h.*"

GPT_NEO = Family(
    model_type="gpt_neo",
    architecture="GPTNeoForCausalLM",
    models="GPT-Neo, TinyStories",
    differences="as `gpt2`; windows in every other layer; scores are not scaled",
    read=_read,
    defaults={
        "activation_function": "gelu_new",
        "attention_types": [[["global", "local"], 12]],
        "eos_token_id": 50256,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "window_size": 256,
    },
    keys={
        "hidden_act": "activation_function",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "num_key_value_heads": "num_heads",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    activations={"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"},
    rotary=False,
    tensors={
        "model.embed_tokens": ("transformer.wte",),
        "model.embed_positions": ("transformer.wpe",),
        f"{_OURS}.input_layernorm": (f"{_THEIRS}.ln_1",),
        f"{_OURS}.self_attn.qkv_proj": tuple(f"{_THEIRS}.attn.attention.{name}_proj" for name in "qkv"),
        f"{_OURS}.self_attn.o_proj": (f"{_THEIRS}.attn.attention.out_proj",),
        f"{_OURS}.post_attention_layernorm": (f"{_THEIRS}.ln_2",),
        f"{_OURS}.mlp.up_proj": (f"{_THEIRS}.mlp.c_fc",),
        f"{_OURS}.mlp.down_proj": (f"{_THEIRS}.mlp.c_proj",),
        "model.norm": ("transformer.ln_f",),
    },
    ignored_tensors=r"\.attn\.attention\.(masked_)?bias$",
)
