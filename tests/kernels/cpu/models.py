"""Tiny random models whose heads are wide enough for the native kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chairlift.models.random_weights import write_random_model

__all__ = ["FAMILIES", "VOCAB", "tiny_model"]

VOCAB = 131  # not a multiple of any block size
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 48},
    "mistral": {"sliding_window": 24},
}
"""Family -> config fields. They cover features that only one of the families has: biases everywhere, a tied head, norms
on q and k, a window."""


def tiny_model(folder: Path, family: str, *, dtype: str = "float32", seed: int = 0, **more: Any) -> Path:
    """Write a random model of a family. Its weights are so large that every part of the network affects the text.

    A family that is not in :data:`FAMILIES` has its default config fields.
    """
    config = {**_BASE, "model_type": family, **FAMILIES.get(family, {}), **more}
    return write_random_model(folder / family, config, dtype=dtype, seed=seed, std=0.25)
