"""Checked access to the metadata of a GGUF file. The module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NoReturn

import numpy as np

from chairlift.errors import ModelLoadError
from chairlift.models.formats.gguf.reader import GGUFModel

__all__ = ["GGUFMetadata"]

_MOST_LAYERS: Final = 1_024


class GGUFMetadata:
    """Values in a GGUF file's metadata, by key without the architecture's prefix. Reading a required value that is
    missing raises an error with its name."""

    def __init__(self, model: GGUFModel) -> None:
        self.model = model
        self._prefix = model.metadata["general.architecture"]

    def fail(self, name: str, problem: str) -> NoReturn:
        """Raise ModelLoadError that names the key and the problem."""
        raise ModelLoadError(f"{self.model.path}: {self._prefix}.{name} {problem}; convert the model again")

    def number(self, name: str, default: float | None = None) -> Any:
        """Value of the metadata key ``name``. ``default`` is returned if the key is missing.

        A file may have one value per layer. Zeros, which mean that a layer has no such part, are ignored there; all
        other values must be equal. ``default`` is also returned if all are zeros.
        """
        value = self.model.metadata.get(f"{self._prefix}.{name}", default)
        if isinstance(value, np.ndarray):
            value = value[value != 0] if value.any() else value
            if len(value) == 0 or (value != value[0]).any():
                self.fail(name, "differs between layers, which is not supported")
            value = value[0].item() or default
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            self.fail(name, f"must be a number, got {value!r:.40}")
        return value

    def per_layer(self, name: str) -> bool:
        """Whether the key ``name`` has one value per layer."""
        return isinstance(self.model.metadata.get(f"{self._prefix}.{name}"), np.ndarray)

    def need(self, name: str) -> Any:
        """Value of the key ``name``, which the file must have."""
        value = self.number(name)
        if value is None:
            self.fail(name, "is missing")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Value of the key ``name``, which is true or false."""
        value = self.model.metadata.get(f"{self._prefix}.{name}", default)
        if not isinstance(value, bool):
            self.fail(name, f"must be true or false, got {value!r:.40}")
        return value

    def text(self, name: str, default: str) -> str:
        """Value of the metadata key ``name``, which is a text."""
        value = self.model.metadata.get(f"{self._prefix}.{name}", default)
        if not isinstance(value, str):
            self.fail(name, f"must be a text, got {value!r:.40}")
        return value

    def layers(self) -> int:
        """Number of layers, without those that predict several tokens ahead."""
        count = self.need("block_count")
        ahead = self.number("nextn_predict_layers", 0)
        valid = isinstance(count, int) and isinstance(ahead, int) and 0 <= ahead < count
        if not valid or count > _MOST_LAYERS:
            self.fail("block_count", f"is {count!r:.40}; 1 to {_MOST_LAYERS} layers are supported")
        return int(count - ahead)

    def windowed(self, layers: int, interval: int, *, full_first: bool = False) -> list[str]:
        """Type of each of ``layers`` layers, for ``layer_types``: full or sliding attention, as the key
        ``attention.sliding_window_pattern`` says. Without the key, every ``interval``-th layer has full attention: the
        last of each ``interval`` layers, or the first with ``full_first``."""
        found = self.model.metadata.get(f"{self._prefix}.attention.sliding_window_pattern", interval)
        if isinstance(found, np.ndarray):  # one flag per layer
            if len(found) < layers:
                self.fail("attention.sliding_window_pattern", f"has {len(found)} entries for {layers} layers")
            slides = [bool(each) for each in found[:layers]]
        elif isinstance(found, int) and found >= 0:  # 0: all layers slide; 1: none
            full = 0 if full_first else found - 1
            slides = [not found or layer % found != full for layer in range(layers)]
        else:
            self.fail("attention.sliding_window_pattern", f"must be a number or a list, got {found!r:.40}")
        return ["sliding_attention" if each else "full_attention" for each in slides]

    def granite_factors(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """Granite's factors of scores, embeddings, branches and logits. A missing or zero factor has no effect."""
        return {
            "attention_multiplier": self.number("attention.scale", 0.0) or raw["head_dim"] ** -0.5,
            "embedding_multiplier": self.number("embedding_scale", 0.0) or 1.0,
            "residual_multiplier": self.number("residual_scale", 0.0) or 1.0,
            "logits_scaling": self.number("logit_scale", 0.0) or 1.0,
        }

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor with this name."""
        return tensor in self.model

    def row(self, tensor: str) -> list[float]:
        """Values of the tensor with the name ``tensor``, which must have one dimension."""
        if len(self.shape(tensor)) != 1:
            raise ModelLoadError(f"{self.model.path}: {tensor} must have one dimension; convert the model again")
        return [float(value) for value in self.model.read(tensor, 0, 1)[0]]

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Shape of the tensor with the name ``tensor``, which the file must have."""
        if tensor not in self.model:
            raise ModelLoadError(f"{self.model.path}: tensor {tensor} is missing; download the file again")
        return self.model.info(tensor).shape
