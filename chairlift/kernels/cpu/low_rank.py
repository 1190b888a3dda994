"""Adapters for step programs: the low-rank matrices of each linear layer in packed panels, and the table of all
adapters."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.errors import InvariantError
from chairlift.kernels.cpu.library import LowRankStruct, Memory, Program
from chairlift.kernels.cpu.packing import PANEL, PackedMatrix, PackedWeight, packed_bytes

__all__ = ["LowRankPart", "LowRankTable", "PackedAdapter"]

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


class PackedAdapter:
    """An adapter's matrices in packed panels of ``dtype``. ``weights`` maps layer name -> weight of the linear layer
    that the adapter changes.

    The parts of one linear layer (such as q, k and v) are concatenated along the rank. The constructor reads no
    changing state, so any thread may call it. Raises ValueError for parts that do not fit, and errors of
    :class:`~chairlift.kernels.cpu.library.Memory`.
    """

    def __init__(
        self, layers: Mapping[str, Sequence[LowRankPart]], weights: Mapping[str, PackedMatrix], dtype: torch.dtype
    ) -> None:
        ranks = {name: sum(len(part.a) for part in parts) for name, parts in layers.items()}
        sizes: list[int] = []
        for name, rank in ranks.items():
            weight = weights[name]
            sizes.append(packed_bytes(rank, weight.k, dtype))
            sizes.append(packed_bytes(weight.out_features, rank, dtype, interleaved=weight.interleaved))
        self.nbytes = sum(sizes)
        """Size in bytes of all packed panels of the adapter."""
        self._memory = Memory(max(self.nbytes, 1))
        offset = 0
        self.products: dict[int, tuple[PackedWeight, PackedWeight, npt.NDArray[np.int32]]] = {}
        """Number of a layer (``site`` of its weight) -> (packed A, packed B, ``slices`` of ``cl_lora``: the ranks that
        are not zero in each panel of B)."""
        for index, (name, parts) in enumerate(layers.items()):
            weight = weights[name]
            rank = ranks[name]
            first, second = sizes[2 * index], sizes[2 * index + 1]
            a = PackedWeight(rank, weight.k, dtype, memory=self._memory.part(offset, first))
            b = PackedWeight(
                weight.out_features,
                rank,
                dtype,
                interleaved=weight.interleaved,
                memory=self._memory.part(offset + first, second),
            )
            offset += first + second
            self.products[weight.site] = a, b, _fill(a, b, parts)


def _fill(a: PackedWeight, b: PackedWeight, parts: Sequence[LowRankPart]) -> npt.NDArray[np.int32]:
    """Write the parts of one linear layer into ``a`` and ``b``. Returns int32 [panels, 2]: for each panel of outputs,
    (first rank dimension that has nonzero values, number of such dimensions)."""
    panels = b.columns().numpy() // PANEL
    whole = torch.zeros(b.out_features, b.k)
    begin = np.full(b.panels, np.iinfo(np.int32).max, dtype=np.int64)
    end = np.zeros(b.panels, dtype=np.int64)
    at = 0
    for part in parts:
        rank = len(part.a)
        rows = slice(part.start, part.start + len(part.b))
        a.pack_rows(part.a, at)
        whole[rows, at : at + rank] = part.b
        touched = np.unique(panels[rows])
        begin[touched] = np.minimum(begin[touched], at // _PAIR * _PAIR)
        end[touched] = np.maximum(end[touched], -(-(at + rank) // _PAIR) * _PAIR)
        at += rank
    b.pack_rows(whole, 0)
    begin = np.minimum(begin, end)
    return np.ascontiguousarray(np.stack((begin, end - begin), axis=1).astype(np.int32))


class LowRankTable:
    """All loaded adapters of a step program, by the caller's adapter numbers. Only one thread may use it."""

    def __init__(self, num_sites: int, num_adapters: int, max_rank: int, max_tokens: int) -> None:
        self.num_sites = num_sites
        self._entries = (LowRankStruct * (num_sites * num_adapters))()
        self._free = list(range(num_adapters - 1, -1, -1))
        self._loaded: dict[int, tuple[int, PackedAdapter]] = {}
        self._stride = -(-max_rank // PANEL) * PANEL + _SPARE
        self._rows = Memory(4 * self._stride * max_tokens)

    def point(self, program: Program) -> None:
        """Make a program read this table. The table must outlive the program."""
        program.lora = ctypes.addressof(self._entries)
        program.num_sites = self.num_sites
        program.lora_rows = self._rows.address
        program.lora_stride = self._stride

    def put(self, adapter_id: int, adapter: PackedAdapter) -> None:
        """Add an adapter to the table. Raises InvariantError if its number is in use, or if the table is full."""
        if adapter_id in self._loaded or not self._free:
            raise InvariantError(f"adapter {adapter_id} is in the table already, or the table is full")
        row = self._free.pop()
        for site, (a, b, slices) in adapter.products.items():
            rank = -(-a.out_features // PANEL) * PANEL
            entry = LowRankStruct(a.memory.address, b.memory.address, slices.ctypes.data, rank)
            self._entries[row * self.num_sites + site - 1] = entry
        self._loaded[adapter_id] = row, adapter

    def drop(self, adapter_id: int) -> None:
        """Remove an adapter from the table. No later step may use it."""
        row, _ = self._loaded.pop(adapter_id)
        for site in range(self.num_sites):
            self._entries[row * self.num_sites + site] = LowRankStruct()
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
