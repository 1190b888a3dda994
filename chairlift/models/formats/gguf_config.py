"""Converts the metadata of a GGUF file to the ``config.json`` of its original model. The module does not import torch.

A missing key has the value that llama.cpp's loader (``src/llama-model.cpp``) gives it, also where the default of the
original ``config.json`` differs. A key that would change the results, and has no counterpart here, is an error.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final, NoReturn

import numpy as np

from chairlift.errors import ModelLoadError
from chairlift.models.formats.gguf.reader import GGUFModel
from chairlift.models.formats.gguf.special_tokens import end_tokens, special_ids
from chairlift.models.formats.gguf_families import GGUF_FAMILIES, ROPE_FACTORS
from chairlift.models.hf_config import NetworkConfig, parse_config
from chairlift.models.registry import FAMILIES

__all__ = ["FREQUENCY_DIVISORS", "gguf_config", "gguf_config_json"]

FREQUENCY_DIVISORS: Final = "rope_freqs.weight"
"""Name of a tensor with the divisor of each rotary frequency (Llama 3.1 and later)."""
_MOST_LAYERS: Final = 1_024
_ONLY_ZERO: Final = {
    "expert_count": "says that the model has experts, which are not supported",
    "nextn_predict_layers": "says that the last layers predict further tokens, which is not supported",
    "rope.scaling.yarn_log_multiplier": "changes the magnitude of YaRN, which is not supported",
}
"""Key that is supported only if it is missing or 0 -> meaning of other values."""


def gguf_config(model: GGUFModel) -> NetworkConfig:
    """Read a model's shape from GGUF metadata. Raises :class:`~chairlift.errors.ModelLoadError`.

    The dtype is bfloat16 unless all weights are float32. For weights of 8 bits or fewer, bfloat16 loses no relevant
    precision, and float16 has no native kernels.
    """
    architecture = model.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in GGUF_FAMILIES:
        supported = ", ".join(GGUF_FAMILIES)
        raise ModelLoadError(
            f"{model.path}: architecture {architecture!r:.80} is not supported; supported: {supported}"
        )
    metadata = _Metadata(model)
    raw = _as_config_json(metadata, architecture)
    config = parse_config(raw, {"eos_token_id": end_tokens(model.metadata)}, where=str(model.path))
    turned = metadata.number("rope.dimension_count", config.head_dim)
    if turned != config.head_dim and not GGUF_FAMILIES[architecture].partial_rotary:
        metadata.fail("rope.dimension_count", f"is {turned} of {config.head_dim} dimensions, which is not supported")
    if FREQUENCY_DIVISORS in model and config.rope is not None:
        divisors = model.read(FREQUENCY_DIVISORS, 0, 1)[0]
        if len(divisors) != config.head_dim // 2 or not (np.isfinite(divisors) & (divisors > 0)).all():
            raise ModelLoadError(f"{model.path}: {FREQUENCY_DIVISORS} must be {config.head_dim // 2} positive numbers")
        if config.rope.rope_type not in ("default", "linear"):
            metadata.fail("rope.scaling.type", f"is {config.rope.rope_type}, beside a tensor {FREQUENCY_DIVISORS}")
        # Linear scaling divides every frequency by the factor, which is 1 without scaling.
        rope = dataclasses.replace(config.rope, divisors=tuple(float(each) * config.rope.factor for each in divisors))
        config = dataclasses.replace(config, rope=rope)
    return config


def gguf_config_json(model: GGUFModel) -> dict[str, Any]:
    """``config.json`` for a directory that holds the model's weights. :func:`gguf_config` must be able to read the same
    file.

    Raises :class:`~chairlift.errors.ModelLoadError` for a model that ``config.json`` cannot describe.
    """
    if FREQUENCY_DIVISORS in model:
        raise ModelLoadError(
            f"{model.path}: {FREQUENCY_DIVISORS} divides each rotary frequency by a number of its own, which"
            " config.json cannot say; use the original model's safetensors"
        )
    raw = _as_config_json(_Metadata(model), model.metadata["general.architecture"])
    ends = end_tokens(model.metadata)
    first = special_ids(model.metadata).get("bos_token_id")
    found = {"architectures": [FAMILIES[raw["model_type"]].architecture], **raw}
    if ends:
        found["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return found | ({"bos_token_id": first} if isinstance(first, int) else {})


class _Metadata:
    """Numbers in a GGUF file's metadata. Reading a required number that is missing raises an error with its name."""

    def __init__(self, model: GGUFModel) -> None:
        self.model = model
        self._prefix = model.metadata["general.architecture"]

    def fail(self, name: str, problem: str) -> NoReturn:
        """Raise ModelLoadError that names the key and the problem."""
        raise ModelLoadError(f"{self.model.path}: {self._prefix}.{name} {problem}; convert the model again")

    def number(self, name: str, default: float | None = None) -> Any:
        """Value of the metadata key ``name``, which a file may repeat per layer. ``default`` is returned if the key is
        missing."""
        value = self.model.metadata.get(f"{self._prefix}.{name}", default)
        if isinstance(value, np.ndarray):
            if len(value) == 0 or (value != value[0]).any():
                self.fail(name, "differs between layers, which is not supported")
            value = value[0].item()
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            self.fail(name, f"must be a number, got {value!r:.40}")
        return value

    def windowed(self, layers: Any, interval: int) -> list[str]:
        """Type of each layer, as :meth:`~chairlift.models.formats.gguf_families.GGUFMetadata.windowed` says."""
        if not isinstance(layers, int) or not 0 < layers <= _MOST_LAYERS:
            self.fail("block_count", f"is {layers!r:.40}; 1 to {_MOST_LAYERS} layers are supported")
        found = self.model.metadata.get(f"{self._prefix}.attention.sliding_window_pattern", interval)
        if isinstance(found, np.ndarray):  # one flag per layer
            if len(found) < layers:
                self.fail("attention.sliding_window_pattern", f"has {len(found)} entries for {layers} layers")
            slides = [bool(each) for each in found[:layers]]
        elif isinstance(found, int) and found >= 0:  # 0: all layers slide; 1: none
            slides = [not found or layer % found < found - 1 for layer in range(layers)]
        else:
            self.fail("attention.sliding_window_pattern", f"must be a number or a list, got {found!r:.40}")
        return ["sliding_attention" if each else "full_attention" for each in slides]

    def text(self, name: str, default: str) -> str:
        """Value of the metadata key ``name``, which is a text."""
        value = self.model.metadata.get(f"{self._prefix}.{name}", default)
        if not isinstance(value, str):
            self.fail(name, f"must be a text, got {value!r:.40}")
        return value

    def need(self, name: str) -> Any:
        """Value of the metadata key ``name``, which the file must have."""
        value = self.number(name)
        if value is None:
            self.fail(name, "is missing")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.model

    def row(self, tensor: str) -> list[float]:
        """Values of the tensor with the name ``tensor``, which must have one dimension."""
        if len(self.shape(tensor)) != 1:
            raise ModelLoadError(f"{self.model.path}: {tensor} must have one dimension; convert the model again")
        return [float(value) for value in self.model.read(tensor, 0, 1)[0]]

    def shape(self, tensor: str) -> tuple[int, ...]:
        if tensor not in self.model:
            raise ModelLoadError(f"{self.model.path}: tensor {tensor} is missing; download the file again")
        return self.model.info(tensor).shape


def _as_config_json(metadata: _Metadata, architecture: str) -> dict[str, Any]:
    """The ``config.json`` of the original model."""
    model = metadata.model
    family = GGUF_FAMILIES[architecture]
    heads = metadata.need("attention.head_count")
    hidden = metadata.need("embedding_length")
    _refuse_unread(metadata, architecture)
    raw: dict[str, Any] = {
        "model_type": family.model_type,
        "vocab_size": metadata.shape("token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.need("feed_forward_length"),
        "num_hidden_layers": metadata.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.number("attention.head_count_kv", heads),
        "rms_norm_eps": metadata.need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.need("context_length"),
        "tie_word_embeddings": "output.weight" not in model,
        "torch_dtype": "float32" if all(model.info(name).type.name == "F32" for name in model) else "bfloat16",
    }
    if not isinstance(heads, int) or heads < 1:
        metadata.fail("attention.head_count", f"is {heads!r:.40}; it must be a positive number")
    # The original families have other defaults, such as 128 in Qwen3.
    raw["head_dim"] = head_dim = metadata.number("attention.key_length", hidden // heads)
    for key in ("value_length", "key_length_swa", "value_length_swa"):
        if metadata.number(f"attention.{key}", head_dim) != head_dim:
            metadata.fail(f"attention.{key}", f"differs from key_length {head_dim}, which is not supported")
    raw |= _rotary(metadata, longrope=family.long_rope)
    return raw | dict(family.read(metadata, raw))


def _refuse_unread(metadata: _Metadata, architecture: str) -> None:
    """Raise ModelLoadError for keys and tensors that would change the results, and that are not read."""
    family = GGUF_FAMILIES[architecture]
    window = metadata.number("attention.sliding_window", 0)
    if window and not family.windows:
        metadata.fail("attention.sliding_window", f"is {window}: which layers have it, the file does not say")
    for key, meaning in _ONLY_ZERO.items():
        if metadata.number(key, 0):
            metadata.fail(key, meaning)
    if metadata.model.metadata.get(f"{architecture}.attention.causal", True) is not True:
        metadata.fail("attention.causal", "is false: the model reads texts in both directions and generates none")
    turned = metadata.number("rope.dimension_count")
    if metadata.number("rope.dimension_count_swa", turned) != turned:
        metadata.fail("rope.dimension_count_swa", f"differs from dimension_count {turned}, which is not supported")
    if not family.long_rope and any(name in metadata.model for name in ROPE_FACTORS.values()):
        metadata.fail("rope.scaling", "has factors for each frequency (LongRoPE), which is not supported for it")


def _rotary(metadata: _Metadata, *, longrope: bool) -> dict[str, Any]:
    """Keys of the rotation. A file that names a factor without its type scales linearly, as llama.cpp does: old files
    have ``rope.scale_linear`` alone. ``longrope`` says whether the architecture has LongRoPE, whose keys it reads
    itself."""
    found: dict[str, Any] = {"rope_theta": metadata.number("rope.freq_base", 10_000.0)}
    kind = metadata.text("rope.scaling.type", "linear")
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 0.0)) or 1.0
    magnitude = metadata.number("rope.scaling.attn_factor", 1.0)
    if kind not in ("none", "linear", "yarn", *(("longrope",) if longrope else ())):
        metadata.fail("rope.scaling.type", f"{kind!r:.40} is not supported; none, linear and yarn are")
    if kind == "yarn" and factor != 1.0:
        return found | {"rope_scaling": _yarn(metadata, factor, magnitude)}
    if magnitude != 1.0 and not longrope:
        metadata.fail("rope.scaling.attn_factor", f"is {magnitude}, which is supported with the type yarn only")
    if kind == "longrope" and factor != 1.0:
        metadata.fail("rope.scaling.factor", f"is {factor}, beside the type longrope, which is not supported")
    if kind == "linear" and factor != 1.0:
        found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return found


def _yarn(metadata: _Metadata, factor: float, magnitude: float) -> dict[str, Any]:
    """Keys of YaRN. llama.cpp's converter writes the keys that begin with ``yarn_`` where the original model has
    values of its own."""
    found: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    original = metadata.number("rope.scaling.original_context_length")
    if original is not None:
        found["original_max_position_embeddings"] = original
    extrapolation = metadata.number("rope.scaling.yarn_ext_factor", 1.0)
    if extrapolation not in (1.0, -1.0):  # llama.cpp replaces -1 by 1
        metadata.fail("rope.scaling.yarn_ext_factor", f"is {extrapolation}, which is not supported; only 1 is")
    for key in ("beta_fast", "beta_slow"):
        if (beta := metadata.number(f"rope.scaling.yarn_{key}")) is not None:
            found[key] = beta
    attention = metadata.number("rope.scaling.yarn_attn_factor")
    if attention is not None or magnitude != 1.0:
        usual = 1.0 + 0.1 * math.log(factor) if factor > 1.0 else 1.0
        found["attention_factor"] = magnitude * (usual if attention is None else attention)
    return found
