"""The files of a store: per namespace, writer and cache group an index of records and a file of blocks.

    DIR/secret                      key of the hash chain, so that keys survive and mean nothing to others
    DIR/NAMESPACE/about.json        what the namespace's name is the digest of
    DIR/NAMESPACE/lock-N            held by writer N; one process writes, all read
    DIR/NAMESPACE/index-N-G         records of cache group G; that of slot S is at S * record size
    DIR/NAMESPACE/blocks-N-G        blocks of cache group G; that of slot S is at S * block size

A namespace is everything that decides the bits of a block besides its tokens, so blocks of other weights or settings
are never seen. The space of a writer's files is reserved when it starts, and an eviction overwrites a slot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from chairlift.engine.kv_store.disk import Disk, DiskFile
from chairlift.engine.kv_store.record import Record, payload_checksum, record_bytes, records
from chairlift.errors import ConfigError

__all__ = ["SECRET", "StoreFiles", "read_secret"]

SECRET: Final = "secret"
_SECRET_BYTES: Final = 32
_MOST_WRITERS: Final = 64
_SPOILED: Final = 16
"""Number of leading bytes of a forgotten block that are overwritten. Its checksum is wrong then."""
_PIECE: Final = 1 << 22
"""Number of bytes of an index that are read at a time."""


def read_secret(disk: Disk, read_only: bool) -> bytes:
    """The secret of a store, made if there is none. Engines that start at once get the same. Raises ConfigError."""
    try:
        found = _read_secret(disk)
        if found is None and read_only:
            raise ConfigError("kv_store has no secret, so it is empty, and kv_store_mode is ro; use rw to fill it")
        if found is None:
            with contextlib.suppress(FileExistsError):  # another engine was faster
                disk.create(SECRET, os.urandom(_SECRET_BYTES))
            found = _read_secret(disk)
    except OSError as error:
        raise ConfigError(f"kv_store cannot be used: {error.strerror or error}; name another directory") from None
    if found is None:
        raise ConfigError(f"kv_store has a file {SECRET!r} that is not ours; remove it, or name another directory")
    return found


def _read_secret(disk: Disk) -> bytes | None:
    try:
        file = disk.open(SECRET)
    except FileNotFoundError:
        return None
    found = file.read(0, _SECRET_BYTES + 1)
    file.close()
    return found if len(found) == _SECRET_BYTES else None


def _by_writer(names: Iterable[str]) -> dict[tuple[str, str], list[str]]:
    """(folder, number of the writer) -> names of the writer's index and blocks."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in names:
        folder, _, file = name.rpartition("/")
        number = file.split("-")[1] if "-" in file else ""
        if number and not file.startswith("lock"):
            found.setdefault((folder, number), []).append(name)
    return found


@dataclasses.dataclass(slots=True)
class _Followed:
    """How far an index of another writer was read."""

    written: float = -1.0
    """Time of its last change when it was read."""
    is_settled: bool = False
    newest: int = 0
    """Largest generation that was found in it."""
    newer_than: int = 0
    """Smaller generations need not be looked at."""


class StoreFiles:
    """The files of one writer in a namespace, and those of all other writers for reading.

    ``block_bytes`` and ``spans`` have one entry per cache group: bytes of a block, and number of tokens for which there
    is one. ``nbytes`` is the most that this writer's files and those of other models may take together; writers of the
    same model that run beside it have an amount of their own. Files that no process uses are removed, those of other
    models and the oldest first, until there is room. Raises ConfigError if not even one block per group fits, or if the
    space cannot be reserved.
    """

    def __init__(
        self,
        disk: Disk,
        namespace: str,
        about: Mapping[str, object],
        *,
        block_size: int,
        block_bytes: Sequence[int],
        spans: Sequence[int],
        nbytes: int,
        read_only: bool = False,
    ) -> None:
        self._disk = disk
        self._folder = namespace
        self._block_bytes = tuple(block_bytes)
        self.record_bytes = record_bytes(block_size)
        self.writer = -1
        """Number of this writer; -1 if it may only read."""
        self.num_slots: tuple[int, ...] = (0,) * len(block_bytes)
        """Number of this writer's slots per cache group."""
        self._opened: dict[str, DiskFile] = {}
        self._followed: dict[str, _Followed] = {}
        """Name of each index of another writer -> how far it was read."""
        try:
            if not read_only:
                self._take_place()
                self._lay_out(self._make_room(nbytes), spans, nbytes)
                self._describe(about)
        except OSError as error:
            raise ConfigError(
                f"kv_store has no room for {nbytes:,} bytes ({error.strerror or error});"
                " lower kv_store_bytes, or name another directory"
            ) from None

    def _take_place(self) -> None:
        for number in range(_MOST_WRITERS):
            if self._disk.lock(f"{self._folder}/lock-{number}"):
                self.writer = number
                return
        raise ConfigError(f"kv_store has {_MOST_WRITERS} writers already; stop some, or use kv_store_mode ro")

    def _make_room(self, nbytes: int) -> int:
        """Number of bytes that this writer's files may have, after files of unused writers were removed."""
        sizes = self._disk.sizes()
        own = {name for group in self._groups for name in self._names(self.writer, group)}
        others = {place: names for place, names in _by_writer(sizes).items() if not own.intersection(names)}
        used = sum(sizes[name] for names in others.values() for name in names)
        unused = [place for place in others if self._is_unused(place)]
        siblings = [place for place in others if place[0] == self._folder and place not in unused]
        used -= sum(sizes[name] for place in siblings for name in others[place])
        unused.sort(key=lambda place: (place[0] == self._folder, max(map(self._disk.written, others[place]))))
        wanted = nbytes // 2  # a new model may displace old ones, but not for nothing
        for place in unused:
            if nbytes - used >= wanted:
                break
            used -= sum(sizes[name] for name in self._remove(place, others[place]))
        return nbytes - used

    def _is_unused(self, place: tuple[str, str]) -> bool:
        """Whether no process writes the files of (folder, writer). An engine that starts may take the place at once."""
        lock = f"{place[0]}/lock-{place[1]}"
        if not self._disk.lock(lock):
            return False
        self._disk.unlock(lock)
        return True

    def _remove(self, place: tuple[str, str], names: Sequence[str]) -> Sequence[str]:
        """Remove the files of a writer, unless a process writes them. Returns the names of what was removed."""
        lock = f"{place[0]}/lock-{place[1]}"
        if not self._disk.lock(lock):
            return ()
        for name in names:
            self._disk.remove(name)
        self._disk.unlock(lock)
        return names

    def clear(self, everything: bool) -> None:
        """Empty this writer's files, and remove those of the namespace, or with ``everything`` of all, that no other
        process writes. Raises OSError."""
        if self.writer < 0:
            return
        own = {name for group in self._groups for name in self._names(self.writer, group)}
        for place, names in _by_writer(self._disk.sizes()).items():
            if not own.intersection(names) and (everything or place[0] == self._folder):
                self._remove(place, names)
        for name in own & self._opened.keys():
            self._opened.pop(name).close()
        for group, count in enumerate(self.num_slots):
            for name, size in zip(
                self._names(self.writer, group), (self.record_bytes, self._block_bytes[group]), strict=True
            ):
                self._disk.open(name, 0).close()  # so that nothing can be read from it
                self._opened[name] = self._disk.open(name, count * size)

    def namespaces(self) -> dict[str, int]:
        """Name of each namespace -> bytes of its files. Raises OSError."""
        found: dict[str, int] = {}
        sizes = self._disk.sizes()
        for (folder, _), names in _by_writer(sizes).items():
            found[folder] = found.get(folder, 0) + sum(sizes[name] for name in names)
        return found

    @property
    def namespace(self) -> str:
        """Name of the namespace."""
        return self._folder

    @property
    def _groups(self) -> range:
        return range(len(self._block_bytes))

    def _lay_out(self, room: int, spans: Sequence[int], nbytes: int) -> None:
        per_token = sum((size + self.record_bytes) / span for size, span in zip(self._block_bytes, spans, strict=True))
        self.num_slots = tuple(int(room / per_token / span) for span in spans)
        if not all(self.num_slots):
            least = sum(self._block_bytes) + len(spans) * self.record_bytes
            raise ConfigError(
                f"kv_store_bytes is {nbytes:,}, and {max(0, room):,} are left for this engine, but a block of this"
                f" model takes {least:,}; raise kv_store_bytes, or remove other files from the directory"
            )
        for group, count in enumerate(self.num_slots):
            index, blocks = self._names(self.writer, group)
            self._opened[index] = self._disk.open(index, count * self.record_bytes)
            self._opened[blocks] = self._disk.open(blocks, count * self._block_bytes[group])

    def _describe(self, about: Mapping[str, object]) -> None:
        text = json.dumps(about, indent=1, sort_keys=True).encode()
        file = self._disk.open(f"{self._folder}/about.json", len(text))
        file.write(0, text)
        file.close()

    def _names(self, writer: int, group: int) -> tuple[str, str]:
        """Names of the index and of the file of blocks."""
        return f"{self._folder}/index-{writer}-{group}", f"{self._folder}/blocks-{writer}-{group}"

    def recover(self) -> Iterator[tuple[int, Record]]:
        """(writer, record) of every block that the indices name. Damaged records are left out, and so is an index from
        where on it cannot be read."""
        for name, (writer, group, size) in self._indices():
            for record in self._records(name, size) if writer == self.writer else self._news_of(name, size):
                if record.group == group:
                    yield writer, record

    def _indices(self) -> Iterator[tuple[str, tuple[int, int, int]]]:
        """(name, (writer, group, size in bytes)) of each index of the namespace."""
        prefix = f"{self._folder}/index-"
        for name, size in sorted(self._disk.sizes().items()):
            writer, _, group = name.removeprefix(prefix).partition("-")
            if name.startswith(prefix) and writer.isdigit() and group in map(str, self._groups):
                yield name, (int(writer), int(group), size)

    def _records(self, name: str, size: int, newer_than: int = 0) -> Iterator[Record]:
        """Records of an index whose generation is above ``newer_than``."""
        step = self.record_bytes
        piece = max(1, _PIECE // step) * step
        with contextlib.suppress(OSError):
            file = self._file(name)
            for at in range(0, size, piece):
                data = file.read(at, piece)
                yield from records(data, step, at // step, newer_than)

    def follow(self) -> list[tuple[int, Record]]:
        """(writer, record) of blocks that other writers have added since the last call, or a little longer ago. Only
        files that have changed are read."""
        found: list[tuple[int, Record]] = []
        with contextlib.suppress(OSError):
            indices = dict(self._indices())
            for name in self._followed.keys() - indices.keys():
                del self._followed[name]
            for name, (writer, group, size) in indices.items():
                if writer != self.writer:
                    records = self._news_of(name, size)
                    found += [(writer, record) for record in records if record.group == group]
        return found

    def _news_of(self, name: str, size: int) -> list[Record]:
        known = self._followed.setdefault(name, _Followed())
        try:
            written = self._disk.written(name)
        except OSError:
            return []
        # Several writes may have one time, so an index is read once more after its time has stopped changing.
        if written == known.written and known.is_settled:
            return []
        known.is_settled = written == known.written
        known.written = written
        for each in (name, name.replace("/index-", "/blocks-")):  # they may have been removed and made again
            if each in self._opened:
                self._opened.pop(each).close()
        found = list(self._records(name, size, known.newer_than))
        # A slot that was passed when it was written is read next time. Its generation is above all that were there when
        # this reading began, so above all that an earlier reading found.
        known.newer_than = known.newest
        known.newest = max([known.newest, *(record.generation for record in found)])
        return found

    def record(self, writer: int, group: int, slot: int) -> Record | None:
        """The record that a writer has for a slot now; None if there is none. Raises OSError."""
        index, _ = self._names(writer, group)
        found = Record.decode(self._file(index).read(slot * self.record_bytes, self.record_bytes), slot)
        return found if found is not None and found.group == group else None

    def _file(self, name: str) -> DiskFile:
        if name not in self._opened:
            self._opened[name] = self._disk.open(name)
        return self._opened[name]

    def write(self, record: Record, payload: bytes | memoryview) -> None:
        """Write a block, then its record. A crash in between leaves a record that does not fit its block. Raises
        OSError."""
        index, blocks = self._names(self.writer, record.group)
        self._file(blocks).write(record.slot * self._block_bytes[record.group], payload)
        self._file(index).write(record.slot * self.record_bytes, record.encode(self.record_bytes))

    def erase(self, group: int, slot: int) -> None:
        """Make the block of a slot unreadable, also for processes that know its record, and then the record. Raises
        OSError."""
        index, blocks = self._names(self.writer, group)
        size = self._block_bytes[group]
        self._file(blocks).write(slot * size, os.urandom(min(size, _SPOILED)))
        self._file(index).write(slot * self.record_bytes, bytes(self.record_bytes))

    def read(self, writer: int, record: Record) -> bytes | None:
        """The block of a record; None if its bytes are not those that were written for the record. Raises OSError."""
        _, blocks = self._names(writer, record.group)
        size = self._block_bytes[record.group]
        payload = self._file(blocks).read(record.slot * size, size)
        if payload_checksum(payload, record.key, record.slot, record.generation) != record.checksum:
            return None
        return payload

    def sync(self) -> None:
        """Wait until all blocks and records are on the disk. Raises OSError."""
        own = {name for group in self._groups for name in self._names(self.writer, group)}
        for name, file in self._opened.items():
            if name in own:
                file.sync()

    def close(self) -> None:
        for file in self._opened.values():
            with contextlib.suppress(OSError):
                file.close()
        self._opened.clear()
        self._disk.close()
