"""The tensors of one quantised layer, and how their integers become rows of the weight."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NoReturn

import torch
from safetensors import SafetensorError
from torch import Tensor

from chairlift.errors import ModelLoadError
from chairlift.kernels.cpu.packing import by_slices
from chairlift.kernels.grouped import GroupedRows, GroupKind, dequantized
from chairlift.models.formats.stored_rows import StoredRows

__all__ = [
    "FLOATS",
    "FloatRows",
    "IntegerRows",
    "IntegerStack",
    "Method",
    "StoredLayer",
    "StoredTensor",
    "group_of_rows",
    "unpacked",
]

FLOATS: Final = ("F32", "F16", "BF16")
"""Dtypes, by safetensors' names, that a tensor of scales may have."""
_Read = Callable[[int, int], Tensor]
"""Function from (first row, row after the last) to the values of these rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method(abc.ABC):
    """A ``quant_method`` of ``config.json`` together with its settings: it reads the weights of quantised layers."""

    marks: frozenset[str]
    """Last parts of names of tensors that only quantised layers have. A layer with such a tensor counts as
    quantised."""
    companions: frozenset[str] = frozenset()
    """Last parts of the names of other tensors that a quantised layer may have."""
    dropped: frozenset[str] = frozenset()
    """Last parts of the names of tensors that are not needed to compute the weight, such as scales of activations.
    :attr:`notes` says so."""
    notes: tuple[str, ...] = ()
    """Settings of the checkpoint that are not followed, one line each."""
    separator: str = "."
    """Separator between a layer's name and the last part of a tensor's name."""
    original: str = ".weight"
    """What the name of the original weight has after the layer's name."""

    def split(self, name: str) -> tuple[str, str]:
        """(layer's name, last part) of a tensor's name."""
        layer, _, ending = name.rpartition(self.separator)
        return layer, ending

    @abc.abstractmethod
    def rows(self, layer: StoredLayer) -> StoredRows:
        """The layer's weight [out, in]. Raises ModelLoadError for tensors that do not fit together."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in an open safetensors file. It is read on demand."""

    name: str
    file: Any
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.read().nbytes

    def bytes_of(self, first: int, last: int) -> Tensor:
        """Copy of the tensor's bytes ``first`` to ``last`` (excluded): uint8 [n]. The file's pages are released."""
        view = self.read().view(torch.uint8).flatten()[first:last]
        found = view.clone()
        by_slices(view, lambda *_: None, mapped=True)
        return found

    def read(self) -> Tensor:
        """The tensor as a view of the memory-mapped file."""
        try:
            tensor: Tensor = self.file.get_tensor(self.name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelLoadError(f"cannot read tensor {self.name}: {error}; download the model again") from None
        return tensor

    def rows(self, first: int, last: int) -> Tensor:
        """Copy of rows ``first`` to ``last`` (excluded). The file's pages are released."""
        view = self.read()[first:last]
        found = _copied(view)
        by_slices(view, lambda *_: None, mapped=True)
        return found

    def columns(self, first: int, last: int) -> Tensor:
        """Copy of columns ``first`` to ``last`` (excluded), transposed: each column becomes a row."""
        whole = self.read()
        found = _copied(whole[:, first:last].t())
        by_slices(whole, lambda *_: None, mapped=True)
        return found


def _copied(view: Tensor) -> Tensor:
    """Copy of a tensor with the usual strides for its shape. ``contiguous`` may keep unusual strides where a side has
    length 1."""
    return view.clone(memory_format=torch.contiguous_format)


@dataclasses.dataclass(frozen=True, slots=True)
class StoredLayer:
    """Tensors of one quantised layer, by the last part of their names."""

    name: str
    where: str
    files: Mapping[str, Any]
    separator: str = "."
    """Separator between the layer's name and the last part of a tensor's name."""

    def __contains__(self, ending: str) -> bool:
        return ending in self.files

    def fail(self, ending: str, problem: str) -> NoReturn:
        """Raise ModelLoadError about the tensor whose name ends with ``ending``."""
        raise ModelLoadError(
            f"{self.where}: tensor {self.name}{self.separator}{ending} {problem}; check that config.json and the"
            " weights belong together, and download the model again"
        )

    def take(self, ending: str, dtypes: Iterable[str], *shapes: tuple[int, ...], rank: int = 2) -> StoredTensor:
        """The tensor whose name ends with ``ending``. It must have one of ``dtypes`` (safetensors' names) and, if
        given, one of ``shapes``."""
        if ending not in self.files:
            self.fail(ending, f"is missing beside {', '.join(sorted(self.files))}")
        name = f"{self.name}{self.separator}{ending}"
        file = self.files[ending]
        view = file.get_slice(name)
        shape = tuple(view.get_shape())
        dtype = view.get_dtype()
        if dtype not in dtypes:
            self.fail(ending, f"is stored as {dtype}, but quantization_config needs {' or '.join(dtypes)}")
        if (shapes and shape not in shapes) or (not shapes and (len(shape) != rank or 0 in shape)):
            needed = " or ".join(str(list(each)) for each in shapes) or f"{rank} dimensions, none of them 0"
            self.fail(ending, f"has shape {list(shape)}, but quantization_config and the other tensors need {needed}")
        return StoredTensor(name, file, shape)


class IntegerRows(StoredRows):
    """A weight that is stored as integers in groups. An element's value is ``scale * (code - zero)``."""

    def __init__(self, shape: tuple[int, int], kind: GroupKind, codes: _Read, scales: _Read, zeros: _Read | None):
        """Create from functions that read rows. ``codes`` returns uint8 [rows, in]; ``scales`` and ``zeros`` return any
        dtype, [rows, groups] or [rows, 1]. Without ``zeros``, the zero point is that of ``kind``."""
        self._shape = shape
        self._kind = kind
        self.kind = kind
        self._codes = codes
        self._scales = scales
        self._zeros = zeros

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, rows: slice) -> GroupedRows:
        first, last, _ = rows.indices(self._shape[0])
        scales = self._groups(self._scales(first, last))
        minimums = None if self._zeros is None else -self._groups(self._zeros(first, last)) * scales
        return GroupedRows(self._kind, self._codes(first, last), scales, minimums)

    def _groups(self, values: Tensor) -> Tensor:
        groups = -(-self._shape[1] // self._kind.group)
        return values.float().expand(len(values), groups).contiguous()


class IntegerStack(IntegerRows):
    """Rows [E out, in] of the weights of experts, as :class:`IntegerRows`. ``original`` is the shape of the tensor in
    the original model: [E, out, in] or [E, in, out]."""

    stacked = True

    def __init__(
        self,
        shape: tuple[int, int],
        original: tuple[int, ...],
        kind: GroupKind,
        codes: _Read,
        scales: _Read,
        zeros: _Read | None,
    ) -> None:
        super().__init__(shape, kind, codes, scales, zeros)
        self._original = original

    def __len__(self) -> int:
        return self._shape[0]

    def get_shape(self) -> list[int]:
        return list(self._original)

    def get_tensor(self, name: str) -> Tensor:
        rows = dequantized(self[:]).view(self._original[0], -1, self._shape[1])
        return rows if list(rows.shape) == self.get_shape() else rows.transpose(1, 2)


class FloatRows(StoredRows):
    """A quantised weight whose rows are converted to float32 when they are read."""

    def __init__(self, shape: tuple[int, int], read: _Read) -> None:
        self._shape = shape
        self._read = read

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def __getitem__(self, rows: slice) -> Tensor:
        first, last, _ = rows.indices(self._shape[0])
        return self._read(first, last)


def group_of_rows(in_features: int) -> int:
    """Group size for a weight with one scale per row. It is the largest supported group, so that the scale is repeated
    least often."""
    return next((group for group in (128, 64) if in_features % group == 0), 32)


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Codes of ``bits`` bits (at most 8) in 32-bit words, lowest bits first, without gaps between words of a row:
    [rows, words] -> uint8 [rows, words * 32 / bits]. Bits behind the last whole code are left out."""
    # torch runs on little-endian machines, and the formats are little-endian. The words are put in one line, because a
    # matrix with one word per row may count as contiguous with any distance between words.
    stream = words.reshape(-1).view(torch.uint8).view(len(words), -1)
    if bits == 8:
        return stream
    if bits == 4:
        return torch.stack([stream & 15, stream >> 4], dim=-1).flatten(1)
    places = torch.arange(8, dtype=torch.uint8)
    single = (stream.unsqueeze(-1) >> places & 1).flatten(1)
    codes = single.shape[1] // bits
    return (single[:, : codes * bits].view(-1, codes, bits) << places[:bits]).sum(-1, dtype=torch.uint8)
