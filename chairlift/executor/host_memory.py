"""Host memory for the KV of preempted requests, and copies of blocks from and to it. Needs no torch."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from chairlift.base.disk_space import reserve_space
from chairlift.errors import ConfigError
from chairlift.executor.pages import populate_pages

__all__ = ["HostBlocks", "HostMoves", "host_memory", "host_moves"]

_Bytes = npt.NDArray[np.uint8]


def host_memory(nbytes: int, directory: str | None = None) -> npt.NDArray[np.uint8]:
    """uint8 [nbytes], filled with zeros. The operating system allocates a page when it is first used.

    With a ``directory``, the memory is an unnamed file there, which disappears when the process ends. Its disk space is
    reserved now, because later writes to mapped memory cannot report a full disk. Raises ConfigError if there is not
    enough space.
    """
    if directory is None or nbytes == 0:
        try:
            return np.zeros(nbytes, dtype=np.uint8)
        except MemoryError:
            raise ConfigError(f"swap_space_bytes is {nbytes:,}, more than the system gives; lower it") from None
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            reserve_space(file.fileno(), nbytes)
            return np.asarray(np.memmap(file, dtype=np.uint8, mode="r+", shape=(nbytes,)))
    except OSError as error:
        raise ConfigError(
            f"swap_directory is {str(directory)!r}, but no file of {nbytes:,} bytes can be made there:"
            f" {error.strerror}; name another directory, lower swap_space_bytes, or leave swap_directory out"
        ) from None


@dataclasses.dataclass(frozen=True, slots=True)
class HostMoves:
    """Blocks of one cache group to copy, and for each the host block to or from which it is copied, ascending by host
    block."""

    group: int
    hosts: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]

    def parts(self, limit: int) -> list[HostMoves]:
        """The same copies, divided into objects of at most ``limit`` blocks."""
        starts = range(0, len(self.hosts), limit)
        return [HostMoves(self.group, self.hosts[i : i + limit], self.blocks[i : i + limit]) for i in starts]

    def runs(self) -> list[tuple[slice, slice]]:
        """(range of indices in ``blocks``, range of host blocks) of each run of consecutive host blocks. There are as
        few runs as possible."""
        cuts = [0, *(np.flatnonzero(np.diff(self.hosts) != 1) + 1).tolist(), len(self.hosts)]
        return [
            (slice(begin, end), slice(int(self.hosts[begin]), int(self.hosts[begin]) + end - begin))
            for begin, end in itertools.pairwise(cuts)
        ]


def host_moves(triples: Iterable[tuple[int, int, int]]) -> list[HostMoves]:
    """One object per cache group, made from triples (group, host block, block)."""
    ordered = sorted(triples)
    return [
        HostMoves(group, *np.array([entry[1:] for entry in entries], dtype=np.int64).T)
        for group, entries in itertools.groupby(ordered, key=lambda entry: entry[0])
    ]


class HostBlocks:
    """Copies blocks between the KV cache and host memory. ``caches`` has, per cache group, arrays [number of blocks,
    bytes of a block], one per layer or part. ``hosts`` has one array per cache group. Each of its rows is a host block:
    the block's bytes in all arrays of the group, one after another."""

    def __init__(self, caches: Sequence[Sequence[_Bytes]], hosts: Sequence[_Bytes]) -> None:
        self._pairs = [
            list(zip(arrays, np.split(host, np.cumsum([array.shape[1] for array in arrays])[:-1], axis=1), strict=True))
            for arrays, host in zip(caches, hosts, strict=True)
        ]

    def take(self, group: int, block: int) -> bytes:
        """The bytes of a cache block in all arrays of its group, one after another."""
        return b"".join(cache[block].tobytes() for cache, _ in self._pairs[group])

    def put(self, group: int, block: int, content: bytes) -> None:
        """Overwrite a cache block with the result of :meth:`take`."""
        whole = np.frombuffer(content, dtype=np.uint8)
        start = 0
        for cache, _ in self._pairs[group]:
            end = start + cache.shape[1]
            cache[block] = whole[start:end]
            start = end

    def prepare(self, nbytes: int) -> None:
        """Have the memory of the first blocks of all groups allocated, at most ``nbytes``. Any thread may call it."""
        arrays = [cache for pairs in self._pairs for cache, _ in pairs]
        share = min(1.0, nbytes / max(1, sum(cache.nbytes for cache in arrays)))
        for cache in arrays:
            if not populate_pages(cache[: int(len(cache) * share)]):
                return

    def swap_out(self, saved: Iterable[tuple[int, int, int]]) -> None:
        """Copy cache blocks to host memory. ``saved`` has (group, block, host block) for each block."""
        for moves in host_moves((group, host, block) for group, block, host in saved):
            for cache, host in self._pairs[moves.group]:
                host[moves.hosts] = cache[moves.blocks]

    def swap_in(self, loaded: Iterable[tuple[int, int, int]]) -> None:
        """Copy saved blocks back to the cache. ``loaded`` has (group, host block, block) for each block."""
        for moves in host_moves(loaded):
            for cache, host in self._pairs[moves.group]:
                cache[moves.blocks] = host[moves.hosts]
