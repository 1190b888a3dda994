"""Reads the shape of a network from a Hugging Face directory or a GGUF file. The module does not import torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

from chairlift.errors import ConfigError, ModelLoadError
from chairlift.models.fallback.config import TransformersConfig, read_transformers_config, reads_key
from chairlift.models.family import NotNative
from chairlift.models.formats.gguf.files import is_gguf
from chairlift.models.formats.gguf.reader import GGUFModel
from chairlift.models.formats.gguf_config import gguf_config
from chairlift.models.formats.gguf_projector import AUTO, NONE, open_projector
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


def read_config(path: Path, mmproj: str = NONE) -> NetworkConfig:
    """Read the shape of the model from a directory or a GGUF file. ``mmproj`` is the setting of that name, which says
    where the image encoder of a GGUF file is.

    Raises :class:`~chairlift.errors.ModelLoadError` when a file is missing or damaged, or needs an unsupported feature.
    """
    if not is_gguf(path):
        return read_hf_config(path)
    model = GGUFModel(path)
    return gguf_config(model, open_projector(model, mmproj)[0])


def read_network(path: Path, model_impl: str, mmproj: str = NONE) -> NetworkConfig | TransformersConfig:
    """Read the shape of the model for the implementation that the setting ``model_impl`` selects. ``mmproj`` is as in
    :func:`read_config`.

    ``auto`` selects the native implementation if the registry knows the family. If ``config.json`` asks for a
    computation that the native family lacks, and transformers' class reads this setting, transformers computes the
    model. A damaged or dangerous file is not tried with transformers. Raises
    :class:`~chairlift.errors.ModelLoadError`, and :class:`~chairlift.errors.ConfigError` for a family of ``model_impl``
    that cannot be used for this model.
    """
    if mmproj not in (AUTO, NONE) and not is_gguf(path):
        raise ModelLoadError(
            f"mmproj is {mmproj!r:.300}, but {path} is not a GGUF file, and has its image encoder in its own files;"
            " leave mmproj out"
        )
    family = named_family(model_impl)
    if family is not None:
        network = read_config(path, mmproj)
        if network.model_type != family.model_type:
            raise ConfigError(
                f"model_impl {model_impl!r} is for model_type {family.model_type!r}, and {path} has"
                f" {network.model_type!r}; leave model_impl out, or choose another model"
            )
        return network
    if is_gguf(path):
        if model_impl == "transformers":
            raise ModelLoadError(f"model_impl is 'transformers', but {path} is a GGUF file; use model_impl='native'")
        return read_config(path, mmproj)
    if model_impl == "native":
        return read_config(path)
    if model_impl == "auto":
        model_type = read_hf_files(path)[0].get("model_type")
        if isinstance(model_type, str) and model_type in FAMILIES:
            try:
                return read_config(path)
            except NotNative as lacking:
                return _instead(path, lacking)
    return read_transformers_config(path)


def _instead(path: Path, lacking: NotNative) -> TransformersConfig:
    """The model as transformers computes it. Raises ``lacking``, the native family's refusal, if it does not."""
    try:
        found = read_transformers_config(path)
    except ModelLoadError:
        raise lacking from None
    if lacking.key is not None and not reads_key(found, lacking.key):
        raise lacking
    return dataclasses.replace(found, lacking=str(lacking).removeprefix(f"{path / 'config.json'}: "))
