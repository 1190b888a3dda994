"""A weight that a checkpoint does not store as one plain tensor: its rows are made as they are asked for."""

from __future__ import annotations

import abc
from typing import Final

from torch import Tensor

from chairlift.kernels.grouped import GroupedRows, GroupKind, dequantized

__all__ = ["MOST_NUMBERS", "StoredRows"]

MOST_NUMBERS: Final = 1 << 22
"""How many numbers to ask for at a time: 16 MiB once they are float32."""


class StoredRows(abc.ABC):
    """One tensor, read as one in a safetensors file is, piece by piece. One of these is made for each tensor.

    ``rows[first:last]`` has rows ``first`` to ``last`` (excluded): integers in groups of :attr:`kind`, or float32.
    """

    kind: GroupKind | None = None
    """How the numbers are written; None where slices are float32."""

    @abc.abstractmethod
    def get_shape(self) -> list[int]:
        """Outermost first."""

    @abc.abstractmethod
    def __getitem__(self, rows: slice) -> Tensor | GroupedRows: ...

    def __len__(self) -> int:
        return self.get_shape()[0]

    def get_dtype(self) -> str:
        """What it is once it is dequantised."""
        return "F32"

    def get_slice(self, name: str) -> StoredRows:
        """Itself."""
        return self

    def get_tensor(self, name: str) -> Tensor:
        """All of it, float32."""
        return dequantized(self[:])
