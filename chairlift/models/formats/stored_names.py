"""Renames the tensors of a checkpoint to the names that most checkpoints of its family use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from chairlift.models.formats.stored_rows import StoredRows

__all__ = ["Renamed", "with_usual_names"]

_STACK = ".mlp.experts."
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Last part of the name of a stack [E, out, in] -> linear layers of an expert whose rows the stack contains, one layer
after the other."""


def with_usual_names(tensors: Mapping[str, Any], other_names: Mapping[str, str], *, experts: bool) -> dict[str, Any]:
    """Tensor name that is usual in the family -> file that holds the tensor.

    ``other_names`` maps prefix of a stored name -> usual prefix. With ``experts``, a stack with the weights of all
    experts is divided into one tensor per expert and projection.
    """
    found: dict[str, Any] = {}
    for stored, file in tensors.items():
        other = next((each for each in other_names if stored.startswith(each)), None)
        name = stored if other is None else other_names[other] + stored.removeprefix(other)
        layer, stack, last = name.partition(_STACK)
        if experts and stack and last in _PARTS:
            found.update(_by_expert(file, stored, f"{layer}{stack}", _PARTS[last]))
        else:
            found[name] = file if name == stored or isinstance(file, StoredRows) else Renamed(file, stored)
    return found


def _by_expert(file: Any, stored: str, prefix: str, parts: tuple[str, ...]) -> dict[str, Any]:
    whole = file.get_slice(stored)
    shape = list(whole.get_shape())
    dtype = whole.get_dtype()
    if len(shape) != 3 or shape[1] % len(parts):
        return {prefix + stored.rpartition(".")[2]: file}  # its name will be reported as unexpected
    rows = shape[1] // len(parts)
    return {
        f"{prefix}{expert}.{part}.weight": _Rows(file, stored, expert, index * rows, [rows, shape[2]], dtype)
        for expert in range(shape[0])
        for index, part in enumerate(parts)
    }


class Renamed:
    """A tensor whose name in the file differs from its usual name."""

    def __init__(self, file: Any, name: str) -> None:
        self._file = file
        self._name = name

    def get_tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(self._name)
        return tensor

    def get_slice(self, name: str) -> Any:
        return self._file.get_slice(self._name)


class _Rows:
    """Rows of one expert in a stack, with the interface of a tensor in a safetensors file."""

    def __init__(self, file: Any, name: str, expert: int, first: int, shape: list[int], dtype: str) -> None:
        self._file = file
        self._name = name
        self._expert = expert
        self._first = first
        self._shape = shape
        self._dtype = dtype

    def get_tensor(self, name: str) -> Tensor:
        rows: Tensor = self._file.get_tensor(self._name)[self._expert, self._first : self._first + self._shape[0]]
        return rows

    def get_slice(self, name: str) -> _Rows:
        return self

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return self._dtype
