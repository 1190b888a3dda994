"""Adapters in memory for a model, either in plain torch or for step programs of the native CPU kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.errors import ConfigError, ModelLoadError
from chairlift.kernels.cpu.low_rank import LowRankPart, LowRankTable, PackedAdapter
from chairlift.kernels.cpu.packing import PackedMatrix
from chairlift.lora.reader import Adapter, read_adapter
from chairlift.lora.sites import Sites, sites_of
from chairlift.models.causal_lm import CausalLM
from chairlift.models.layers.linear import Linear

__all__ = ["NativeAdapters", "TorchAdapters"]


class _Held:
    """An adapter as :meth:`TorchAdapters.put` or :meth:`NativeAdapters.put` takes it, with the digest of its files."""

    def __init__(self, adapter: Adapter, held: Any, nbytes: int) -> None:
        self.digest = adapter.digest
        self.rank = adapter.rank
        self.held = held
        self.nbytes = nbytes


def _finite(adapter: Adapter, dtype: torch.dtype, path: Path) -> None:
    """Raise ModelLoadError if a value of the adapter is too large for ``dtype``."""
    for name, parts in adapter.layers.items():
        for part in parts:
            if not all(bool(each.to(dtype).isfinite().all()) for each in (part.a, part.b)):
                raise ModelLoadError(
                    f"{path}: numbers of {name} are too large for {str(dtype).removeprefix('torch.')}; serve the model"
                    " with dtype='float32', or train the adapter again"
                )


class TorchAdapters:
    """Adapters for a model that PyTorch runs. :meth:`begin` sets the adapter of each token before a step."""

    def __init__(self, model: CausalLM, dtype: torch.dtype, device: torch.device, *, max_rank: int) -> None:
        self._sites = sites_of(model)
        self._dtype = dtype
        self._device = device
        self._max_rank = max_rank
        self._tokens: list[tuple[int, Tensor]] = []
        self._layers: dict[str, _AdaptedLayer] = {}
        for name in self._sites.layers:
            layer = model.get_submodule(name)
            if isinstance(layer, Linear):
                layer.adapted = self._layers[name] = _AdaptedLayer(self)

    @property
    def tokens(self) -> list[tuple[int, Tensor]]:
        """One (adapter number, int64 indices of its tokens in the flat batch) for each adapter that the current step
        uses."""
        return self._tokens

    def begin(self, adapters: npt.NDArray[np.int32] | None) -> None:
        """Set the adapter number of each token [T] in the next step (0: no adapter). None: no token has an adapter."""
        self._tokens = []
        for adapter_id in () if adapters is None else np.unique(adapters).tolist():
            if adapter_id:
                places = torch.from_numpy(np.flatnonzero(adapters == adapter_id))
                self._tokens.append((adapter_id, places.to(self._device)))

    def read(self, path: Path, root: Path | None) -> _Held:
        """Read the adapter in a directory, for :meth:`put`. Any thread may call this. Raises ModelLoadError."""
        adapter = read_adapter(path, self._sites, max_rank=self._max_rank, root=root)
        _finite(adapter, self._dtype, path)
        place: dict[str, Any] = {"dtype": self._dtype, "device": self._device}
        held = {
            name: [LowRankPart(part.start, part.a.to(**place), part.b.to(**place)) for part in parts]
            for name, parts in adapter.layers.items()
        }
        return _Held(adapter, held, adapter.numbers * self._dtype.itemsize)

    def put(self, adapter_id: int, adapter: _Held) -> None:
        """Add an adapter under the number ``adapter_id``, which must be above 0. Steps may use it from now on."""
        for name, parts in adapter.held.items():
            self._layers[name].parts[adapter_id] = parts

    def drop(self, adapter_id: int) -> None:
        """Remove the adapter with this number. No later step uses it."""
        for layer in self._layers.values():
            layer.parts.pop(adapter_id, None)


class _AdaptedLayer:
    """Adds the low-rank terms of the adapters in use to the result of one layer."""

    def __init__(self, bank: TorchAdapters) -> None:
        self.bank = bank
        self.parts: dict[int, list[LowRankPart]] = {}

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        for adapter_id, places in self.bank.tokens:
            for start, a, b in self.parts.get(adapter_id, ()):
                added = torch.nn.functional.linear(torch.nn.functional.linear(x[places], a), b)
                out[:, start : start + len(b)].index_add_(0, places, added)
        return out


class NativeAdapters:
    """Adapters for a model whose weights are packed for the native CPU kernels, and whose steps run as a step program.
    Create this object before the program is recorded.

    It has room for ``capacity`` adapters of rank ``max_rank`` or less. Steps have at most ``max_tokens`` tokens.
    """

    def __init__(self, model: CausalLM, dtype: torch.dtype, *, max_rank: int, capacity: int, max_tokens: int) -> None:
        self._sites = sites_of(model)
        self._dtype = dtype
        self._max_rank = max_rank
        self._weights: dict[str, PackedMatrix] = {}
        for site, name in enumerate(self._sites.layers, 1):
            weight = model.get_submodule(name).weight
            if not isinstance(weight, PackedMatrix):
                raise ConfigError(f"{name} is not in the layout of the native kernels; leave enable_lora out")
            weight.site = site
            self._weights[name] = weight
        self.table = LowRankTable(len(self._weights), capacity, _most_parts(self._sites) * max_rank, max_tokens)

    def read(self, path: Path, root: Path | None) -> _Held:
        """Read the adapter in a directory, for :meth:`put`. Any thread may call this. Raises ModelLoadError."""
        adapter = read_adapter(path, self._sites, max_rank=self._max_rank, root=root)
        _finite(adapter, self._dtype, path)
        layers = {name: [LowRankPart(*part_of) for part_of in _parts(adapter, name)] for name in adapter.layers}
        packed = PackedAdapter(layers, self._weights, self._dtype)
        return _Held(adapter, packed, packed.nbytes)

    def put(self, adapter_id: int, adapter: _Held) -> None:
        """Add an adapter under the number ``adapter_id``, which must be above 0. Steps may use it from now on."""
        self.table.put(adapter_id, adapter.held)

    def drop(self, adapter_id: int) -> None:
        """Remove the adapter with this number. No later step uses it."""
        self.table.drop(adapter_id)


def _parts(adapter: Adapter, name: str) -> list[tuple[int, Tensor, Tensor]]:
    return [(part.start, part.a, part.b) for part in adapter.layers[name]]


def _most_parts(sites: Sites) -> int:
    """Maximum number of transformers' modules that are merged into one layer of this package (3 for q, k and v)."""
    names = [part.parameter for part in sites.parts.values()]
    return max(map(names.count, set(names)))
