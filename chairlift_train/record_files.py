"""Files of records with access by index: JSON lines, JSON arrays, CSV, TSV, Parquet and Hugging Face datasets.

The files can be compressed. Needs NumPy, pyarrow for Parquet and Arrow files, and zstandard for ``.zst`` files (before
Python 3.14).
"""

from __future__ import annotations

import contextlib
import csv
import functools
import glob
import gzip
import importlib
import io
import json
import os
import tempfile
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, cast

import numpy as np
import numpy.typing as npt

from chairlift.errors import ConfigError

__all__ = [
    "ArrayFile",
    "ArrowFile",
    "LineFile",
    "RecordFile",
    "SheetFile",
    "TableFile",
    "decompression_errors",
    "expand",
    "is_compressed",
    "open_bytes",
    "open_file",
    "open_for",
    "parse_line",
]

_CHUNK = 1 << 22
_SAMPLE = 1 << 20
"""Number of bytes at each end of an Arrow file from which its fingerprint is computed."""
_COMPRESSED: Final = (".gz", ".zst")
_LINES: Final = (".jsonl", ".ndjson", ".json")
_TABLES: Final = (".parquet", ".pq")
_SHEETS: Final = {".csv": ",", ".tsv": "\t"}
_NAMES: Final = "*.jsonl, *.json, *.ndjson, *.csv, *.tsv (each may end in .gz or .zst), *.parquet and *.arrow"
_REMEDIES: Final = {
    ".txt": 'write each text as a line of JSON, {"text": "..."}, because a text file does not say where a text ends',
    ".xlsx": "save the sheet as CSV",
}
"""Suffix -> what to do with such a file."""


class RecordFile(Protocol):
    """Protocol of a file of records with access by index."""

    path: Path
    fingerprint: int
    """Checksum of the content, or of parts of it."""

    def __len__(self) -> int: ...
    def read(self, index: int) -> dict[str, Any] | None:
        """Record number ``index``. None for a blank line. Raises ConfigError for an invalid record."""
        ...

    def where(self, index: int) -> str:
        """File and line (or row) of a record, for error messages."""
        ...


def expand(files: Sequence[str | Path]) -> list[Path]:
    """Replace patterns such as ``data/*.jsonl`` and directories by the paths of their files.

    A directory is a dataset saved by Hugging Face's ``save_to_disk``, or it contains files of records, directly or in
    its subdirectory ``data``. Raises ConfigError for a pattern without a match, and for a directory with several
    splits.
    """
    found: list[Path] = []
    for file in map(str, files):
        if Path(file).is_dir():
            found += _in_directory(Path(file))
        elif glob.has_magic(file) and not Path(file).exists():
            matching = sorted(glob.glob(file, recursive=True))
            if not matching:
                raise ConfigError(f"no file matches {file}; check the pattern")
            found += [Path(each) for each in matching if Path(each).is_file()]
        else:
            found.append(Path(file))
    return found


def _in_directory(folder: Path) -> list[Path]:
    if (folder / "dataset_dict.json").is_file():
        splits = sorted(path.name for path in folder.iterdir() if (path / "state.json").is_file())
        raise ConfigError(f"{folder} holds the splits {', '.join(splits)}; name one, such as {folder / splits[0]}")
    if (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file():
        try:
            state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
            return [folder / Path(each["filename"]).name for each in state["_data_files"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{folder / 'state.json'} cannot be read ({error}); save the dataset again") from None
    for directory in (folder, folder / "data"):
        files = sorted(path for path in directory.glob("*") if path.is_file() and _kind_of(path))
        files = [path for path in files if path.name not in ("dataset_info.json", "dataset_infos.json", "state.json")]
        splits = sorted({path.name.split("-")[0] for path in files if "-of-" in path.name})
        if len(splits) > 1:
            raise ConfigError(
                f"{directory} holds the splits {', '.join(splits)}; name one by a pattern: {directory / splits[0]}-*"
            )
        if files:
            return files
    raise ConfigError(f"{folder} holds no file of records ({_NAMES}); name the files or a pattern")


def _kind_of(path: Path) -> str:
    """Kind of a file by its suffix: ``lines``, ``sheet``, ``table`` or ``arrow``. Empty for any other file."""
    suffixes = path.suffixes
    suffix = suffixes[-2] if len(suffixes) > 1 and suffixes[-1] in _COMPRESSED else path.suffix
    kinds = dict.fromkeys(_LINES, "lines") | dict.fromkeys(_SHEETS, "sheet") | dict.fromkeys(_TABLES, "table")
    kind = (kinds | {".arrow": "arrow"}).get(suffix, "")
    return "" if kind not in ("lines", "sheet") and is_compressed(path) else kind


def open_file(path: Path, whole: bool = False) -> RecordFile:
    """Open a file of records; its suffix determines the kind. ``whole``: keep a Parquet file completely in memory.

    Raises ConfigError for a file that is missing or cannot be read.
    """
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; check the path")
    kind = _kind_of(path)
    if kind == "lines":
        with contextlib.closing(open_bytes(path)) as file:
            is_array = ".json" in path.suffixes and _first_byte(file) == b"["
        return ArrayFile(path) if is_array else LineFile(path)
    if kind == "sheet":
        return SheetFile(path)
    if kind == "table":
        return TableFile(path, whole=whole)
    if kind == "arrow":
        return ArrowFile(path)
    remedy = _REMEDIES.get(path.suffix, "")
    raise ConfigError(f"{path} has the suffix {path.suffix!r}; known files are {_NAMES}{remedy and f'; {remedy}'}")


def is_compressed(path: Path) -> bool:
    """Whether the file has the suffix of a compressed file."""
    return path.suffix in _COMPRESSED


def open_bytes(path: Path) -> BinaryIO:
    """Open a file for reading its bytes, decompressed. Raises ConfigError if the library for decompression is
    missing."""
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.suffix != ".zst":
        return path.open("rb")
    for name in ("compression.zstd", "zstandard"):
        try:
            library: Any = importlib.import_module(name)
        except ImportError:
            continue
        opened = library.open(path, "rb")
        return cast(BinaryIO, opened if name == "compression.zstd" else io.BufferedReader(opened, _CHUNK))
    raise ConfigError(f"reading {path} needs zstandard; install it with: pip install 'chairlift[train]'")


def decompression_errors() -> tuple[type[Exception], ...]:
    """Types of the exceptions that reading a damaged compressed file raises."""
    found: list[type[Exception]] = [EOFError, zlib.error, gzip.BadGzipFile]
    for name in ("compression.zstd", "zstandard"):
        try:
            found.append(importlib.import_module(name).ZstdError)
        except ImportError:
            continue
    return tuple(found)


def _first_byte(file: BinaryIO) -> bytes:
    """The first byte that is not white space. Empty for an empty or damaged file."""
    try:
        while byte := file.read(1):
            if not byte.isspace():
                return byte
    except decompression_errors():  # the reader of the file reports the error
        pass
    return b""


class LineFile:
    """A file of JSON lines. An index of the line starts is made in one pass over the file; it needs 8 bytes per line.

    A compressed file is read a second time, into a temporary file, when the first record is read.
    """

    def __init__(self, path: Path) -> None:
        """Read the file once to build the index. Raises ConfigError for an empty file."""
        self.path = path
        self.fingerprint = 0
        ends: list[npt.NDArray[np.int64]] = []
        size = 0
        for chunk in _chunks(path):
            self.fingerprint = zlib.crc32(chunk, self.fingerprint)
            ends.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + size + 1)
            size += len(chunk)
        bounds = np.concatenate([[0], *ends, [size]]).astype(np.int64)
        self._bounds = bounds[:-1] if len(bounds) > 1 and bounds[-1] == bounds[-2] else bounds
        if size == 0:
            raise ConfigError(f"{path} is empty; give a file with a JSON object on each line")

    @functools.cached_property
    def _file(self) -> BinaryIO:
        if not is_compressed(self.path):
            return open_for(self, self.path)
        spool = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115  (the finaliser closes it)
        weakref.finalize(self, spool.close)
        for chunk in _chunks(self.path):
            spool.write(chunk)
        spool.flush()
        return spool

    def __len__(self) -> int:
        """Number of lines, including blank lines."""
        return len(self._bounds) - 1

    def read(self, index: int) -> dict[str, Any] | None:
        start, end = self._bounds[index : index + 2].tolist()
        line = os.pread(self._file.fileno(), end - start, start)  # forked processes share the file offset
        if len(line) < end - start:
            raise ConfigError(
                f"{self.where(index)}: the file was cut while it was read; restore its content, and continue"
            )
        return parse_line(line, self.where(index)) if line.strip() else None

    def where(self, index: int) -> str:
        return f"{self.path}, line {index + 1}"


class TableFile:
    """A Parquet file. One row group at a time is decoded; with ``whole``, all row groups stay in memory, for access in
    random order."""

    def __init__(self, path: Path, *, whole: bool = False) -> None:
        """Raises ConfigError if pyarrow is missing, and for a file that is empty or not Parquet."""
        pyarrow = _pyarrow(path)
        parquet = importlib.import_module("pyarrow.parquet")
        self.path = path
        self._broken = pyarrow.ArrowException
        try:
            self._file = parquet.ParquetFile(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(f"{path} cannot be read as Parquet: {error}") from None
        metadata = self._file.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts = np.cumsum([0, *sizes])
        if not metadata.num_rows:
            raise ConfigError(f"{path} has no rows; give a file with at least one")
        # The metadata contains the position and the statistics of every column chunk, so it changes with the content.
        self.fingerprint = zlib.crc32(f"{path.stat().st_size} {metadata.to_dict()}".encode())
        self._groups: dict[int, Any] = {}
        self._whole = whole

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, index: int) -> dict[str, Any] | None:
        group = int(np.searchsorted(self._starts, index, side="right")) - 1
        if group not in self._groups:
            if not self._whole:
                self._groups.clear()
            try:
                self._groups[group] = self._file.read_row_group(group)
            except (self._broken, OSError) as error:
                raise ConfigError(f"{self.where(index)}: cannot be read, make the file again: {error}") from None
        return _row(self._groups[group], index - int(self._starts[group]))

    def where(self, index: int) -> str:
        return f"{self.path}, row {index + 1}"


def _chunks(path: Path) -> Iterator[bytes]:
    """Yield the decompressed content of a file in pieces."""
    try:
        with contextlib.closing(open_bytes(path)) as file:
            while chunk := file.read(_CHUNK):
                yield chunk
    except decompression_errors() as error:
        raise _damaged(path, error) from None


def open_for(owner: object, path: Path) -> BinaryIO:
    """Open a file for reading, decompressed. It is closed when ``owner`` is garbage-collected."""
    file = open_bytes(path)
    weakref.finalize(owner, file.close)
    return file


class ArrayFile:
    """A JSON file with a single array of records. The whole array is in memory."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for an empty array, and for invalid JSON."""
        self.path = path
        content = _read_all(path)
        self.fingerprint = zlib.crc32(content)
        try:
            self._records = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} begins with a JSON array that is not valid: {error}; correct the file") from None
        if not self._records:
            raise ConfigError(f"{path} is an empty array; give a file with at least one record")

    def __len__(self) -> int:
        return len(self._records)

    def read(self, index: int) -> dict[str, Any] | None:
        record = self._records[index]
        if not isinstance(record, dict):
            raise ConfigError(f"{self.where(index)}: a record must be a JSON object, got {str(record)[:60]!r}")
        return {name: value for name, value in record.items() if value is not None}

    def where(self, index: int) -> str:
        return f"{self.path}, record {index + 1}"


class SheetFile:
    """A CSV or TSV file whose first line names the fields. The whole file is in memory.

    All values are texts, and empty cells are left out. Values that are lists (``messages``) are JSON text.
    """

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file without rows or names, and for a row that is longer than the first line."""
        self.path = path
        content = _read_all(path)
        self.fingerprint = zlib.crc32(content)
        suffix = next(each for each in reversed(path.suffixes) if each in _SHEETS)
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from None
        limit = csv.field_size_limit(max(len(content), 1))
        try:
            rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=_SHEETS[suffix], strict=True))
        except csv.Error as error:
            raise ConfigError(f"{path} cannot be read as {suffix[1:].upper()}: {error}; correct the file") from None
        finally:
            csv.field_size_limit(limit)
        names, self._rows = (rows or [[]])[0], [row for row in rows[1:] if row]
        if not self._rows or not all(names) or len(set(names)) < len(names):
            raise ConfigError(f"{path} needs a first line with a different name for each field, and at least one row")
        if (long := next((i for i, row in enumerate(self._rows) if len(row) > len(names)), None)) is not None:
            raise ConfigError(
                f"{self.where(long)}: {len(self._rows[long])} values for {len(names)} fields; put quotes around values"
                " that contain the separator"
            )
        self._names = names

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> dict[str, Any] | None:
        return {name: value for name, value in zip(self._names, self._rows[index], strict=False) if value}

    def where(self, index: int) -> str:
        return f"{self.path}, row {index + 1}"


class ArrowFile:
    """A memory-mapped Arrow file of a dataset that Hugging Face's ``save_to_disk`` saved."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if pyarrow is missing, and for a file that is empty or not Arrow."""
        pyarrow = _pyarrow(path)
        self.path = path
        try:
            file = pyarrow.memory_map(str(path))
            try:
                self._table = pyarrow.ipc.open_stream(file).read_all()
            except pyarrow.ArrowInvalid:
                self._table = pyarrow.ipc.open_file(file).read_all()
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(f"{path} cannot be read as Arrow: {error}") from None
        if not self._table.num_rows:
            raise ConfigError(f"{path} has no rows; give a file with at least one")
        size = path.stat().st_size
        with path.open("rb") as raw:
            ends = raw.read(_SAMPLE)
            raw.seek(max(0, size - _SAMPLE))
            ends += raw.read()
        self.fingerprint = zlib.crc32(ends, size & 0xFFFFFFFF)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def read(self, index: int) -> dict[str, Any] | None:
        return _row(self._table, index)

    def where(self, index: int) -> str:
        return f"{self.path}, row {index + 1}"


def _pyarrow(path: Path) -> Any:
    try:
        importlib.import_module("pyarrow.ipc")
        return importlib.import_module("pyarrow")
    except ImportError:
        raise ConfigError(
            f"reading {path} needs pyarrow; install it with: pip install 'chairlift[train]', "
            "or convert the file to JSON lines"
        ) from None


def _row(table: Any, index: int) -> dict[str, Any]:
    """A row of a table without fields that are null. In a table every row has all fields, also in nested values."""
    found: dict[str, Any] = _without_nulls(table.slice(index, 1).to_pylist()[0])
    return found


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    if isinstance(value, list) and value and isinstance(value[0], (Mapping, list)):
        return [_without_nulls(inner) for inner in value]
    return value


def _read_all(path: Path) -> bytes:
    try:
        with contextlib.closing(open_bytes(path)) as file:
            return file.read()
    except decompression_errors() as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path} is damaged: it cannot be decompressed ({error}); copy it again")


def parse_line(line: bytes, where: str) -> dict[str, Any]:
    """Parse a line as a record. Raises ConfigError, which names the line, if the line is not a JSON object."""
    problem = "a record must be a JSON object, got"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        record = None
        problem = f"not JSON ({error}):"
    if isinstance(record, dict):
        return {
            name: value for name, value in record.items() if value is not None
        }  # null means that the field is missing
    raise ConfigError(f"{where}: {problem} {line[:60]!r}; correct the line, or skip such records (on_error: skip)")
