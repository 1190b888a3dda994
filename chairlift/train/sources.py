"""Files of records as a stateful source of training examples: JSON lines and Parquet, at rest or still growing.

A record is a JSON object or a table's row, of one of these kinds, told by its fields (:class:`Encoder`):
``input_ids``; ``messages`` (a chat); ``prompt`` and ``completion``; or a text. What comes out are mappings with
``input_ids`` and ``loss_weight``, as :class:`~chairlift.train.stream.PackStream` takes them.

Needs NumPy; a tokenizer for anything but token ids; pyarrow for Parquet.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np
import numpy.typing as npt

from chairlift.errors import ChairliftError, ConfigError
from chairlift.train.encoder import Encode, Encoder

__all__ = ["Encoder", "FollowedLines", "LineFile", "RecordSource", "TableFile", "open_file"]

_CHUNK = 1 << 22
_POLL_SECONDS = 0.5


class RecordFile(Protocol):
    """Records by position."""

    path: Path
    fingerprint: int
    """Changes when the content does."""

    def __len__(self) -> int: ...
    def read(self, index: int) -> dict[str, Any] | None:
        """The record; None for a blank line. Raises ConfigError for what is none."""
        ...

    def where(self, index: int) -> str:
        """The record's place, for messages."""
        ...


def open_file(path: Path, whole: bool = False) -> RecordFile:
    """By its suffix. ``whole`` keeps all of a Parquet file in memory. Raises ConfigError for what cannot be read."""
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; check the path")
    if path.suffix in (".jsonl", ".ndjson", ".json"):
        return LineFile(path)
    if path.suffix in (".parquet", ".pq"):
        return TableFile(path, whole=whole)
    raise ConfigError(f"{path} has the suffix {path.suffix!r}; .jsonl and .parquet files are read")


class LineFile:
    """JSON lines, found by an index of where lines begin: one pass over the file, 8 bytes per line."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for an empty file."""
        self.path = path
        self.fingerprint = 0
        ends: list[npt.NDArray[np.int64]] = []
        size = 0
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                self.fingerprint = zlib.crc32(chunk, self.fingerprint)
                ends.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + size + 1)
                size += len(chunk)
        bounds = np.concatenate([[0], *ends, [size]]).astype(np.int64)
        self._bounds = bounds[:-1] if len(bounds) > 1 and bounds[-1] == bounds[-2] else bounds
        if size == 0:
            raise ConfigError(f"{path} is empty; give a file with a JSON object on each line")

    @functools.cached_property
    def _file(self) -> BinaryIO:
        return _open_for(self, self.path)

    def __len__(self) -> int:
        """Lines, blank ones included."""
        return len(self._bounds) - 1

    def read(self, index: int) -> dict[str, Any] | None:
        start, end = self._bounds[index : index + 2].tolist()
        line = os.pread(self._file.fileno(), end - start, start)  # a forked loader shares the place of seek and read
        if len(line) < end - start:
            raise ConfigError(
                f"{self.where(index)}: the file was cut while it was read; put back what it had, and go on"
            )
        return _parse(line, self.where(index)) if line.strip() else None

    def where(self, index: int) -> str:
        return f"{self.path}, line {index + 1}"


class TableFile:
    """A Parquet file, decoded one row group at a time, or kept ``whole`` in memory for random order."""

    def __init__(self, path: Path, *, whole: bool = False) -> None:
        """Raises ConfigError without pyarrow, and for a file that is empty or not Parquet."""
        try:
            pyarrow = importlib.import_module("pyarrow")
            parquet = importlib.import_module("pyarrow.parquet")
        except ImportError:
            raise ConfigError(
                f"reading {path} needs pyarrow; install it with: pip install 'chairlift[train]', "
                "or convert the file to JSON lines"
            ) from None
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
        # The footer holds the place and the statistics of every column chunk.
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
        row = index - int(self._starts[group])
        found: dict[str, Any] = self._groups[group].slice(row, 1).to_pylist()[0]
        return {name: value for name, value in found.items() if value is not None}

    def where(self, index: int) -> str:
        return f"{self.path}, row {index + 1}"


class RecordSource:
    """Records of files in order, or in a new random order in each epoch; where it stands is two numbers.

    ``epochs`` None repeats for ever. With ``on_error="skip"`` records that cannot be used are counted in ``skipped``
    instead of raising ConfigError with file and line. Raises ConfigError for files that are missing or empty.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        encode: Encode,
        *,
        shuffle: bool = False,
        epochs: int | None = 1,
        seed: int = 0,
        on_error: Literal["stop", "skip"] = "stop",
    ) -> None:
        self._files = [open_file(Path(file), whole=shuffle) for file in files]
        self._starts = np.cumsum([0, *(len(file) for file in self._files)])
        self._encode, self._shuffle, self._epochs, self._seed = encode, shuffle, epochs, seed
        self._on_error = on_error
        self.skipped = 0
        """Records left out."""
        self._epoch = 0
        self._position = 0
        self._found_in_epoch = 0
        self._order: npt.NDArray[np.int64] | None = None

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return self

    def __next__(self) -> Mapping[str, Any]:
        """The next example. After an error, the one after the record that was wrong."""
        while self._epochs is None or self._epoch < self._epochs:
            if self._order is None:
                self._order = self._order_of_epoch()
            while self._position < len(self._order):
                index = int(self._order[self._position])
                self._position += 1
                item = self._item(index)
                if item is not None:
                    self._found_in_epoch += 1
                    return item
            if not self._found_in_epoch:
                names = ", ".join(str(file.path) for file in self._files)[:200]
                raise ConfigError(f"no record of {names} can be used ({self.skipped} were skipped)")
            self._epoch, self._position, self._found_in_epoch, self._order = self._epoch + 1, 0, 0, None
        raise StopIteration

    def _order_of_epoch(self) -> npt.NDArray[np.int64]:
        count = int(self._starts[-1])
        if not self._shuffle:
            return np.arange(count)
        return np.random.default_rng([self._seed, self._epoch]).permutation(count)

    def _item(self, index: int) -> Mapping[str, Any] | None:
        place = int(np.searchsorted(self._starts, index, side="right")) - 1
        file, row = self._files[place], index - int(self._starts[place])
        try:
            record = file.read(row)
            return None if record is None else _encoded(self._encode, record, file.where(row))
        except ConfigError:
            if self._on_error == "stop":
                raise
            self.skipped += 1
            return None

    def _fingerprint(self) -> list[list[Any]]:
        return [[file.path.name, len(file), file.fingerprint] for file in self._files]

    def state_dict(self) -> dict[str, Any]:
        """After what was yielded last: plain data."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "found": self._found_in_epoch,
            "skipped": self.skipped,
            "order": [self._shuffle, self._seed],
            "files": self._fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there. Raises ConfigError, naming the file, when the files are not those that the state is of."""
        _compare(self._fingerprint(), state["files"])
        if list(state["order"]) != [self._shuffle, self._seed]:
            raise ConfigError(
                f"the run was begun with [shuffle, seed] {list(state['order'])}, now they are "
                f"{[self._shuffle, self._seed]}; go on with the same"
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._found_in_epoch, self.skipped = int(state["found"]), int(state["skipped"])
        self._order = None


class FollowedLines:
    """JSON lines, read once in order without an index; with ``follow``, what is appended to the last file as well.

    A last line without its newline may still be written: following, it waits to be ended. ``wait`` is called when there
    is nothing to read; it returns False to end the stream. By default it sleeps, for ever.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        encode: Encode,
        *,
        follow: bool = False,
        on_error: Literal["stop", "skip"] = "stop",
        wait: Callable[[], bool] | None = None,
    ) -> None:
        """Raises ConfigError for a file that is missing, or empty and not followed."""
        self._paths = [Path(file) for file in files]
        for path in self._paths:
            if not path.is_file() or (not path.stat().st_size and not (follow and path == self._paths[-1])):
                raise ConfigError(f"{path} is {'empty' if path.is_file() else 'not a file'}; give one with JSON lines")
        self._encode, self._follow, self._on_error = encode, follow, on_error
        self._wait = wait or _sleep
        self.skipped = 0
        self._file, self._offset, self._line = 0, 0, 0
        self._checksum = 0
        """Checksum of the current file, up to the offset."""
        self._open: BinaryIO | None = None
        self._opened_by = 0

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return self

    def __next__(self) -> Mapping[str, Any]:
        """The next example. After an error, the one after the record that was wrong."""
        while self._file < len(self._paths):
            path = self._paths[self._file]
            if self._open is None or self._opened_by != os.getpid():  # a forked loader shares its place in the file
                self._open, self._opened_by = _open_for(self, path), os.getpid()
            while (line := self._next_line(self._open)) is not None:
                self._offset += len(line)
                self._line += 1
                self._checksum = zlib.crc32(line, self._checksum)
                item = self._item(line, f"{path}, line {self._line}")
                if item is not None:
                    return item
            self._open.close()
            self._open = None
            self._file, self._offset, self._line, self._checksum = self._file + 1, 0, 0, 0
        raise StopIteration

    def _next_line(self, file: BinaryIO) -> bytes | None:
        path, growing = self._paths[self._file], self._follow and self._file == len(self._paths) - 1
        while True:
            file.seek(self._offset)
            line = file.readline()
            if line.endswith(b"\n") or (line and not growing):
                return line
            place = file.fileno()
            still_there = not growing or (path.exists() and os.path.samefile(path, place))
            if not still_there or os.fstat(place).st_size < self._offset:
                raise ConfigError(
                    f"{path} was cut, moved or replaced while it was read (after line {self._line});"
                    " put back what it had, with what is new at its end, and go on from the last checkpoint"
                )
            if not growing or not self._wait():
                return None

    def _item(self, line: bytes, where: str) -> Mapping[str, Any] | None:
        try:
            return _encoded(self._encode, _parse(line, where), where) if line.strip() else None
        except ConfigError:
            if self._on_error == "stop":
                raise
            self.skipped += 1
            return None

    def state_dict(self) -> dict[str, Any]:
        """After what was yielded last: plain data."""
        return {
            "file": self._file,
            "offset": self._offset,
            "line": self._line,
            "checksum": self._checksum,
            "skipped": self.skipped,
            "names": [path.name for path in self._paths],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there. What was read is read again, to see that it is the same: ConfigError names what changed."""
        _compare([path.name for path in self._paths], state["names"])
        number, offset = int(state["file"]), int(state["offset"])
        if offset and _checksum(self._paths[number], offset) != state["checksum"]:
            raise ConfigError(
                f"{self._paths[number]} has changed in what was already read (its first {offset:,} bytes); "
                "go on with the same file, to which lines may have been appended, or start a new run"
            )
        self._file, self._offset, self._line = number, offset, int(state["line"])
        self._checksum, self.skipped = int(state["checksum"]), int(state["skipped"])
        self._open = None


def _open_for(owner: object, path: Path) -> BinaryIO:
    """Open a file that is closed together with its owner."""
    file = path.open("rb")
    weakref.finalize(owner, file.close)
    return file


def _sleep() -> bool:
    time.sleep(_POLL_SECONDS)
    return True


def _parse(line: bytes, where: str) -> dict[str, Any]:
    problem = "a record must be a JSON object, got"
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        record, problem = None, f"not JSON ({error}):"
    if isinstance(record, dict):
        return {name: value for name, value in record.items() if value is not None}  # as of a table: null is nothing
    raise ConfigError(f"{where}: {problem} {line[:60]!r}; correct the line, or skip such records (on_error: skip)")


def _encoded(encode: Encode, record: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    try:
        return encode(record)
    except ChairliftError as error:
        raise ConfigError(f"{where}: {error}; correct it, or skip such records (on_error: skip)") from None


def _compare(mine: Sequence[Any], saved: Sequence[Any]) -> None:
    found, wanted = [list(x) if isinstance(x, list) else x for x in mine], list(saved)
    if found != wanted:
        changed = [str(w) for w, f in zip(wanted, found, strict=False) if w != f] or [f"{len(wanted)} files"]
        raise ConfigError(
            f"the data has changed since the run was saved: it had {changed[0]} ([file name, records, checksum]), now "
            f"there is {next((f for f in found if f not in wanted), len(found))}; go on with the same data, or start a "
            "new run"
        )


def _checksum(path: Path, size: int) -> int:
    checksum = 0
    with path.open("rb") as file:
        while size and (chunk := file.read(min(size, _CHUNK))):
            checksum = zlib.crc32(chunk, checksum)
            size -= len(chunk)
    return -1 if size else checksum
