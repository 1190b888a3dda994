"""Adapters in memory for a model that PyTorch runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from chairlift.kernels.cpu.low_rank import LowRankPart, MatrixChange
from chairlift.kernels.experts import ExpertChange
from chairlift.lora.adapter import Adapter, EmbeddingChange
from chairlift.lora.bank import plain_own
from chairlift.lora.effects import Own, change_of, depends_on_weights, with_tied_rows
from chairlift.lora.held import AdapterBank, Held, check_finite
from chairlift.lora.reader import read_adapter
from chairlift.lora.sites import HEAD, ExpertSites, member_of, sites_of
from chairlift.models.causal_lm import CausalLM
from chairlift.models.layers.experts import MixtureOfExperts
from chairlift.models.layers.linear import Linear

__all__ = ["TorchAdapters", "own_of"]


class TorchAdapters(AdapterBank):
    """Adapters for a model that PyTorch runs. :meth:`begin` sets the adapter of each token before a step."""

    def __init__(self, model: CausalLM, dtype: torch.dtype, device: torch.device, *, max_rank: int) -> None:
        super().__init__()
        self._sites = sites_of(model)
        self._model = model
        self._place: dict[str, Any] = {"dtype": dtype, "device": device}
        self._max_rank = max_rank
        self._tokens: list[tuple[int, Tensor]] = []
        self._own: dict[str, Own] = {}
        self._layers: dict[str, _AdaptedLayer] = {}
        for name in (*self._sites.layers, HEAD):
            layer = model.get_submodule(name)
            if isinstance(layer, Linear):
                layer.adapted = self._layers[name] = _AdaptedLayer(self, layer)
                self._own[name] = own_of(layer, dtype, device)
        self._embedding = model.model.embed_tokens.adapted = _AdaptedEmbedding(self)
        self._experts: list[_AdaptedExperts] = []
        for sites in self._sites.experts.values():
            module = model.get_submodule(sites.router.rpartition(".")[0])
            if isinstance(module, MixtureOfExperts):
                module.adapted = adapted = _AdaptedExperts(self, sites)
                self._experts.append(adapted)
                self._own |= _own_of_experts(module, sites)

    @property
    def tokens(self) -> list[tuple[int, Tensor]]:
        """One (adapter number, int64 indices of its tokens in the flat batch) for each adapter that the current step
        uses."""
        return self._tokens

    def begin(self, adapters: npt.NDArray[np.int32] | None) -> None:
        """Set the adapter number of each token [T] in the next step (0: no adapter), or of each row of the output head.
        None: no token has an adapter."""
        self._tokens = []
        for adapter_id in () if adapters is None else np.unique(adapters).tolist():
            if adapter_id:
                places = torch.from_numpy(np.flatnonzero(adapters == adapter_id))
                self._tokens.append((adapter_id, places.to(self._place["device"])))

    def read(self, path: Path, root: Path | None) -> Held:
        """Read the adapter in a directory, for :meth:`put`. Any thread may call this. Raises ModelLoadError."""
        adapter = read_adapter(path, self._sites, max_rank=self._max_rank, root=root)
        check_finite(adapter, self._place["dtype"], path)
        return self.hold(adapter)

    def hold(self, adapter: Adapter) -> Held:
        version = self._version
        given = with_tied_rows(adapter, self._own[HEAD]) if self._sites.tied else adapter
        changes = {name: self._placed(change_of(given, name, self._own[name])) for name in given.names}
        plain = {name for name, own in self._own.items() if own.plain}
        source = adapter if depends_on_weights(given, plain) else None
        nbytes = given.numbers * self._place["dtype"].itemsize
        return Held(adapter.digest, adapter.rank, nbytes, (changes, self._placed_embedding(given)), source, version)

    def _placed(self, change: MatrixChange) -> MatrixChange:
        """The change on the model's device, in the model's dtype."""
        place = self._place
        parts = [LowRankPart(part.start, part.a.to(**place), part.b.to(**place)) for part in change.parts]
        others = (None if each is None else each.to(**place) for each in change[1:])
        return MatrixChange(parts, *others)

    def _placed_embedding(self, adapter: Adapter) -> EmbeddingChange | None:
        change = adapter.embedding
        if change is None:
            return None
        values = (change.table, change.rows, change.a, change.b)
        table, rows, a, b = (None if each is None else each.to(**self._place) for each in values)
        ids = None if change.token_ids is None else change.token_ids.to(self._place["device"])
        return EmbeddingChange(table, ids, rows, a, b)

    def _add(self, adapter_id: int, held: Any) -> None:
        changes, embedding = held
        for name, layer in self._layers.items():
            if name in changes:
                layer.changes[adapter_id] = changes[name]
        for experts in self._experts:
            experts.put(adapter_id, changes)
        if embedding is not None:
            self._embedding.changes[adapter_id] = embedding

    def _remove(self, adapter_id: int) -> None:
        for layer in self._layers.values():
            layer.changes.pop(adapter_id, None)
        for experts in self._experts:
            experts.changes.pop(adapter_id, None)
        self._embedding.changes.pop(adapter_id, None)


class _AdaptedLayer:
    """Changes the result of one layer as the adapters in use say."""

    def __init__(self, bank: TorchAdapters, layer: Linear) -> None:
        self.bank = bank
        self._layer = layer
        self.changes: dict[int, MatrixChange] = {}

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        for adapter_id, places in self.bank.tokens:
            change = self.changes.get(adapter_id)
            if change is not None:
                out[places] = _changed(change, x[places], out[places], self._layer.bias)
        return out


def _changed(change: MatrixChange, x: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
    """Result of a layer for rows ``x`` with a change. ``out`` is the result of the model's own weight and ``bias``."""
    without_bias = change.whole is not None or change.gains is not None
    if change.whole is not None:
        out = functional.linear(x, change.whole)
    elif change.gains is not None and bias is not None:
        out = out - bias
    for start, a, b in change.parts:
        out[:, start : start + len(b)] += functional.linear(functional.linear(x, a), b)
    out = out if change.gains is None else out * change.gains
    out = out if change.offsets is None else out + change.offsets
    return out + bias if without_bias and bias is not None else out


class _AdaptedEmbedding:
    """Changes the embeddings of tokens as the adapters in use say."""

    def __init__(self, bank: TorchAdapters) -> None:
        self.bank = bank
        self.changes: dict[int, EmbeddingChange] = {}

    def __call__(self, token_ids: Tensor, out: Tensor) -> Tensor:
        for adapter_id, places in self.bank.tokens:
            change = self.changes.get(adapter_id)
            if change is not None:
                out[places] = _embedded(change, token_ids[places], out[places])
        return out


def _embedded(change: EmbeddingChange, token_ids: Tensor, out: Tensor) -> Tensor:
    if change.table is not None:
        out = functional.embedding(token_ids, change.table)
    if change.token_ids is not None and change.rows is not None:
        same = token_ids[:, None] == change.token_ids
        out = torch.where(same.any(1)[:, None], change.rows[same.int().argmax(1)], out)
    if change.a is not None and change.b is not None:
        out = out + change.a[token_ids] @ change.b
    return out


class _AdaptedExperts:
    """The changes of one layer of experts."""

    def __init__(self, bank: TorchAdapters, layer: ExpertSites) -> None:
        self.bank = bank
        self._layer = layer
        self.changes: dict[int, ExpertChange] = {}

    def put(self, adapter_id: int, changes: dict[str, MatrixChange]) -> None:
        """Take the changes of this layer out of those of a whole adapter."""
        layer = self._layer
        if not any(name in changes for name in layer.names):
            return
        first, down = (
            {
                expert: changes[name].parts
                for expert in range(layer.count)
                if (name := member_of(stack, expert)) in changes
            }
            for stack in (layer.first, layer.down)
        )
        router, gate = (changes[name].whole if name in changes else None for name in layer.names[-2:])
        self.changes[adapter_id] = ExpertChange(first, down, router, gate)

    def in_use(self) -> list[tuple[ExpertChange, Tensor]]:
        """(change, indices of its tokens) for each adapter of the step that changes this layer."""
        return [(self.changes[adapter_id], at) for adapter_id, at in self.bank.tokens if adapter_id in self.changes]


def own_of(layer: Linear, dtype: torch.dtype, device: torch.device) -> Own:
    """The weight and bias of a layer in any format on ``device``. ``dtype`` is that of its activations."""

    def weight() -> Tensor:
        with torch.inference_mode():
            if isinstance(layer.weight, Tensor):
                return layer.weight.detach()
            ones = torch.eye(layer.shape.in_features, dtype=dtype, device=device)
            return layer.format.linear(ones, layer.weight, None).t()

    return Own(
        layer.shape.out_features, layer.shape.in_features, weight, lambda: None if layer.bias is None else layer.bias
    )


def _own_of_experts(module: MixtureOfExperts, layer: ExpertSites) -> dict[str, Own]:
    own: dict[str, Own] = {}
    for stack, (outputs, inputs) in zip((layer.first, layer.down), layer.sizes, strict=True):
        own |= {
            member_of(stack, n): Own(outputs, inputs, lambda: torch.empty(0), lambda: None) for n in range(layer.count)
        }
    for name, gate in ((layer.router, module.gate), (layer.shared_gate, module.shared_expert_gate)):
        if gate is not None:
            own[name] = plain_own(gate)
    return own
