"""Sources of training examples that read files of records and can be saved and resumed.

A record is a JSON object or a row of a table. Its fields determine whether it is a chat, a prompt with a completion, a
text, or token ids (:class:`Encoder`). An example is a mapping with ``input_ids`` and ``loss_weight`` for
:class:`~chairlift_train.stream.PackStream`. A record can give several examples.

Needs NumPy, a tokenizer for records other than token ids, and pyarrow for Parquet and Arrow files.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from chairlift.errors import ChairliftError, ConfigError
from chairlift_train.encoder import Encode, Encoded, Encoder
from chairlift_train.record_files import (
    LineFile,
    TableFile,
    decompression_errors,
    expand,
    is_compressed,
    open_bytes,
    open_file,
    open_for,
    parse_line,
)

__all__ = ["Encoder", "FollowedLines", "LineFile", "Notes", "RecordSource", "TableFile", "open_file"]

_CHUNK = 1 << 22
_POLL_SECONDS = 0.5
_MAX_NOTES = 64
"""Maximum number of different notes that are counted by their text. All other notes are counted together."""
_MAX_PLACES = 5
"""Maximum number of records that are named for a note."""


class Notes(Counter[str]):
    """Note (:class:`~chairlift_train.encoder.Encoded`) -> number of records with this note."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, list[str]] = {}
        """Note -> files and lines of the first records with this note."""
        self.skipped: list[str] = []
        """Files and lines of the first records that could not be used and were skipped."""

    def add(self, note: str, where: str) -> None:
        """Count the record at the file and line ``where``."""
        note = note if note in self or len(self) < _MAX_NOTES else "have other peculiarities"
        self[note] += 1
        places = self.places.setdefault(note, [])
        if len(places) < _MAX_PLACES:
            places.append(where)

    def add_skipped(self, where: str) -> None:
        """Remember a record that was skipped, if it is among the first."""
        if len(self.skipped) < _MAX_PLACES:
            self.skipped.append(where)

    def merge(self, other: Mapping[str, int]) -> None:
        """Add the records that another source has counted. A source of another class may name no places."""
        self.update(other)
        if not isinstance(other, Notes):
            return
        for note, places in other.places.items():
            self.places[note] = [*self.places.get(note, ()), *places][:_MAX_PLACES]
        self.skipped = [*self.skipped, *other.skipped][:_MAX_PLACES]

    def state_dict(self) -> dict[str, Any]:
        """The counts and places as plain data."""
        places = {note: list(places) for note, places in self.places.items()}
        return {"notes": dict(self), "noted_at": places, "skipped_at": list(self.skipped)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Notes:
        """Notes from a state of :meth:`state_dict`. States of earlier versions have no places, or no notes."""
        notes = cls()
        notes.update(state.get("notes", {}))
        notes.places = {note: list(places) for note, places in state.get("noted_at", {}).items()}
        notes.skipped = list(state.get("skipped_at", ()))
        return notes

    def skipped_text(self, count: int) -> str:
        """Text for the user in parentheses that names the first of ``count`` skipped records; empty without names."""
        return _named(self.skipped, count)

    def lines(self) -> list[str]:
        """One line for the user per note."""
        found = []
        for note, count in sorted(self.items()):
            named = _named(self.places.get(note, ()), count)
            found.append(f"note: {count:,} {'record' if count == 1 else 'records'} {note}{named}")
        return found


class RecordSource:
    """Iterator over the examples in files of records, in order or in a new random order in each epoch.

    ``files`` can contain patterns and directories (:func:`~chairlift_train.record_files.expand`). With ``epochs=None``
    the files are repeated without end. With ``on_error="skip"``, invalid records are counted in ``skipped``; otherwise
    they raise ConfigError with file and line. Raises ConfigError for missing or empty files.
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
        self._files = [open_file(file, whole=shuffle) for file in expand(files)]
        self._starts = np.cumsum([0, *(len(file) for file in self._files)])
        self._encode = encode
        self._shuffle = shuffle
        self._epochs = epochs
        self._seed = seed
        self._on_error = on_error
        self.skipped = 0
        """Number of records that were skipped. Only the first epoch is counted."""
        self.notes = Notes()
        """Notes on the records of the first epoch."""
        self._rest: list[Mapping[str, Any]] = []  # remaining examples of the current record, in reverse order
        self._given = 0  # number of examples of the current record that were returned
        self._epoch = 0
        self._position = 0
        self._found_in_epoch = 0
        self._order: npt.NDArray[np.int64] | None = None

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return self

    def __next__(self) -> Mapping[str, Any]:
        """The next example. After an error, the next call continues after the invalid record."""
        while self._epochs is None or self._epoch < self._epochs:
            if self._order is None:
                self._order = self._order_of_epoch()
            while self._rest or self._position < len(self._order):
                if self._rest:
                    self._given += 1
                    return self._rest.pop()
                index = int(self._order[self._position])
                self._position += 1
                self._rest = self._examples(index)[::-1]
                self._given = 0
                self._found_in_epoch += bool(self._rest)
            if not self._found_in_epoch:
                names = ", ".join(str(file.path) for file in self._files)[:200]
                raise ConfigError(f"no record of {names} can be used ({self.skipped} were skipped)")
            self._epoch = self._epoch + 1
            self._position = 0
            self._found_in_epoch = 0
            self._order = None
        raise StopIteration

    def _order_of_epoch(self) -> npt.NDArray[np.int64]:
        count = int(self._starts[-1])
        if not self._shuffle:
            return np.arange(count)
        return np.random.default_rng([self._seed, self._epoch]).permutation(count)

    def _examples(self, index: int, *, again: bool = False) -> list[Mapping[str, Any]]:
        """Examples of record number ``index``. ``again``: whether the notes of the record were counted already."""
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        file = self._files[number]
        row = index - int(self._starts[number])
        try:
            record = file.read(row)
            if record is None:
                return []
            counts = self.notes if self._epoch == 0 and not again else None  # every epoch has the same records
            return _encoded(self._encode, record, file.where(row), counts)
        except ConfigError:
            if self._on_error == "stop":
                raise
            if self._epoch == 0:
                self.skipped += 1
                self.notes.add_skipped(file.where(row))
            return []

    def _fingerprint(self) -> list[list[Any]]:
        return [[file.path.name, len(file), file.fingerprint] for file in self._files]

    def state_dict(self) -> dict[str, Any]:
        """State after the last returned example, as plain data."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "found": self._found_in_epoch,
            "skipped": self.skipped,
            "given": self._given if self._rest else 0,
            **self.notes.state_dict(),
            "order": [self._shuffle, self._seed],
            "files": self._fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`. Raises ConfigError, naming the file, if the files differ."""
        _compare(self._fingerprint(), state["files"])
        if list(state["order"]) != [self._shuffle, self._seed]:
            raise ConfigError(
                f"the run was begun with [shuffle, seed] {list(state['order'])}, now they are "
                f"{[self._shuffle, self._seed]}; go on with the same"
            )
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])
        self._found_in_epoch = int(state["found"])
        self.skipped = int(state["skipped"])
        self.notes = Notes.from_state(state)
        self._order, self._rest, self._given = None, [], int(state.get("given", 0))
        if self._given:  # the state is inside a record with several examples
            self._order = self._order_of_epoch()
            again = self._examples(int(self._order[self._position - 1]), again=True)
            self._rest = again[self._given :][::-1]


class FollowedLines:
    """Iterator over the examples in files of JSON lines, which are read once, in order, without an index.

    With ``follow``, lines that are appended to the last file later are read, too. A last line without a newline is then
    read only when it is complete. ``wait`` is called when there is no new line, and returns False to end the iteration.
    By default it sleeps for a moment and returns True.
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
        """Raises ConfigError for a missing file, and for an empty file that is not followed."""
        self._paths = expand(files)
        if follow and is_compressed(self._paths[-1]):
            raise ConfigError(f"{self._paths[-1]} is compressed, so it cannot grow; follow a plain file of JSON lines")
        for path in self._paths:
            if not path.is_file() or (not path.stat().st_size and not (follow and path == self._paths[-1])):
                raise ConfigError(f"{path} is {'empty' if path.is_file() else 'not a file'}; give one with JSON lines")
        self._encode = encode
        self._follow = follow
        self._on_error = on_error
        self._wait = wait or _sleep
        self.skipped = 0
        self.notes = Notes()
        """Notes on the records, as in :class:`RecordSource`."""
        self._rest: list[Mapping[str, Any]] = []  # remaining examples of the current line, in reverse order
        self._given = 0  # number of examples of the current line that were returned
        self._begin = 0  # offset of the current line in bytes
        self._file = 0
        self._offset = 0
        self._line = 0
        self._checksum = 0
        """CRC-32 checksum of the current file's bytes before ``_offset``."""
        self._open: BinaryIO | None = None
        self._opened_by = 0

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return self

    def __next__(self) -> Mapping[str, Any]:
        """The next example. After an error, the next call continues after the invalid line."""
        while self._file < len(self._paths):
            path = self._paths[self._file]
            if self._rest:
                self._given += 1
                return self._rest.pop()
            if self._open is None or self._opened_by != os.getpid():  # a forked process must not share the file offset
                self._open, self._opened_by = self._opened(path, self._offset), os.getpid()
            while (line := self._next_line(self._open)) is not None:
                self._begin = self._offset
                self._offset += len(line)
                self._line += 1
                self._checksum = zlib.crc32(line, self._checksum)
                self._rest = self._examples(line, f"{path}, line {self._line}", self.notes)[::-1]
                self._given = 0
                if self._rest:
                    self._given = 1
                    return self._rest.pop()
            self._open.close()
            self._open = None
            self._file = self._file + 1
            self._offset = 0
            self._line = 0
            self._checksum = 0
        raise StopIteration

    def _opened(self, path: Path, offset: int) -> BinaryIO:
        """Open a file. A compressed file is read up to this offset of its decompressed bytes."""
        file = open_for(self, path)
        while is_compressed(path) and offset:
            offset -= len(file.read(min(offset, _CHUNK)))
        return file

    def _next_line(self, file: BinaryIO) -> bytes | None:
        path = self._paths[self._file]
        growing = self._follow and self._file == len(self._paths) - 1
        if is_compressed(path):
            try:
                return file.readline() or None
            except decompression_errors() as error:
                raise ConfigError(f"{path} is damaged after line {self._line} ({error}); copy it again") from None
        while True:
            file.seek(self._offset)
            line = file.readline()
            if line.endswith(b"\n") or (line and not growing):
                return line
            descriptor = file.fileno()
            still_there = not growing or (path.exists() and os.path.samefile(path, descriptor))
            if not still_there or os.fstat(descriptor).st_size < self._offset:
                raise ConfigError(
                    f"{path} was cut, moved or replaced while it was read (after line {self._line});"
                    " restore its content, with new lines at its end, and continue from the last checkpoint"
                )
            if not growing or not self._wait():
                return None

    def _examples(self, line: bytes, where: str, counts: Notes | None) -> list[Mapping[str, Any]]:
        try:
            return _encoded(self._encode, parse_line(line, where), where, counts) if line.strip() else []
        except ConfigError:
            if self._on_error == "stop":
                raise
            self.skipped += 1
            self.notes.add_skipped(where)
            return []

    def state_dict(self) -> dict[str, Any]:
        """State after the last returned example, as plain data."""
        return {
            "file": self._file,
            "offset": self._offset,
            "line": self._line,
            "checksum": self._checksum,
            "skipped": self.skipped,
            "given": self._given if self._rest else 0,
            "begin": self._begin,
            **self.notes.state_dict(),
            "names": [path.name for path in self._paths],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`.

        The part of the file that was read before is read again and compared by its checksum. Raises ConfigError if it
        has changed.
        """
        _compare([path.name for path in self._paths], state["names"])
        number = int(state["file"])
        offset = int(state["offset"])
        if offset and _checksum(self._paths[number], offset) != state["checksum"]:
            raise ConfigError(
                f"{self._paths[number]} has changed in the part that was already read (its first {offset:,} bytes); "
                "continue with the same file, to which lines may have been appended, or start a new run"
            )
        self._file = number
        self._offset = offset
        self._line = int(state["line"])
        self._checksum = int(state["checksum"])
        self.skipped = int(state["skipped"])
        self.notes = Notes.from_state(state)
        self._open, self._rest, self._given = None, [], int(state.get("given", 0))
        self._begin = int(state.get("begin", 0))
        if self._given:  # the state is inside a line with several examples
            path = self._paths[number]
            file = self._opened(path, self._begin)
            if not is_compressed(path):
                file.seek(self._begin)
            again = self._examples(file.readline(), f"{path}, line {self._line}", None)
            file.close()
            self._rest = again[self._given :][::-1]


def _named(places: Sequence[str], count: int) -> str:
    """The first of ``count`` records in parentheses, after a space; empty without places."""
    first = "first: " if count > len(places) else ""
    return f" ({first}{'; '.join(places)})" if places else ""


def _sleep() -> bool:
    time.sleep(_POLL_SECONDS)
    return True


def _encoded(encode: Encode, record: Mapping[str, Any], where: str, counts: Notes | None) -> list[Mapping[str, Any]]:
    """Training examples made from one record. Remarks about the record, such as unknown keys, are counted in
    ``counts``. Raises ConfigError with the file and line ``where``."""
    try:
        found = encode(record)
    except ChairliftError as error:
        raise ConfigError(f"{where}: {error}; correct it, or skip such records (on_error: skip)") from None
    if not isinstance(found, Encoded):
        return [found]
    for note in found.notes:
        if counts is None:
            break
        counts.add(note, where)
    return list(found.items)


def _compare(mine: Sequence[Any], saved: Sequence[Any]) -> None:
    found = [list(x) if isinstance(x, list) else x for x in mine]
    wanted = list(saved)
    if found != wanted:
        changed = [str(w) for w, f in zip(wanted, found, strict=False) if w != f] or [f"{len(wanted)} files"]
        raise ConfigError(
            f"the data has changed since the run was saved: it had {changed[0]} ([file name, records, checksum]), now "
            f"there is {next((f for f in found if f not in wanted), len(found))}; go on with the same data, or start a "
            "new run"
        )


def _checksum(path: Path, size: int) -> int:
    checksum = 0
    with open_bytes(path) as file:
        while size and (chunk := file.read(min(size, _CHUNK))):
            checksum = zlib.crc32(chunk, checksum)
            size -= len(chunk)
    return -1 if size else checksum
