"""Pages of memory that are allocated before their first use."""

from __future__ import annotations

import mmap
import resource
import sys

import numpy as np
import pytest

from chairlift.executor.host_memory import HostBlocks
from chairlift.executor.pages import populate_pages

_PAGES = 2048


def _memory() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(mmap.mmap(-1, _PAGES * mmap.PAGESIZE), dtype=np.uint8)


def _faults_of_use(memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    """Number of pages that are allocated while every page is written."""
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    memory[:: mmap.PAGESIZE] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def test_populated_pages_are_there_and_keep_their_content() -> None:
    memory = _memory()
    memory[5:9] = 3, 4, 5, 6
    if populate_pages(memory[7:]):  # begins in the middle of a page
        assert memory[5:9].tolist() == [3, 4, 5, 6]
        assert _faults_of_use(memory) < _PAGES // 20


def test_at_most_so_many_bytes_of_the_first_blocks_are_prepared() -> None:
    caches = [_memory().reshape(64, -1) for _ in range(2)]
    blocks = HostBlocks([caches], [np.zeros((0, 2 * caches[0].shape[1]), dtype=np.uint8)])
    blocks.prepare(caches[0].nbytes)  # half of all
    if populate_pages(_memory()):
        for cache in caches:
            assert _faults_of_use(cache[:32].reshape(-1)) < _PAGES // 40
    blocks.prepare(1 << 40)
    blocks.put(0, 63, bytes(range(256)) * (2 * caches[0].shape[1] // 256))
    assert blocks.take(0, 63)[:4] == bytes(range(4))


def test_other_systems_populate_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not populate_pages(_memory())


def test_memory_that_cannot_be_populated_stays_as_it_is() -> None:
    memory = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ), dtype=np.uint8)
    assert not populate_pages(memory) and not memory.any()
