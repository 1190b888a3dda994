"""Converts the metadata of a GGUF file to the ``config.json`` of its original model. The module does not import
torch."""

from __future__ import annotations

import dataclasses
from typing import Any, Final, NoReturn

import numpy as np

from chairlift.errors import ModelLoadError
from chairlift.gguf.reader import GGUFModel
from chairlift.models.gguf_families import GGUF_FAMILIES, ROPE_FACTORS
from chairlift.models.hf_config import ModelConfig, parse_config
from chairlift.models.registry import FAMILIES

__all__ = ["FREQUENCY_DIVISORS", "gguf_config", "gguf_config_json"]

FREQUENCY_DIVISORS: Final = "rope_freqs.weight"
"""Name of a tensor with the divisor of each rotary frequency (Llama 3.1 and later)."""


def gguf_config(model: GGUFModel) -> ModelConfig:
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
    config = parse_config(raw, {"eos_token_id": _end_tokens(model)}, where=str(model.path))
    turned = metadata.number("rope.dimension_count", config.head_dim)
    if turned != config.head_dim and not GGUF_FAMILIES[architecture].partial_rotary:
        metadata.fail("rope.dimension_count", f"is {turned} of {config.head_dim} dimensions, which is not supported")
    if FREQUENCY_DIVISORS in model and config.rope is not None:
        divisors = model.read(FREQUENCY_DIVISORS, 0, 1)[0]
        if len(divisors) != config.head_dim // 2 or not (np.isfinite(divisors) & (divisors > 0)).all():
            raise ModelLoadError(f"{model.path}: {FREQUENCY_DIVISORS} must be {config.head_dim // 2} positive numbers")
        rope = dataclasses.replace(config.rope, divisors=tuple(map(float, divisors)))
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
    ends, first = _end_tokens(model), model.metadata.get("tokenizer.ggml.bos_token_id")
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
    model, heads, family = metadata.model, metadata.need("attention.head_count"), GGUF_FAMILIES[architecture]
    window = metadata.number("attention.sliding_window", 0)
    if window and not family.windows:
        metadata.fail("attention.sliding_window", f"is {window}: which layers have it, the file does not say")
    raw: dict[str, Any] = {
        "model_type": family.model_type,
        "vocab_size": metadata.shape("token_embd.weight")[0],
        "hidden_size": metadata.need("embedding_length"),
        "intermediate_size": metadata.need("feed_forward_length"),
        "num_hidden_layers": metadata.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.number("attention.head_count_kv", heads),
        "rms_norm_eps": metadata.need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": metadata.need("context_length"),
        "tie_word_embeddings": "output.weight" not in model,
        "torch_dtype": "float32" if all(model.info(name).type.name == "F32" for name in model) else "bfloat16",
    }
    if (head_dim := metadata.number("attention.key_length")) is not None:
        raw["head_dim"] = head_dim
        if metadata.number("attention.value_length", head_dim) != head_dim:
            metadata.fail("attention.value_length", f"differs from key_length {head_dim}, which is not supported")
    if metadata.number("expert_count", 0):
        metadata.fail("expert_count", "says that the model has experts, which are not supported")
    if not family.long_rope and any(name in model for name in ROPE_FACTORS.values()):
        metadata.fail("rope.scaling", "has factors for each frequency (LongRoPE), which is not supported for it")
    return raw | _rotary(metadata) | dict(family.read(metadata, raw))


def _rotary(metadata: _Metadata) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_theta": metadata.number("rope.freq_base", 10_000.0)}
    kind = metadata.model.metadata.get(f"{metadata.model.metadata['general.architecture']}.rope.scaling.type", "none")
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 0.0))
    if kind not in ("none", "linear", "yarn"):
        metadata.fail("rope.scaling.type", f"{kind!r:.40} is not supported; none, linear and yarn are")
    if kind != "none" and factor:
        found["rope_scaling"] = {"rope_type": kind, "factor": factor}
        original = metadata.number("rope.scaling.original_context_length")
        if original is not None and kind == "yarn":
            found["rope_scaling"]["original_max_position_embeddings"] = original
    return found


def _end_tokens(model: GGUFModel) -> list[int]:
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [model.metadata.get(f"tokenizer.ggml.{name}") for name in names]
    return list(dict.fromkeys(token for token in found if isinstance(token, int)))
