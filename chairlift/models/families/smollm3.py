"""SmolLM3 (Hugging Face, 2025): Llama in which every fourth layer has no rotation (NoPE, Kazemnejad et al., 2023)."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import MAX_CONTEXT, Family, Fields, pattern_windows

__all__ = ["SMOLLM3"]


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    biased = fields.boolean("attention_bias", False)
    given = fields.get("no_rope_layers")
    interval = fields.integer("no_rope_layer_interval", 1, 1_024, default=4)
    rotated = [int((layer + 1) % interval != 0) for layer in range(layers)] if given is None else given
    if not isinstance(rotated, list) or len(rotated) != layers or any(each not in (0, 1) for each in rotated):
        fields.fail(f"no_rope_layers must have 0 or 1 (which rotates) for each of {layers} layers, got {given!r:.80}")
    window = None
    if fields.boolean("use_sliding_window", False):
        window = fields.optional_integer("sliding_window", 1, MAX_CONTEXT)
    kinds = ["full_attention" if window is None or turned else "sliding_attention" for turned in rotated]
    return {
        "qkv_bias": biased,
        "o_bias": biased,
        "mlp_bias": fields.boolean("mlp_bias", False),
        "layer_windows": pattern_windows(fields, layers, window, kinds),
        "rope_layers": tuple(bool(turned) for turned in rotated),
    }


SMOLLM3 = Family(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    models="SmolLM3",
    differences="every fourth layer without rotation",
    read=_read,
    defaults={
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
    },
    own_keys=("no_rope_layers",),
)
