"""Adapters for step programs: their matrices in packed panels, and the table of all adapters.

For each matrix of a model that adapters may change, an adapter has low-rank matrices (LoRA; Hu et al., 2021), a factor
per output (DoRA; Liu et al., 2024), a whole new weight, a change of the bias, or several of these.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels.cpu.library import EmbeddingStruct, LowRankStruct, Memory, Program
from chairlift.kernels.cpu.packing import (
    PANEL,
    KeptRows,
    PackedWeight,
    packed_bytes,
    packed_columns,
    padded_outputs,
)

__all__ = ["EmbeddingTable", "LowRankPart", "LowRankTable", "MatrixChange", "MatrixSite", "PackedAdapter"]

_SPARE = 16
"""Number of unused elements between two rows of scratch memory. Without them, the rows would share a few sets of the
cache."""

_PAIR = 2
"""Number of rank dimensions that the bf16 kernels multiply at once. Each range of the rank begins and ends at a
multiple of it."""


class LowRankPart(NamedTuple):
    """Low-rank matrices of a linear layer: ``x @ a.T @ b.T`` is added to the outputs of the layer from ``start`` on."""

    start: int
    a: Tensor
    """Matrix A of the low-rank product, [r, in]."""
    b: Tensor
    """Matrix B of the low-rank product, [rows, r]. It changes ``rows`` outputs of the layer."""


class MatrixSite(NamedTuple):
    """A matrix of a model that adapters may change."""

    site: int
    """1 + column of the table of adapters."""
    out_features: int
    """Number of outputs that this process computes."""
    in_features: int
    interleaved: bool = False
    """Whether gates and values alternate in the packed panels, as in a PackedMatrix."""
    kept: KeptRows | None = None
    """Outputs that this process computes, if other processes compute the others."""
    plain: bool = False
    """Whether the kernels read the matrix as plain rows (routers) instead of packed panels."""


class MatrixChange(NamedTuple):
    """Change of one matrix by one adapter. The result, before the bias, becomes ``gains * (x @ w.T + the low-rank
    terms) + offsets``, where ``w`` is ``whole`` or the model's own weight. If several processes share the matrix, the
    low-rank parts are those of all outputs; everything else has the outputs of this process only."""

    parts: Sequence[LowRankPart] = ()
    whole: Tensor | None = None
    """New weight [out, in] of any float dtype; None: the model's own."""
    gains: Tensor | None = None
    """float32 [out]; None: 1."""
    offsets: Tensor | None = None
    """float32 [out]; None: 0."""


class EmbeddingTable(NamedTuple):
    """Change of the token embedding [V, D] by one adapter."""

    table: Tensor | None = None
    """New embeddings [V, D]; None: the model's own."""
    token_ids: Tensor | None = None
    """int64 [n]: tokens whose embeddings are ``rows``."""
    rows: Tensor | None = None
    """[n, D]."""
    a: Tensor | None = None
    """float32 [V, r]; None: no low-rank term. Otherwise ``a[token] @ b`` is added."""
    b: Tensor | None = None
    """float32 [r, D]."""


class PackedAdapter:
    """An adapter's matrices in packed panels of ``dtype``. ``changes`` maps name of a matrix -> its change, ``sites``
    name -> the matrix. ``vocab`` is the number of rows of the token embedding.

    The constructor reads no changing state, so any thread may call it. Raises ValueError for parts that do not fit, and
    errors of :class:`~chairlift.kernels.cpu.library.Memory`.
    """

    def __init__(
        self,
        changes: Mapping[str, MatrixChange],
        sites: Mapping[str, MatrixSite],
        dtype: torch.dtype,
        embedding: EmbeddingTable | None = None,
        vocab: int = 0,
    ) -> None:
        self._dtype = dtype
        sizes = {name: _sizes(change, sites[name], dtype) for name, change in changes.items()}
        self.nbytes = sum(map(sum, sizes.values()))
        """Size in bytes of all matrices of the adapter."""
        self._memory = Memory(max(self.nbytes, 1))
        self._offset = 0
        self._kept: list[Any] = []
        """Objects to which structs point. The list keeps the objects alive."""
        self.structs: dict[int, LowRankStruct] = {}
        """1 + column of the table of adapters -> the change."""
        for name, change in changes.items():
            self.structs[sites[name].site] = self._struct(sites[name], change, sizes[name])
        self.embedding = None if embedding is None else self._embedding(embedding, vocab)
        """Change of the token embedding; None if there is none."""

    def _struct(self, site: MatrixSite, change: MatrixChange, sizes: Sequence[int]) -> LowRankStruct:
        struct = LowRankStruct(used=1)
        if site.plain:
            if change.whole is None:
                raise InvariantError("the change of a matrix in plain rows must be a whole matrix")
            rows = torch.zeros(site.out_features, _padded(site.in_features), dtype=self._dtype)
            rows[:, : site.in_features] = change.whole
            struct.whole = self._keep(rows)
            return struct
        shape = {"interleaved": site.interleaved}
        if change.parts:
            rank = sum(len(part.a) for part in change.parts)
            a = PackedWeight(rank, site.in_features, self._dtype, memory=self._part(sizes[0]))
            b = PackedWeight(site.out_features, rank, self._dtype, memory=self._part(sizes[1]), **shape)
            slices = _fill(a, b, change.parts, site.kept)
            self._kept += [a, b, slices]
            struct.a, struct.b, struct.slices = a.memory.address, b.memory.address, slices.ctypes.data
            struct.rank = -(-rank // PANEL) * PANEL
        if change.whole is not None:
            memory = self._part(sizes[2])
            whole = PackedWeight(site.out_features, site.in_features, self._dtype, memory=memory, **shape)
            whole.pack_rows(change.whole, 0)
            self._kept.append(whole)
            struct.whole = whole.memory.address
        struct.gains, struct.offsets = (self._vector(site, each) for each in (change.gains, change.offsets))
        return struct

    def _vector(self, site: MatrixSite, values: Tensor | None) -> int | None:
        """Address of a value for each output, in the order of the packed columns; None without values."""
        if values is None:
            return None
        packed = torch.zeros(padded_outputs(site.out_features, site.interleaved))
        packed[packed_columns(site.out_features, site.interleaved)] = values
        return self._keep(packed)

    def _part(self, size: int) -> Memory:
        memory = self._memory.part(self._offset, size)
        self._offset += size
        return memory

    def _embedding(self, given: EmbeddingTable, vocab: int) -> EmbeddingStruct:
        struct = EmbeddingStruct()
        if given.table is not None:
            struct.table = self._keep(given.table.to(self._dtype).contiguous())
        if given.rows is not None and given.token_ids is not None:
            index = torch.full((vocab,), -1, dtype=torch.int32)
            index[given.token_ids] = torch.arange(len(given.token_ids), dtype=torch.int32)
            struct.index = self._keep(index)
            struct.rows = self._keep(given.rows.to(self._dtype).contiguous())
        if given.a is not None and given.b is not None:
            b = torch.zeros(len(given.b), _padded(given.b.shape[1]))
            b[:, : given.b.shape[1]] = given.b
            struct.a = self._keep(given.a.contiguous())
            struct.b = self._keep(b)
            struct.rank = len(given.b)
        return struct

    def _keep(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        self.nbytes += tensor.nbytes
        return tensor.data_ptr()


def _sizes(change: MatrixChange, site: MatrixSite, dtype: torch.dtype) -> tuple[int, int, int]:
    """Bytes of A, B and the whole weight in packed panels."""
    if site.plain:
        return 0, 0, 0
    rank = sum(len(part.a) for part in change.parts)
    a = b = whole = 0
    if rank:
        a = packed_bytes(rank, site.in_features, dtype)
        b = packed_bytes(site.out_features, rank, dtype, interleaved=site.interleaved)
    if change.whole is not None:
        whole = packed_bytes(site.out_features, site.in_features, dtype, interleaved=site.interleaved)
    return a, b, whole


def _padded(count: int) -> int:
    return -(-count // PANEL) * PANEL


def _fill(
    a: PackedWeight, b: PackedWeight, parts: Sequence[LowRankPart], kept: KeptRows | None
) -> npt.NDArray[np.int32]:
    """Write the parts of one linear layer into ``a`` and ``b``, which has the ``kept`` outputs. Returns int32
    [panels, 2]: for each panel of outputs, (first rank dimension that has nonzero values, number of such
    dimensions)."""
    own = b.columns().numpy() // PANEL
    panels = own if kept is None else np.full(kept.whole, -1)
    if kept is not None:
        panels[kept.of(torch.arange(kept.whole)).numpy()] = own
    whole = torch.zeros(len(panels), b.k)
    begin = np.full(b.panels, np.iinfo(np.int32).max, dtype=np.int64)
    end = np.zeros(b.panels, dtype=np.int64)
    at = 0
    for part in parts:
        rank = len(part.a)
        rows = slice(part.start, part.start + len(part.b))
        a.pack_rows(part.a, at)
        whole[rows, at : at + rank] = part.b
        touched = np.unique(panels[rows])
        touched = touched[touched >= 0]
        begin[touched] = np.minimum(begin[touched], at // _PAIR * _PAIR)
        end[touched] = np.maximum(end[touched], -(-(at + rank) // _PAIR) * _PAIR)
        at += rank
    b.pack_rows(whole if kept is None else kept.of(whole), 0)
    begin = np.minimum(begin, end)
    return np.ascontiguousarray(np.stack((begin, end - begin), axis=1).astype(np.int32))


class LowRankTable:
    """All loaded adapters of a step program, by the caller's adapter numbers. Only one thread may use it."""

    def __init__(self, num_sites: int, num_adapters: int, max_rank: int, max_tokens: int) -> None:
        self.num_sites = num_sites
        self._entries = (LowRankStruct * (num_sites * num_adapters))()
        self._embeddings = (EmbeddingStruct * num_adapters)()
        self._free = list(range(num_adapters - 1, -1, -1))
        self._loaded: dict[int, tuple[int, PackedAdapter]] = {}
        self.stride = -(-max_rank // PANEL) * PANEL + _SPARE
        """Distance between two rows of scratch memory for low-rank products, in elements."""
        self._rows = Memory(4 * self.stride * max_tokens)

    def point(self, program: Program) -> None:
        """Make a program read this table. The table must outlive the program."""
        program.lora = ctypes.addressof(self._entries)
        program.num_sites = self.num_sites
        program.lora_rows = self._rows.address
        program.lora_stride = self.stride
        program.embeddings = ctypes.addressof(self._embeddings)

    def put(self, adapter_id: int, adapter: PackedAdapter) -> None:
        """Add an adapter to the table. Raises InvariantError if its number is in use, or if the table is full."""
        if adapter_id in self._loaded or not self._free:
            raise InvariantError(f"adapter {adapter_id} is in the table already, or the table is full")
        row = self._free.pop()
        for site, struct in adapter.structs.items():
            self._entries[row * self.num_sites + site - 1] = struct
        if adapter.embedding is not None:
            self._embeddings[row] = adapter.embedding
        self._loaded[adapter_id] = row, adapter

    def drop(self, adapter_id: int) -> None:
        """Remove an adapter from the table. No later step may use it."""
        row, adapter = self._loaded.pop(adapter_id)
        for site in adapter.structs:
            self._entries[row * self.num_sites + site - 1] = LowRankStruct()
        self._embeddings[row] = EmbeddingStruct()
        self._free.append(row)

    def rows_of(self, adapter_ids: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        """Table row of each token's adapter [T]. ``adapter_ids`` [T] are adapter numbers, 0 for no adapter. Raises
        InvariantError for a number that is not in the table."""
        rows = np.full(len(adapter_ids), -1, dtype=np.int32)
        for adapter_id in np.unique(adapter_ids).tolist():
            if adapter_id:
                if adapter_id not in self._loaded:
                    raise InvariantError(f"a step has adapter {adapter_id}, which is not in memory")
                rows[adapter_ids == adapter_id] = self._loaded[adapter_id][0]
        return rows
