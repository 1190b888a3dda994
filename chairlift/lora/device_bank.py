"""Adapters in memory for a model on a device whose kernels find them in a pool.

All adapters are in host memory. Those of the running requests are also in the slots of the pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.errors import ModelLoadError
from chairlift.kernels.low_rank_pool import LowRankPool, LowRankSite, PackedSlot, PoolLayout, SiteShape
from chairlift.lora.adapter import Adapter, EmbeddingChange, Replaced
from chairlift.lora.effects import Own, change_of, depends_on_weights
from chairlift.lora.held import AdapterBank, Held, check_finite
from chairlift.lora.kinds import LOW_RANK, VECTORS, kinds_of
from chairlift.lora.pool_slots import CudaQueues, PoolSlots
from chairlift.lora.reader import read_adapter
from chairlift.lora.sites import HEAD, Sites, layer_of, sites_of
from chairlift.lora.torch_bank import own_of
from chairlift.models.causal_lm import CausalLM
from chairlift.models.layers.linear import Linear

__all__ = ["POOL_KINDS", "DeviceAdapters", "pool_layout"]

POOL_KINDS: Final = (LOW_RANK, VECTORS)
"""Kinds of adapters for which a pool has room."""
_REMEDY = "serve it with kernels='torch', or merge it into the model"


class DeviceAdapters(AdapterBank):
    """Adapters for a model on ``device``: ``capacity`` of them may be in the steps at a time, and no rank is larger
    than ``max_rank``.

    ``multiplied`` has the ``id`` of each weight that the kernels multiply with and may add terms to. Other layers are
    not adapted.
    """

    def __init__(
        self,
        model: CausalLM,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_rank: int,
        capacity: int,
        multiplied: Collection[int],
    ) -> None:
        super().__init__()
        self._sites = sites_of(model)
        self._model = model
        self._dtype = dtype
        self._device = device
        self._max_rank = max_rank
        self._own: dict[str, Own] = {}
        weights: dict[str, int] = {}
        for name in (*self._sites.layers, HEAD):
            layer = model.get_submodule(name)
            if isinstance(layer, Linear) and id(layer.weight) in multiplied:
                self._own[name] = own_of(layer, dtype, device)
                weights[name] = id(layer.weight)
        self._layout = pool_layout(self._sites, max_rank, dtype, weights)
        self.pool = LowRankPool(self._layout, capacity, device)
        self.sites: dict[int, LowRankSite] = {weights[name]: site for name, site in self.pool.sites.items()}
        """``id`` of a layer's weight -> the layer's matrices in the pool."""
        self._slots = PoolSlots(capacity, CudaQueues(self.pool), self._packed)
        self.rows: Tensor | None = None
        """int32 [R] on the device, the slots that :meth:`begin` has set; None if no row has an adapter."""

    def begin(self, adapters: npt.NDArray[np.int32] | None) -> None:
        """Set :attr:`rows` for the adapter number of each row [R] (0: no adapter) of what is queued next. None: no row
        has an adapter."""
        slots = None if adapters is None else self.place(adapters)
        self.rows = None if slots is None else torch.from_numpy(slots).to(self._device)

    def place(self, adapters: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Slots of the adapters with these numbers (0: none, whose slot is -1), for work that is queued next. Missing
        adapters are copied first. Raises InvariantError for more adapters than there are slots."""
        numbers, places = np.unique(adapters, return_inverse=True)
        slots = self._slots.place([number for number in numbers.tolist() if number])
        found = np.array([slots.get(number, -1) for number in numbers.tolist()], dtype=np.int32)
        return found[places.reshape(-1)]

    def queued(self) -> None:
        """Note that the work whose adapters were placed is queued."""
        self._slots.queued()

    def read(self, path: Path, root: Path | None) -> Held:
        """Read the adapter in a directory, for :meth:`put`. Any thread may call this. Raises ModelLoadError, also for
        kinds of adapters that the kernels do not compute."""
        adapter = read_adapter(path, self._sites, max_rank=self._max_rank, root=root)
        check_finite(adapter, self._dtype, path)
        try:
            return self.hold(self._without_copies(adapter))
        except ModelLoadError as error:
            raise ModelLoadError(f"{path}: {error}; {_REMEDY}") from None

    def _without_copies(self, adapter: Adapter) -> Adapter:
        """The adapter without weights that equal the model's own. PEFT saves the embedding and the output head beside
        an adapter for one of them."""
        embedding = adapter.embedding
        if embedding is not None and embedding.table is not None:
            own = self._model.model.embed_tokens.weight
            if isinstance(own, Tensor) and self._is_own(embedding.table, own):
                embedding = dataclasses.replace(embedding, table=None)
        if embedding == EmbeddingChange():
            embedding = None
        replaced: dict[str, list[Replaced]] = {}
        for name, parts in adapter.replaced.items():
            weight = self._own[name].weight() if name in self._own else None
            kept = [
                part
                for part in parts
                if part.bias is not None
                or part.weight is None
                or weight is None
                or not self._is_own(part.weight, weight[part.start : part.start + len(part.weight)])
            ]
            replaced |= {name: kept} if kept else {}
        return dataclasses.replace(adapter, embedding=embedding, replaced=replaced)

    def _is_own(self, saved: Tensor, own: Tensor) -> bool:
        return torch.equal(saved.to(own.device, self._dtype), own.to(self._dtype))

    def hold(self, adapter: Adapter) -> Held:
        version = self._version
        if others := [kind for kind in kinds_of(adapter, self._sites) if kind not in POOL_KINDS]:
            raise ModelLoadError(f"it changes {others[0]}, which the GPU's kernels do not")
        for name in adapter.names:
            if name not in self._own:
                raise ModelLoadError(f"it changes {name}, to which the GPU's kernels add no low-rank matrices")
        changes = {name: change_of(adapter, name, self._own[name]) for name in adapter.names}
        packed = self._layout.pack(changes, pinned=self._device.type == "cuda")
        source = adapter if depends_on_weights(adapter, ()) else None
        return Held(adapter.digest, adapter.rank, adapter.numbers * self._dtype.itemsize, packed, source, version)

    def _add(self, adapter_id: int, held: Any) -> None:
        self._slots.load(adapter_id)  # if a slot is free, it is copied at once, beside the steps

    def _remove(self, adapter_id: int) -> None:
        self._slots.drop(adapter_id)

    def _packed(self, adapter_id: int) -> PackedSlot:
        packed: PackedSlot = self._put[adapter_id].held
        return packed


def pool_layout(sites: Sites, max_rank: int, dtype: torch.dtype, names: Collection[str] | None = None) -> PoolLayout:
    """Layout of a pool for the linear layers and the output head of a model; only for those with these ``names``, if
    they are given."""
    starts: dict[str, set[int]] = {}
    for part in (*sites.parts.values(), *sites.more.values()):
        starts.setdefault(layer_of(part), set()).add(part.start)
    shapes = {
        name: SiteShape(outputs, inputs, len(starts[name])) for name, (inputs, outputs) in sites.layers.items()
    } | {HEAD: SiteShape(*sites.vocab, 1)}
    return PoolLayout({name: shapes[name] for name in shapes if names is None or name in names}, max_rank, dtype)
