"""Properties of GGUF files by architecture: tensor names, and values that the metadata does not contain.

Values that llama.cpp keeps in its code instead of in the file come from its ``src/llama-model.cpp``. The module does
not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

__all__ = ["GGUF_FAMILIES", "ROPE_FACTORS", "GGUFFamily", "Metadata"]

ROPE_FACTORS: Final = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
"""LongRoPE's keys -> the tensors that hold their values: the divisor of each rotary frequency, for long and for short
texts (Phi-3)."""


class Metadata(Protocol):
    """Numbers in the metadata of a GGUF file, by key without the architecture's prefix."""

    def number(self, name: str, default: float | None = None) -> Any:
        """Value of the key ``name``; ``default`` if it is missing."""

    def need(self, name: str) -> Any:
        """Value of the key ``name``, which the file must have."""

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor with this name."""

    def row(self, tensor: str) -> list[float]:
        """Values of the tensor with the name ``tensor``, which must have one dimension."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFamily:
    """How GGUF files with one value of ``general.architecture`` are read."""

    model_type: str
    read: Callable[[Metadata, Mapping[str, Any]], Mapping[str, Any]] = lambda metadata, raw: {}
    """Function from (metadata, keys of ``config.json`` found so far) to the additional keys that only this architecture
    has."""
    layer_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Tensor name within a layer of the GGUF file -> name in Hugging Face's directories, where the latter differs from
    Llama's."""
    pairs: bool = False
    """Whether the file stores the two rows of q or k that are rotated together as neighbours, although the model
    rotates halves of a head."""
    norm_offset: float = 0.0
    """Number that llama.cpp added to the weights of norms when it wrote the file."""
    windows: bool = False
    """Whether the reader knows to which layers the file's ``sliding_window`` applies. If not, a file with this key is
    refused."""
    partial_rotary: bool = False
    """Whether the model may rotate only some of a head's dimensions."""
    long_rope: bool = False
    """Whether the file's LongRoPE divisors are read, from the tensors in :data:`ROPE_FACTORS`."""


def _llama(metadata: Metadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    window = metadata.number("attention.sliding_window", 0)
    biased = {"attention_bias": metadata.has("blk.0.attn_q.bias")}
    return biased | ({"model_type": "mistral", "sliding_window": window} if window else {})


def _gemma(metadata: Metadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"head_dim": metadata.need("attention.key_length")}


def _scored(metadata: Metadata, raw: Mapping[str, Any], largest: int) -> dict[str, Any]:
    """Add the divisor of the attention scores to the keys, because the file does not contain it.

    The divisor is the head width, except in the 27B models, which have ``largest`` layers: there it is the hidden size
    divided by the number of heads.
    """
    found = _gemma(metadata, raw)
    by_hidden = raw["num_hidden_layers"] == largest
    scalar = raw["hidden_size"] // raw["num_attention_heads"] if by_hidden else found["head_dim"]
    return found | {"query_pre_attn_scalar": scalar, "sliding_window": metadata.need("attention.sliding_window")}


def _gemma2(metadata: Metadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    caps = {key: metadata.number(key) for key in ("attn_logit_softcapping", "final_logit_softcapping")}
    return _scored(metadata, raw, 46) | {key: value for key, value in caps.items() if value is not None}


def _gemma3(metadata: Metadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    found = _scored(metadata, raw, 62)
    found["rope_local_base_freq"] = metadata.number("rope.freq_base_swa", 10_000.0)
    if cap := metadata.number("final_logit_softcapping"):
        found["final_logit_softcapping"] = cap  # which the family refuses
    return found


def _phi3(metadata: Metadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    head_dim = raw["hidden_size"] // raw["num_attention_heads"]
    original = metadata.number("rope.scaling.original_context_length", raw["max_position_embeddings"])
    found = {
        "sliding_window": metadata.number("attention.sliding_window", 0) or None,
        "partial_rotary_factor": metadata.number("rope.dimension_count", head_dim) / head_dim,
        "original_max_position_embeddings": original,
    }
    if any(map(metadata.has, ROPE_FACTORS.values())):
        factors: dict[str, Any] = {key: metadata.row(name) for key, name in ROPE_FACTORS.items()}
        attention = metadata.number("rope.scaling.attn_factor")
        factors |= {} if attention is None else {"attention_factor": attention}
        found["rope_scaling"] = {"rope_type": "longrope", **factors}
    return found


_AROUND: Final = {  # norms before and behind attention and MLP
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

GGUF_FAMILIES: Final[Mapping[str, GGUFFamily]] = {
    "llama": GGUFFamily(model_type="llama", read=_llama, pairs=True, windows=True),
    "qwen2": GGUFFamily(model_type="qwen2"),
    "qwen3": GGUFFamily(model_type="qwen3"),
    "gemma": GGUFFamily(model_type="gemma", read=_gemma, norm_offset=1.0),
    "gemma2": GGUFFamily(model_type="gemma2", read=_gemma2, norm_offset=1.0, layer_names=_AROUND, windows=True),
    "gemma3": GGUFFamily(model_type="gemma3_text", read=_gemma3, norm_offset=1.0, layer_names=_AROUND, windows=True),
    "phi3": GGUFFamily(
        model_type="phi3",
        read=_phi3,
        layer_names={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        windows=True,
        partial_rotary=True,
        long_rope=True,
    ),
}
"""Value of ``general.architecture`` -> properties of its files."""
