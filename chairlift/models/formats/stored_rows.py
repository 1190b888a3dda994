"""A weight that a checkpoint does not store as one plain tensor. Its rows are computed when they are read."""

from __future__ import annotations

import abc
from typing import Final

import torch
from torch import Tensor

from chairlift.kernels.grouped import GroupedRows, GroupKind, dequantized

__all__ = ["MOST_NUMBERS", "StoredRows", "TransposedStack"]

MOST_NUMBERS: Final = 1 << 22
"""Maximum number of elements that are read at a time: 16 MiB as float32."""


class StoredRows(abc.ABC):
    """One tensor, read piece by piece through the interface of a tensor in a safetensors file.

    ``rows[first:last]`` has rows ``first`` to ``last`` (excluded), with exactly the numbers of the checkpoint: integers
    in groups of :attr:`kind`, or float32.
    """

    kind: GroupKind | None = None
    """Kind of integer groups for layers that keep integers; None if the checkpoint stores floats. Slices are integers
    of this kind, or float32 if the kind cannot represent the stored numbers exactly."""
    stacked: bool = False
    """Whether the rows belong to several weights that are stacked one above the other, or may be read in any order."""

    @abc.abstractmethod
    def get_shape(self) -> list[int]:
        """Shape of the tensor, outermost dimension first."""

    @abc.abstractmethod
    def __getitem__(self, rows: slice) -> Tensor | GroupedRows: ...

    def __len__(self) -> int:
        return self.get_shape()[0]

    def get_dtype(self) -> str:
        """Dtype of the rows after dequantisation, as safetensors names it."""
        return "F32"

    def get_slice(self, name: str) -> StoredRows:
        """Return this object, because it supports slicing itself."""
        return self

    def get_tensor(self, name: str) -> Tensor:
        """The whole tensor as float32."""
        return dequantized(self[:])


class TransposedStack(StoredRows):
    """Rows [E out, in] of a tensor stored as [E, in, out]. They are copied when they are read."""

    stacked = True

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        count, size, each = self._tensor.shape
        return [count * each, size]

    def __getitem__(self, rows: slice) -> Tensor:
        each = self._tensor.shape[2]
        first, last, _ = rows.indices(len(self))
        parts = []
        while first < last:
            member, start = divmod(first, each)
            end = min(each, start + last - first)
            parts.append(self._tensor[member, :, start:end].t())
            first += end - start
        return torch.cat(parts) if parts else self._tensor.new_empty(0, self._tensor.shape[1])
