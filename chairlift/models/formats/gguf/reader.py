"""Reads the header of a GGUF file (llama.cpp's format, versions 2 and 3), and maps its tensors.

A GGUF file is untrusted data. Every length and count is compared with the remaining bytes of the file before memory is
allocated. Reading the header therefore needs at most a small multiple of its own size, and no tensor extends beyond the
file.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from chairlift.base.mistaken_models import check_content
from chairlift.errors import ModelLoadError
from chairlift.models.formats.gguf.blocks import BLOCK_TYPES, OTHER_TYPES, BlockType, Groups
from chairlift.models.formats.gguf.files import parts_of

__all__ = ["GGUFFile", "GGUFModel", "TensorInfo"]

_Order = npt.NDArray[np.intp] | None
_Found = TypeVar("_Found")

_MAGIC: Final = b"GGUF"
_MOST_HEADER: Final = 1 << 28
"""Maximum number of bytes of metadata and tensor descriptions. For comparison: a vocabulary of 262,144 tokens takes 10
MB."""
_MOST_KEYS: Final = 1 << 16
_MOST_ITEMS: Final = 1 << 24
"""Maximum number of items in one array."""
_MOST_NAME: Final = 256
_MOST_SIDE: Final = 1 << 32
_STRING = 8
_ARRAY = 9
_BOOL = 7
_NUMBERS: Final = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


@dataclasses.dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape, type and position of a tensor in its file."""

    name: str
    shape: tuple[int, ...]
    """Sizes of the dimensions, outermost first, as in torch. The file stores the dimensions in reverse order."""
    type: BlockType
    start: int
    """Offset of the tensor's first byte in the file."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, which is a whole number of blocks."""
        return self.shape[-1] // self.type.weights * self.type.bytes

    @property
    def rows(self) -> int:
        """Number of rows: the product of all dimensions but the last."""
        total = 1
        for side in self.shape[:-1]:
            total *= side
        return total

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


class GGUFFile:
    """One memory-mapped file. ``metadata`` maps key -> value, ``tensors`` maps name -> TensorInfo.

    Arrays of numbers are numpy arrays, arrays of strings are lists. Invalid UTF-8 becomes U+FFFD. Raises
    :class:`~chairlift.errors.ModelLoadError` that says what is wrong with the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelLoadError(f"cannot read {path}: {error.strerror or error}") from None
        except ValueError:  # what is empty cannot be mapped
            raise ModelLoadError(f"{path} is empty (0 bytes); download the file again") from None
        self.data: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self._at = 0
        self._end = min(len(self.data), _MOST_HEADER)
        if self._take(4) != _MAGIC:
            check_content(path)
            self.fail("it does not begin with 'GGUF', so it is not a GGUF file")
        (version,) = struct.unpack("<I", self._take(4))
        if version not in (2, 3):
            big_endian = " (or it is big-endian)" if version & 0xFFFF == 0 else ""
            self.fail(f"its version is {version}{big_endian}; versions 2 and 3, little-endian, are read", "convert")
        num_tensors, num_keys = struct.unpack("<QQ", self._take(16))
        self._room_for(num_keys, 13, _MOST_KEYS, "metadata keys")
        self._room_for(num_tensors, 24, _MOST_KEYS, "tensors")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string(_MOST_NAME)
            (kind,) = struct.unpack("<I", self._take(4))
            if key in self.metadata:
                self.fail(f"metadata key {key!r} is there twice")
            self.metadata[key] = self._value(kind, key)
        self.tensors = {info.name: info for info in self._tensor_infos(num_tensors)}

    def fail(self, problem: str, remedy: str = "download") -> NoReturn:
        """Raise ModelLoadError that names this file, the problem and what to do."""
        raise ModelLoadError(f"{self.path}: {problem}; {remedy} the file again")

    def release(self, info: TensorInfo, first_row: int, rows: int) -> None:
        """Release the memory pages of some rows. A later access reads them from the file again."""
        begin = info.start + first_row * info.row_bytes
        low = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (begin + rows * info.row_bytes - low) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0:
            self._map.madvise(mmap.MADV_DONTNEED, low, length)

    def _take(self, count: int) -> bytes:
        if count > self._end - self._at:
            self.fail("its header ends too early, or is too long")
        taken = self._map[self._at : self._at + count]
        self._at += count
        return taken

    def _room_for(self, count: int, least_bytes: int, most: int, what: str) -> None:
        """Raise an error if ``count`` items of at least ``least_bytes`` each do not fit into the rest of the header, or
        are more than ``most``."""
        if count > most or count * least_bytes > self._end - self._at:
            self.fail(f"it claims to have {count} {what}, more than fit into it")

    def _string(self, most: int = _MOST_HEADER) -> str:
        (length,) = struct.unpack("<Q", self._take(8))
        if length > most:
            self.fail(f"a text in its header is said to be {length} bytes long")
        return self._take(length).decode("utf-8", "replace")

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _NUMBERS:
            return struct.unpack(_NUMBERS[kind], self._take(struct.calcsize(_NUMBERS[kind])))[0]
        if kind != _ARRAY:
            self.fail(f"metadata key {key!r} is of unknown type {kind}")
        of, count = struct.unpack("<IQ", self._take(12))
        if of == _STRING:
            self._room_for(count, 8, _MOST_ITEMS, f"texts in {key!r}")
            return [self._string() for _ in range(count)]
        if of not in _NUMBERS:
            self.fail(f"the array {key!r} has items of type {of}, which is not read")
        kind_of = np.dtype(np.uint8 if of == _BOOL else _NUMBERS[of])
        self._room_for(count, kind_of.itemsize, _MOST_ITEMS, f"numbers in {key!r}")
        return np.frombuffer(self._take(count * kind_of.itemsize), dtype=kind_of)

    def _tensor_infos(self, count: int) -> list[TensorInfo]:
        found: list[tuple[str, tuple[int, ...], BlockType, int]] = []
        for _ in range(count):
            name = self._string(_MOST_NAME)
            (dims,) = struct.unpack("<I", self._take(4))
            if not 1 <= dims <= 4:
                self.fail(f"tensor {name!r} has {dims} dimensions; 1 to 4 are allowed")
            shape = struct.unpack(f"<{dims}Q", self._take(8 * dims))[::-1]
            number, offset = struct.unpack("<IQ", self._take(12))
            if number not in BLOCK_TYPES:
                self._refuse_type(name, number)
            kind = BLOCK_TYPES[number]
            if kind.rounded and importlib.util.find_spec("gguf") is None:
                raise ModelLoadError(
                    f"{kind.name}: the values of this block type, which tensor {name!r} of {self.path} has, come from"
                    " the package gguf, which is not installed; pip install 'chairlift[gguf]', or use another"
                    " quantisation of the model, such as Q4_K_M"
                )
            if not all(1 <= side < _MOST_SIDE for side in shape) or shape[-1] % kind.weights:
                self.fail(f"tensor {name!r} has shape {list(shape)}, which {kind.name} cannot have")
            found.append((name, shape, kind, offset))
        if len({name for name, *_ in found}) < len(found):
            self.fail("it has two tensors of one name")
        return self._placed(found)

    def _refuse_type(self, tensor: str, number: int) -> NoReturn:
        known = ", ".join(kind.name for kind in BLOCK_TYPES.values())
        name = OTHER_TYPES.get(number, f"type {number}")
        raise ModelLoadError(
            f"{name}: this block type, which tensor {tensor!r} of {self.path} has, is not read; use another"
            f" quantisation of the model, such as Q4_K_M; known are {known}"
        )

    def _placed(self, found: list[tuple[str, tuple[int, ...], BlockType, int]]) -> list[TensorInfo]:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment % 8:
            self.fail(f"its alignment is {alignment!r}; a multiple of 8 is allowed")
        begin = -(-self._at // alignment) * alignment
        infos = []
        last = begin
        for name, shape, kind, offset in sorted(found, key=lambda entry: entry[3]):
            info = TensorInfo(name, shape, kind, begin + offset)
            if offset % alignment or info.start < last or info.start + info.nbytes > len(self.data):
                self.fail(f"tensor {name!r} lies outside of the file, or over another one")
            last = info.start + info.nbytes
            infos.append(info)
        return infos


class GGUFModel:
    """GGUF files of one model: a single file, or several parts named ``name-00001-of-00003.gguf`` and so on.

    ``metadata`` is that of the first file. Raises :class:`~chairlift.errors.ModelLoadError`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = [GGUFFile(part) for part in parts_of(path)]
        self.metadata: Mapping[str, Any] = self.files[0].metadata
        self._file_of: dict[str, GGUFFile] = {}
        for file in self.files:
            for name in file.tensors:
                if name in self._file_of:
                    file.fail(f"tensor {name!r} is in {self._file_of[name].path.name} already")
                self._file_of[name] = file
        wanted = self.metadata.get("split.tensors.count", len(self._file_of))
        if len(self._file_of) != wanted:
            self.files[0].fail(f"the model was split with {wanted} tensors, but its files have {len(self._file_of)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def info(self, name: str) -> TensorInfo:
        """Shape, type and position of the tensor ``name``."""
        return self._file_of[name].tensors[name]

    def read(self, name: str, first: int, last: int, order: _Order = None) -> npt.NDArray[np.float32]:
        """Rows ``first`` to ``last`` (excluded) as float32 [rows, columns]. With ``order``, row i of the result comes
        from row order[i] of the file. The memory pages are released after reading."""
        return self._read(name, first, last, order, self.info(name).type.dequantize)

    def read_groups(self, name: str, first: int, last: int, order: _Order = None) -> Groups:
        """Rows as in :meth:`read`, but as codes in groups. The tensor's type must be an integer type."""
        return self._read(name, first, last, order, self.info(name).type.groups)

    def _read(self, name: str, first: int, last: int, order: _Order, unpack: Callable[..., _Found]) -> _Found:
        file = self._file_of[name]
        info = self.info(name)
        raw = file.data[info.start : info.start + info.nbytes].reshape(info.rows, info.row_bytes)
        if order is None:
            found = unpack(raw[first:last])
            file.release(info, first, last - first)
            return found
        return unpack(raw[order[first:last]])
