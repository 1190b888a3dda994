"""Host memory for the KV of preempted requests, and copies of blocks. Needs no torch."""

from __future__ import annotations

import dataclasses
import itertools
import os
import tempfile
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from chairlift.errors import ConfigError

__all__ = ["HostBlocks", "HostMoves", "host_memory", "host_moves"]

_Bytes = npt.NDArray[np.uint8]


def host_memory(nbytes: int, directory: str | None = None) -> npt.NDArray[np.uint8]:
    """uint8 [nbytes], zero. The system allocates pages when they are first used.

    With a ``directory`` it is an unnamed file there, which is deleted with the process. Its space is reserved now,
    because a write to mapped memory cannot report a full disk. Raises ConfigError when that fails.
    """
    if directory is None or nbytes == 0:
        try:
            return np.zeros(nbytes, dtype=np.uint8)
        except MemoryError:
            raise ConfigError(f"swap_space_bytes is {nbytes:,}, more than the system gives; lower it") from None
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return np.asarray(np.memmap(file, dtype=np.uint8, mode="r+", shape=(nbytes,)))
    except OSError as error:
        raise ConfigError(
            f"swap_directory is {str(directory)!r}, but no file of {nbytes:,} bytes can be made there:"
            f" {error.strerror}; name another directory, lower swap_space_bytes, or leave swap_directory out"
        ) from None


@dataclasses.dataclass(frozen=True, slots=True)
class HostMoves:
    """Blocks of one cache group and their host blocks, in the order of the host blocks."""

    group: int
    hosts: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]

    def parts(self, most: int) -> list[HostMoves]:
        """The same moves in parts of at most ``most``."""
        starts = range(0, len(self.hosts), most)
        return [HostMoves(self.group, self.hosts[i : i + most], self.blocks[i : i + most]) for i in starts]

    def runs(self) -> list[tuple[slice, slice]]:
        """(entries of ``blocks``, host blocks) in the fewest parts whose host blocks are contiguous."""
        cuts = [0, *(np.flatnonzero(np.diff(self.hosts) != 1) + 1).tolist(), len(self.hosts)]
        return [
            (slice(begin, end), slice(int(self.hosts[begin]), int(self.hosts[begin]) + end - begin))
            for begin, end in itertools.pairwise(cuts)
        ]


def host_moves(triples: Iterable[tuple[int, int, int]]) -> list[HostMoves]:
    """Groups (group, host block, block) triples, in any order, by cache group."""
    ordered = sorted(triples)
    return [
        HostMoves(group, *np.array([entry[1:] for entry in entries], dtype=np.int64).T)
        for group, entries in itertools.groupby(ordered, key=lambda entry: entry[0])
    ]


class HostBlocks:
    """Copies between KV in memory and its host blocks. Per group, ``caches`` are arrays [number of blocks, bytes of a
    block], and ``hosts`` has the bytes of all of them side by side."""

    def __init__(self, caches: Sequence[Sequence[_Bytes]], hosts: Sequence[_Bytes]) -> None:
        self._pairs = [
            list(zip(arrays, np.split(host, np.cumsum([array.shape[1] for array in arrays])[:-1], axis=1), strict=True))
            for arrays, host in zip(caches, hosts, strict=True)
        ]

    def swap_out(self, saved: Iterable[tuple[int, int, int]]) -> None:
        """Save blocks in host memory: (group, block, host block)."""
        for moves in host_moves((group, host, block) for group, block, host in saved):
            for cache, host in self._pairs[moves.group]:
                host[moves.hosts] = cache[moves.blocks]

    def swap_in(self, wanted: Iterable[tuple[int, int, int]]) -> None:
        """Copy saved blocks back: (group, host block, block)."""
        for moves in host_moves(wanted):
            for cache, host in self._pairs[moves.group]:
                cache[moves.blocks] = host[moves.hosts]
