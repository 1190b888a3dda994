"""Properties of GGUF files by architecture: tensor names, and values that the metadata does not contain.

Values that llama.cpp keeps in its code instead of in the file come from its ``src/llama-model.cpp``. The module does
not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, Protocol

__all__ = ["GGUF_FAMILIES", "ROPE_FACTORS", "GGUFFamily", "GGUFMetadata"]

ROPE_FACTORS: Final = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
"""LongRoPE's keys -> the tensors that hold their values: the divisor of each rotary frequency, for long and for short
texts (Phi-3)."""


class GGUFMetadata(Protocol):
    """Numbers in the metadata of a GGUF file, by key without the architecture's prefix."""

    def number(self, name: str, default: float | None = None) -> Any:
        """Value of the key ``name``; ``default`` if it is missing."""

    def need(self, name: str) -> Any:
        """Value of the key ``name``, which the file must have."""

    def fail(self, name: str, problem: str) -> NoReturn:
        """Raise ModelLoadError that names the key and the problem."""

    def windowed(self, layers: Any, interval: int) -> list[str]:
        """Type of each of ``layers`` layers, for ``layer_types``: full or sliding attention, as the key
        ``attention.sliding_window_pattern`` says. Without the key, every ``interval``-th layer has full attention."""

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor with this name."""

    def row(self, tensor: str) -> list[float]:
        """Values of the tensor with the name ``tensor``, which must have one dimension."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFamily:
    """How GGUF files with one value of ``general.architecture`` are read."""

    model_type: str
    read: Callable[[GGUFMetadata, Mapping[str, Any]], Mapping[str, Any]] = lambda metadata, raw: {}
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


def _llama(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    window = metadata.number("attention.sliding_window", 0)
    biases = {"attention_bias": metadata.has("blk.0.attn_q.bias"), "mlp_bias": metadata.has("blk.0.ffn_gate.bias")}
    return biases | ({"model_type": "mistral", "sliding_window": window} if window else {})


def _qwen3(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    return {"attention_bias": metadata.has("blk.0.attn_q.bias")}


def _scored(raw: Mapping[str, Any], largest: int) -> dict[str, Any]:
    """Key with the divisor of the attention scores, which the file does not contain.

    The divisor is the head width, except in the 27B models, which have ``largest`` layers: there it is the hidden size
    divided by the number of heads.
    """
    by_hidden = raw["num_hidden_layers"] == largest
    return {"query_pre_attn_scalar": raw["hidden_size"] // raw["num_attention_heads"] if by_hidden else raw["head_dim"]}


def _gemma2(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    found = _scored(raw, 46) | {
        "sliding_window": metadata.number("attention.sliding_window", 4096),
        "layer_types": metadata.windowed(raw["num_hidden_layers"], 2),
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }
    if metadata.number("rope.freq_base_swa", raw["rope_theta"]) != raw["rope_theta"]:
        metadata.fail("rope.freq_base_swa", f"differs from freq_base {raw['rope_theta']}, which is not supported")
    return found


def _gemma3(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    found = _scored(raw, 62)
    layers = raw["num_hidden_layers"]
    if window := metadata.number("attention.sliding_window", 0):
        found |= {"sliding_window": window, "layer_types": metadata.windowed(layers, 6)}
    else:  # a file without windows has one kind of layers
        found |= {"sliding_window": None, "layer_types": metadata.windowed(layers, 1)}
    found["rope_local_base_freq"] = metadata.number("rope.freq_base_swa", 10_000.0)
    if cap := metadata.number("final_logit_softcapping"):
        found["final_logit_softcapping"] = cap  # which the family refuses
    return found


def _phi3(metadata: GGUFMetadata, raw: Mapping[str, Any]) -> dict[str, Any]:
    original = metadata.number("rope.scaling.original_context_length", raw["max_position_embeddings"])
    found = {
        "sliding_window": metadata.number("attention.sliding_window", 0) or None,
        "partial_rotary_factor": metadata.number("rope.dimension_count", raw["head_dim"]) / raw["head_dim"],
        "original_max_position_embeddings": original,
    }
    if any(map(metadata.has, ROPE_FACTORS.values())):
        if "rope_scaling" in raw:
            metadata.fail("rope.scaling.factor", "scales a model that has a divisor for each frequency (LongRoPE)")
        factors: dict[str, Any] = {key: metadata.row(name) for key, name in ROPE_FACTORS.items()}
        factors["attention_factor"] = metadata.number("rope.scaling.attn_factor", 1.0)
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
    "qwen3": GGUFFamily(model_type="qwen3", read=_qwen3),
    "gemma": GGUFFamily(model_type="gemma", norm_offset=1.0),
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
