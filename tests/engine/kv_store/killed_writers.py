"""Writers of a store that are killed (SIGKILL) at and in the middle of their writes, and what the next process finds.

    python -m tests.engine.kv_store.killed_writers --writers 1000

Each writer is a forked process that writes blocks until its failpoint. Then this process opens the directory: a block
that it can read must have the bytes of its key, and the blocks that were completed last must be there. Nothing imports
torch, so a writer takes milliseconds.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile

from chairlift.engine.kv_store.disk import DiskFile, OsDisk
from chairlift.engine.kv_store.files import StoreFiles, read_secret
from chairlift.engine.kv_store.store import KVStore

__all__ = ["run_writers"]

BLOCK, BYTES = 4, 3000
SLOTS, KEYS = 24, 100
_SURE = SLOTS // 2
"""Number of the blocks that were completed last that no later write may have overwritten."""
_FORGET = 128
"""Added to the number of a block that the writer forgets from now on."""


class _FailingDisk(OsDisk):
    """A directory whose process dies at the ``countdown``-th point: before, in the middle of and after each write, and
    at each sync."""

    def __init__(self, directory: str, countdown: int, rng: random.Random) -> None:
        super().__init__(directory)
        self.countdown = countdown
        self.rng = rng

    def open(self, name: str, nbytes: int | None = None) -> DiskFile:
        self.point()
        return _FailingFile(self, super().open(name, nbytes))

    def point(self) -> None:
        self.countdown -= 1
        if self.countdown == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class _FailingFile:
    def __init__(self, disk: _FailingDisk, file: DiskFile) -> None:
        self._disk = disk
        self._file = file

    def read(self, at: int, nbytes: int) -> bytes:
        return self._file.read(at, nbytes)

    def write(self, at: int, data: bytes | memoryview) -> None:
        self._disk.point()
        if self._disk.countdown == 1:
            self._file.write(at, memoryview(data)[: self._disk.rng.randrange(len(data))])
        self._disk.point()
        self._file.write(at, data)
        self._disk.point()

    def sync(self) -> None:
        self._disk.point()
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def _key(number: int) -> bytes:
    return number.to_bytes(4, "little") * 8


def _payload(number: int) -> bytes:
    return random.Random(number).randbytes(BYTES)


def _open(disk: OsDisk) -> KVStore:
    read_secret(disk, read_only=False)
    sizes = {"block_size": BLOCK, "block_bytes": [BYTES], "spans": [BLOCK]}
    files = StoreFiles(disk, "model", {}, nbytes=SLOTS * (BYTES + 512), **sizes)  # type: ignore[arg-type]
    return KVStore(files, 1e12, threaded=False)


def _write(directory: str, seed: int, told: int) -> None:
    """Write blocks until the failpoint, and tell the number of each block that is complete."""
    rng = random.Random(seed)
    store = _open(_FailingDisk(directory, rng.randrange(1, 200), rng))
    while True:
        is_new = False
        number = rng.randrange(KEYS)
        if rng.random() < 0.1:
            os.write(told, bytes([number + _FORGET]))
            store.forget(0, _key(number))
        elif is_new := store.wants(0, _key(number)):
            store.put(0, _key(number), _key(0), bytes(8 * BLOCK), _payload(number))
        while store.work():
            pass
        store.poll()
        if is_new and store.find(0, _key(number)) is not None:
            os.write(told, bytes([number]))


def _completed(reader: int) -> list[int]:
    """Numbers of the blocks that must be there, from what a writer has told."""
    known: dict[int, None] = {}
    while data := os.read(reader, 4096):
        for number in data:
            known.pop(number % _FORGET, None)
            if number < _FORGET:
                known[number] = None
    return list(known)[-_SURE:]


def _check(directory: str, completed: list[int]) -> int:
    """Read every block that can be found. Returns their number. Raises AssertionError for a wrong or a lost block."""
    store = _open(OsDisk(directory))
    names = [number for number in range(KEYS) if store.find(0, _key(number)) is not None]
    good = set()
    for number in names:
        found = store.find(0, _key(number))
        assert found is not None
        load = store.load([found])
        while not load.is_done:
            store.work()
        store.loaded(load)
        if load.blocks:
            assert load.blocks == [_payload(number)], f"block {number} has wrong bytes"
            good.add(number)
    for number in completed:
        assert number in good, f"block {number} was complete, and is lost"
    store.close()
    return len(good)


def run_writers(count: int, first_seed: int = 0) -> int:
    """Let so many writers die, one after another in one directory. Returns the number of blocks that were read."""
    num_read = 0
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o700)
        for seed in range(first_seed, first_seed + count):
            reader, writer = os.pipe()
            child = os.fork()
            if not child:
                try:
                    _write(directory, seed, writer)
                finally:
                    os._exit(1)
            os.close(writer)
            completed = _completed(reader)
            os.close(reader)
            _, status = os.waitpid(child, 0)
            assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, f"seed {seed}: {status}"
            num_read += _check(directory, completed)
            assert "torch" not in sys.modules
    return num_read


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writers", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=0)
    given = parser.parse_args()
    print(f"{given.writers} writers died, {run_writers(given.writers, given.first_seed)} blocks were read, none wrong")
