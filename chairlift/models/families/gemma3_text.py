"""Gemma 3 (Gemma Team, 2025), text only: norms before and after attention and MLP, norms per head of q and k, and
windows in five of six layers."""

from __future__ import annotations

from typing import Any

from chairlift.models.families.gemma import gemma_fields
from chairlift.models.family import MAX_CONTEXT, SPLIT_NAMES, Family, Fields, every_nth, pattern_windows

__all__ = ["GEMMA3_TEXT"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    window = fields.optional_integer("sliding_window", 1, MAX_CONTEXT)
    scale = fields.number("query_pre_attn_scalar", 0.0, 1e6) ** -0.5
    return {
        **gemma_fields(fields),
        "block": "both",
        "qk_norm": "head",
        "layer_scales": (scale,) * layers,
        "layer_windows": pattern_windows(fields, layers, window, every_nth(fields, layers)),
    }


_LAYER = "model.layers.*"

GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    models="Gemma 3 (text)",
    differences="as `gemma`; norms around branches and of heads; windows in five of six layers",
    read=_read,
    defaults={
        "eos_token_id": 1,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 1e4,
        "rope_theta": 1e6,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
    keys={"hidden_act": "hidden_activation"},
    activations={"gelu_pytorch_tanh": "geglu_tanh"},
    # transformers reads attn_logit_softcapping for this family, but does not apply it.
    own_keys=("query_pre_attn_scalar", "attn_logit_softcapping", "use_bidirectional_attention"),
    window_rope=True,
    tensors={
        **SPLIT_NAMES,
        f"{_LAYER}.attention_out_norm": (f"{_LAYER}.post_attention_layernorm",),
        f"{_LAYER}.post_attention_layernorm": (f"{_LAYER}.pre_feedforward_layernorm",),
        f"{_LAYER}.mlp_out_norm": (f"{_LAYER}.post_feedforward_layernorm",),
    },
)
