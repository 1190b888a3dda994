"""Command R7B and Command A (Cohere, 2024): attention and MLP in parallel after one LayerNorm without a bias."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import MAX_CONTEXT, Family, Fields, every_nth, pattern_windows

__all__ = ["COHERE2"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    hidden = fields.integer("hidden_size", 1, 65_536)
    heads = fields.integer("num_attention_heads", 1, 1_024)
    if fields.get("head_dim") not in (None, hidden // heads):
        fields.fail(f"head_dim {fields.get('head_dim')} must be hidden_size / num_attention_heads, {hidden // heads}")
    window = fields.optional_integer("sliding_window", 1, MAX_CONTEXT)
    biased = fields.boolean("attention_bias", False)
    windows = pattern_windows(fields, layers, window, every_nth(fields, layers))
    return {
        "qkv_bias": biased,
        "o_bias": biased,
        "norm": "layer_no_bias",
        "block": "parallel",
        "logit_scale": fields.number("logit_scale", 0.0, 1e6),
        "layer_windows": windows,
        "rope_layers": tuple(each is not None for each in windows),
    }


COHERE2 = Family(
    model_type="cohere2",
    architecture="Cohere2ForCausalLM",
    models="Command R7B, Command A",
    differences="attention and MLP side by side; LayerNorm; factor for logits",
    read=_read,
    defaults={
        "eos_token_id": 255001,
        "hidden_act": "silu",
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    keys={"rms_norm_eps": "layer_norm_eps"},
    own_keys=("logit_scale",),
    interleaved=True,
)
