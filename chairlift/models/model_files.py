"""What network a model's files hold: those of a Hugging Face directory, or a GGUF file. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from chairlift.gguf.files import is_gguf
from chairlift.gguf.reader import GGUFModel
from chairlift.models.gguf_config import gguf_config
from chairlift.models.hf_config import ModelConfig, read_hf_config

__all__ = ["TOKENIZER_FILES", "read_config"]

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
"""What a directory's tokenizer is read from, where the files are there."""


def read_config(path: Path) -> ModelConfig:
    """Read the shape of the model in a directory, or of a GGUF file.

    Raises :class:`~chairlift.errors.ModelLoadError` when a file is missing, damaged or asks for the unsupported.
    """
    return gguf_config(GGUFModel(path)) if is_gguf(path) else read_hf_config(path)
