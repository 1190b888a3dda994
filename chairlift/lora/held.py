"""What all banks of adapters share: which adapters are in memory, and what happens when weights are replaced."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from chairlift.errors import ModelLoadError
from chairlift.lora.adapter import Adapter

__all__ = ["AdapterBank", "Held", "check_finite"]


class Held(NamedTuple):
    """An adapter as the methods ``put`` take it."""

    digest: str
    """Digest of the adapter's files."""
    rank: int
    """Largest rank of its matrices."""
    nbytes: int
    """Bytes of its matrices in memory."""
    held: Any
    source: Adapter | None = None
    """The adapter as it was read, if a part of ``held`` depends on the model's weights."""
    version: int = 0
    """Number of times that the model's weights had been replaced when ``held`` was made."""


class AdapterBank(ABC):
    """The adapters in memory, by number. A subclass says how they are held, and where steps find them."""

    def __init__(self) -> None:
        self._version = 0
        """Number of times that the model's weights were replaced."""
        self._put: dict[int, Held] = {}

    @abstractmethod
    def hold(self, adapter: Adapter) -> Held:
        """Make an adapter that is in memory ready for :meth:`put`. Raises ModelLoadError."""

    @abstractmethod
    def _add(self, adapter_id: int, held: Any) -> None:
        """Let steps use what :attr:`Held.held` is."""

    @abstractmethod
    def _remove(self, adapter_id: int) -> None:
        """Let no later step use it."""

    def put(self, adapter_id: int, adapter: Held) -> None:
        """Add an adapter under the number ``adapter_id``, which must be above 0. Steps may use it from now on."""
        if adapter.source is not None and adapter.version != self._version:
            adapter = self.hold(adapter.source)
        self._put[adapter_id] = adapter
        self._add(adapter_id, adapter.held)

    def drop(self, adapter_id: int) -> None:
        """Remove the adapter with this number. No later step uses it."""
        self._remove(adapter_id)
        del self._put[adapter_id]

    def weights_replaced(self) -> None:
        """Compute again what depends on the model's weights, which were replaced."""
        self._version += 1
        for adapter_id, adapter in list(self._put.items()):
            if adapter.source is not None:
                self.drop(adapter_id)
                self.put(adapter_id, adapter)


def check_finite(adapter: Adapter, dtype: torch.dtype, path: Path) -> None:
    """Raise ModelLoadError if a value of the adapter is too large for ``dtype``."""
    for name, parts in adapter.layers.items():
        for part in parts:
            if not all(bool(each.to(dtype).isfinite().all()) for each in (part.a, part.b)):
                raise ModelLoadError(
                    f"{path}: numbers of {name} are too large for {str(dtype).removeprefix('torch.')}; serve the model"
                    " with dtype='float32', or train the adapter again"
                )
