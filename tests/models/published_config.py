"""A ``config.json`` of small sizes, put together from the keys that published models have."""

from __future__ import annotations

from typing import Any

__all__ = ["config_of"]

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_USUAL: dict[str, Any] = {"attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True}


def config_of(model_type: str, name: str, dtype: str, *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A config of the architecture ``name``; later parts win."""
    found = {**_SIZES, **_USUAL, "model_type": model_type, "architectures": [name], "torch_dtype": dtype}
    for part in (*parts, more):
        found |= part
    return {key: value for key, value in found.items() if value is not ...}
