"""Host memory for the KV of preempted requests, and how blocks move there and back. Needs no torch."""

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
    """uint8 [nbytes], zero. Memory comes from the system page by page, as it is touched.

    With a ``directory`` it is a file there, which has no name and vanishes with the process; its space is reserved now,
    because a full disk is no error that a write to mapped memory could report. Raises ConfigError when that fails.
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
    """Blocks of one cache group and where they lie in host memory, in the order of the latter."""

    group: int
    hosts: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]

    def parts(self, most: int) -> list[HostMoves]:
        """The same moves, at most ``most`` at a time."""
        starts = range(0, len(self.hosts), most)
        return [HostMoves(self.group, self.hosts[i : i + most], self.blocks[i : i + most]) for i in starts]

    def runs(self) -> list[tuple[slice, slice]]:
        """The fewest (entries of ``blocks``, host blocks) such that the host blocks of each lie side by side."""
        cuts = [0, *(np.flatnonzero(np.diff(self.hosts) != 1) + 1).tolist(), len(self.hosts)]
        return [
            (slice(begin, end), slice(int(self.hosts[begin]), int(self.hosts[begin]) + end - begin))
            for begin, end in itertools.pairwise(cuts)
        ]


def host_moves(triples: Iterable[tuple[int, int, int]]) -> list[HostMoves]:
    """(group, host block, block) in any order -> all moves of a group together."""
    ordered = sorted(triples)
    return [
        HostMoves(group, *np.array([entry[1:] for entry in entries], dtype=np.int64).T)
        for group, entries in itertools.groupby(ordered, key=lambda entry: entry[0])
    ]


class HostBlocks:
    """Copies between KV in memory and its host blocks. Per group, ``caches`` are arrays [number of blocks, bytes of a
    block], and ``hosts`` has the same bytes of all of them side by side."""

    def __init__(self, caches: Sequence[Sequence[_Bytes]], hosts: Sequence[_Bytes]) -> None:
        self._pairs = [
            list(zip(arrays, np.split(host, np.cumsum([array.shape[1] for array in arrays])[:-1], axis=1), strict=True))
            for arrays, host in zip(caches, hosts, strict=True)
        ]

    def swap_out(self, saved: Iterable[tuple[int, int, int]]) -> None:
        """(group, block, host block) to save in host memory."""
        for moves in host_moves((group, host, block) for group, block, host in saved):
            for cache, host in self._pairs[moves.group]:
                host[moves.hosts] = cache[moves.blocks]

    def swap_in(self, wanted: Iterable[tuple[int, int, int]]) -> None:
        """(group, host block, block) to bring back."""
        for moves in host_moves(wanted):
            for cache, host in self._pairs[moves.group]:
                cache[moves.blocks] = host[moves.hosts]
