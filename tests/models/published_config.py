"""Creates a ``config.json`` with small sizes from the keys that published models have."""

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
    """``config.json`` of the architecture ``name``. If several parts have the same key, the last one takes
    precedence."""
    found = {**_SIZES, **_USUAL, "model_type": model_type, "architectures": [name], "torch_dtype": dtype}
    for part in (*parts, more):
        found |= part
    return {key: value for key, value in found.items() if value is not ...}
