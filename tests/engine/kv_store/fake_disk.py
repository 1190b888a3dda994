"""A disk for tests: it tears, loses and reorders writes at a crash, and damages, misdirects or refuses reads and
writes. Pristine bytes are kept, and damage is done to what is read (as in TigerBeetle's simulator)."""

from __future__ import annotations

import dataclasses
import errno
import random

__all__ = ["FakeDisk", "FakeFile", "Faults"]

_SECTOR = 512


@dataclasses.dataclass(slots=True)
class Faults:
    """Probabilities of faults, each from 0 to 1."""

    flip: float = 0.0
    """A bit of a read is flipped."""
    misdirect: float = 0.0
    """A read returns the bytes from another place of the file."""
    short: float = 0.0
    """A read returns fewer bytes."""
    read_error: float = 0.0
    write_error: float = 0.0
    """A write fails, perhaps after a part of it."""
    sync_error: float = 0.0
    stray: float = 0.0
    """A write goes to another place of the file, which then has the wrong bytes."""


class FakeDisk:
    """Files in memory. :meth:`crash` ends all processes that use it; what was not synced is then lost in part."""

    def __init__(self, rng: random.Random, faults: Faults | None = None) -> None:
        self.rng = rng
        self.faults = faults or Faults()
        self.files: dict[str, bytearray] = {}
        self.times: dict[str, float] = {}
        self.unsynced: list[tuple[str, int, bytes]] = []
        """(file, offset, bytes that were there before) of each write since the last sync, oldest first."""
        self.locks: set[str] = set()
        self.num_faults = 0
        self.now = 0.0

    def happens(self, probability: float) -> bool:
        found = self.rng.random() < probability
        self.num_faults += found
        return found

    def open(self, name: str, nbytes: int | None = None) -> FakeFile:
        if nbytes is None:
            if name not in self.files:
                raise FileNotFoundError(errno.ENOENT, "no such file", name)
        else:
            known = self.files.setdefault(name, bytearray())
            del known[nbytes:]
            known.extend(bytes(nbytes - len(known)))
            self.times[name] = self.now
        return FakeFile(self, name)

    def create(self, name: str, data: bytes) -> None:
        if name in self.files:
            raise FileExistsError(errno.EEXIST, "there is such a file", name)
        self.files[name] = bytearray(data)
        self.times[name] = self.now

    def lock(self, name: str) -> bool:
        self.files.setdefault(name, bytearray())
        if name in self.locks:
            return False
        self.locks.add(name)
        return True

    def unlock(self, name: str) -> None:
        self.locks.discard(name)

    def sizes(self) -> dict[str, int]:
        return {name: len(data) for name, data in self.files.items()}

    def written(self, name: str) -> float:
        return self.times.get(name, 0.0)

    def remove(self, name: str) -> None:
        del self.files[name]

    def close(self) -> None:
        self.locks.clear()

    def crash(self) -> None:
        """Lose each write since the last sync, keep it, or keep some of its sectors."""
        for name, at, before in reversed(self.unsynced):
            fate = self.rng.random()
            if name not in self.files or fate < 0.4:
                continue
            sectors = range(0, len(before), _SECTOR)
            lost = sectors if fate < 0.7 else [start for start in sectors if self.rng.random() < 0.5]
            for start in lost:
                old = before[start : start + _SECTOR]
                self.files[name][at + start : at + start + len(old)] = old
        self.unsynced.clear()
        self.locks.clear()


class FakeFile:
    def __init__(self, disk: FakeDisk, name: str) -> None:
        self._disk = disk
        self._name = name

    def read(self, at: int, nbytes: int) -> bytes:
        disk = self._disk
        if disk.happens(disk.faults.read_error):
            raise OSError(errno.EIO, "input/output error")
        data = disk.files[self._name]
        if disk.happens(disk.faults.misdirect):
            at = disk.rng.randrange(max(1, len(data) // max(1, nbytes))) * nbytes
        found = bytearray(data[at : at + nbytes])
        if found and disk.happens(disk.faults.flip):
            place = disk.rng.randrange(len(found))
            found[place] ^= 1 << disk.rng.randrange(8)
        if found and disk.happens(disk.faults.short):
            del found[disk.rng.randrange(len(found)) :]
        return bytes(found)

    def write(self, at: int, data: bytes | memoryview) -> None:
        disk = self._disk
        content = disk.files[self._name]
        if disk.happens(disk.faults.stray):
            at = disk.rng.randrange(max(1, len(content) // max(1, len(data)))) * len(data)
        fails = disk.happens(disk.faults.write_error)
        if fails:
            data = bytes(data)[: disk.rng.randrange(len(data) + 1)]
        before = bytes(content[at : at + len(data)])
        disk.unsynced.append((self._name, at, before))
        content[at : at + len(data)] = data
        disk.times[self._name] = disk.now
        if fails:
            number = disk.rng.choice((errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT))
            raise OSError(number, "the disk failed")

    def sync(self) -> None:
        disk = self._disk
        if disk.happens(disk.faults.sync_error):
            raise OSError(errno.EIO, "input/output error")
        disk.unsynced = [each for each in disk.unsynced if each[0] != self._name]

    def close(self) -> None: ...
