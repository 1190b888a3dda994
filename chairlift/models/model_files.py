"""Reads the shape of a network from a Hugging Face directory or a GGUF file. The module does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from chairlift.errors import ConfigError, ModelLoadError
from chairlift.models.fallback.config import TransformersConfig, read_transformers_config
from chairlift.models.formats.gguf.files import is_gguf
from chairlift.models.formats.gguf.reader import GGUFModel
from chairlift.models.formats.gguf_config import gguf_config
from chairlift.models.hf_config import NetworkConfig, read_hf_config, read_hf_files
from chairlift.models.registry import FAMILIES, named_family

__all__ = ["TOKENIZER_FILES", "read_config", "read_network"]

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""Names of the tokenizer's files that a model directory may have."""


def read_config(path: Path) -> NetworkConfig:
    """Read the shape of the model from a directory or a GGUF file.

    Raises :class:`~chairlift.errors.ModelLoadError` when a file is missing or damaged, or needs an unsupported feature.
    """
    return gguf_config(GGUFModel(path)) if is_gguf(path) else read_hf_config(path)


def read_network(path: Path, model_impl: str) -> NetworkConfig | TransformersConfig:
    """Read the shape of the model for the implementation that the setting ``model_impl`` selects.

    ``auto`` selects the native implementation if the registry knows the family. A model that its native family refuses
    is not tried with transformers. Raises :class:`~chairlift.errors.ModelLoadError`, and
    :class:`~chairlift.errors.ConfigError` for a family of ``model_impl`` that cannot be used for this model.
    """
    family = named_family(model_impl)
    if family is not None:
        network = read_config(path)
        if network.model_type != family.model_type:
            raise ConfigError(
                f"model_impl {model_impl!r} is for model_type {family.model_type!r}, and {path} has"
                f" {network.model_type!r}; leave model_impl out, or choose another model"
            )
        return network
    if is_gguf(path):
        if model_impl == "transformers":
            raise ModelLoadError(f"model_impl is 'transformers', but {path} is a GGUF file; use model_impl='native'")
        return read_config(path)
    if model_impl == "native":
        return read_config(path)
    if model_impl == "auto":
        model_type = read_hf_files(path)[0].get("model_type")
        if isinstance(model_type, str) and model_type in FAMILIES:
            return read_config(path)
    return read_transformers_config(path)
