"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama with biases on q, k and v."""

from __future__ import annotations

from typing import Any

from chairlift.models.family import MAX_CONTEXT, Family, Fields, layer_windows

__all__ = ["QWEN2", "QWEN2_DEFAULTS", "qwen2_windows"]

QWEN2_DEFAULTS = {
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}


def qwen2_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Per layer, its window; None for full attention. All layers have full attention unless ``use_sliding_window`` is
    true; then layers from ``max_window_layers`` on have a window, or the layers that ``layer_types`` names."""
    window = None
    first = 0
    if fields.boolean("use_sliding_window", False):
        window = fields.optional_integer("sliding_window", 1, MAX_CONTEXT)
    if window is not None and fields.get("layer_types") is None:
        first = fields.integer("max_window_layers", 0, 1_024)
    return layer_windows(fields, layers, window, first)


def _read(fields: Fields, layers: int) -> dict[str, Any]:
    return {"qkv_bias": True, "layer_windows": qwen2_windows(fields, layers)}


QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    models="Qwen2, Qwen2.5, DeepSeek R1 distilled to Qwen",
    differences="biases of q, k and v",
    read=_read,
    defaults=QWEN2_DEFAULTS,
)
