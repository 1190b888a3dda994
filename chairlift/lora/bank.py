"""Adapters in memory for a model that step programs of the native CPU kernels run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from chairlift.errors import ConfigError, ModelLoadError
from chairlift.kernels.cpu.low_rank import EmbeddingTable, LowRankTable, MatrixSite, PackedAdapter
from chairlift.kernels.cpu.packing import KeptRows, PackedMatrix
from chairlift.lora.adapter import Adapter
from chairlift.lora.effects import Own, change_of, depends_on_weights, with_tied_rows
from chairlift.lora.held import AdapterBank, Held, check_finite
from chairlift.lora.reader import read_adapter
from chairlift.lora.sites import HEAD, Sites, layer_of, member_of, sites_of
from chairlift.models.causal_lm import CausalLM

__all__ = ["NativeAdapters", "plain_own"]


class NativeAdapters(AdapterBank):
    """Adapters for a model whose weights are packed for the native CPU kernels, and whose steps run as a step program.
    Create this object before the program is recorded.

    It has room for ``capacity`` adapters of rank ``max_rank`` or less. Steps have at most ``max_tokens`` tokens.
    """

    def __init__(self, model: CausalLM, dtype: torch.dtype, *, max_rank: int, capacity: int, max_tokens: int) -> None:
        super().__init__()
        self._sites = sites_of(model)
        self._model = model
        self._dtype = dtype
        self._max_rank = max_rank
        self._matrices: dict[str, MatrixSite] = {}
        """Name of a matrix -> its column of the table, and its size."""
        self._own: dict[str, Own] = {}
        self._weights: dict[str, PackedMatrix] = {}
        for name in (*self._sites.layers, HEAD):
            self._add_matrix(name, self._packed(name))
        for layer in self._sites.experts.values():
            self._add_experts(layer.names, layer.first, layer.down, layer.count)
        most = max(_most_parts(self._sites), 2 if self._sites.experts else 1)
        self.table = LowRankTable(len(self._matrices), capacity, most * max_rank, max_tokens)

    def _packed(self, name: str) -> PackedMatrix:
        weight = self._model.get_submodule(name).weight
        if not isinstance(weight, PackedMatrix):
            raise ConfigError(f"{name} is not in the layout of the native kernels; leave enable_lora out")
        return weight

    def _add_matrix(self, name: str, weight: PackedMatrix) -> None:
        weight.site = len(self._matrices) + 1
        kept = weight.kept
        self._matrices[name] = MatrixSite(weight.site, weight.out_features, weight.k, weight.interleaved, kept)
        size = weight.layer_outputs, weight.k
        self._own[name] = Own(*size, lambda: _whole_of(weight.unpack(), kept), lambda: _bias_of(weight), kept=kept)

    def _add_experts(self, names: list[str], first: str, down: str, count: int) -> None:
        """Add the columns of one layer of experts, in the order that the kernels expect."""
        stacks = {name: self._packed(name) for name in (first, down)}
        for name, weight in stacks.items():
            weight.site = len(self._matrices) + 1 + (0 if name == first else count)
        for stack, weight in stacks.items():
            size = weight.layer_outputs // count, weight.k
            kept = None if weight.kept is None else _of_first(weight.kept, count)
            stored = weight.out_features // count
            for expert in range(count):
                name = member_of(stack, expert)
                site = len(self._matrices) + 1
                self._matrices[name] = MatrixSite(site, stored, weight.k, weight.interleaved, kept)
                self._own[name] = Own(*size, weight.unpack, lambda: None, kept=kept)
        for name in names[-2:]:
            own = None if name.endswith(":none") else plain_own(self._model.get_submodule(name))
            size = (1, 1) if own is None else own[:2]
            self._matrices[name] = MatrixSite(len(self._matrices) + 1, *size, plain=True)
            if own is not None:
                self._own[name] = own

    def read(self, path: Path, root: Path | None) -> Held:
        """Read the adapter in a directory, for :meth:`put`. Any thread may call this. Raises ModelLoadError."""
        adapter = read_adapter(path, self._sites, max_rank=self._max_rank, root=root)
        check_finite(adapter, self._dtype, path)
        try:
            return self.hold(adapter)
        except ModelLoadError as error:
            raise ModelLoadError(f"{path}: {error}") from None

    def hold(self, adapter: Adapter) -> Held:
        """Pack an adapter that is in memory, for :meth:`put`. Raises ModelLoadError."""
        version = self._version
        given = with_tied_rows(adapter, self._own[HEAD]) if self._sites.tied else adapter
        changes = {name: change_of(given, name, self._own[name]) for name in given.names}
        packed = PackedAdapter(changes, self._matrices, self._dtype, _table(given), self._sites.vocab[0])
        plain = {name for name, site in self._matrices.items() if site.plain}
        source = adapter if depends_on_weights(given, plain) else None
        return Held(adapter.digest, adapter.rank, packed.nbytes, packed, source, version)

    def _add(self, adapter_id: int, held: Any) -> None:
        self.table.put(adapter_id, held)

    def _remove(self, adapter_id: int) -> None:
        self.table.drop(adapter_id)


def plain_own(router: nn.Module) -> Own:
    """The weight of a router or of a shared expert's gate, which is a plain tensor in every format."""
    weight: Tensor = router.weight  # type: ignore[assignment]
    return Own(weight.shape[0], weight.shape[1], weight.detach, lambda: None, plain=True)


def _bias_of(weight: PackedMatrix) -> Tensor | None:
    return None if weight.bias is None else _whole_of(weight.bias[weight.columns()], weight.kept)


def _whole_of(values: Tensor, kept: KeptRows | None) -> Tensor:
    """``values`` [kept outputs, ...] as [all outputs, ...], with zeros for outputs that other processes compute."""
    if kept is None:
        return values
    whole = values.new_zeros(kept.whole, *values.shape[1:])
    whole[kept.of(torch.arange(kept.whole))] = values
    return whole


def _of_first(kept: KeptRows, count: int) -> KeptRows:
    """The kept outputs of the first of ``count`` weights of a stack, of each of which as many are kept."""
    return KeptRows(kept.whole // count, kept.ranges[: len(kept.ranges) // count])


def _table(adapter: Adapter) -> EmbeddingTable | None:
    change = adapter.embedding
    return None if change is None else EmbeddingTable(change.table, change.token_ids, change.rows, change.a, change.b)


def _most_parts(sites: Sites) -> int:
    """Maximum number of transformers' modules that are merged into one layer of this package (3 for q, k and v)."""
    names = [layer_of(part) for part in sites.parts.values()]
    return max(map(names.count, set(names)))
