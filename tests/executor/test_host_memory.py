"""Memory or a file for KV blocks, and the fewest copies that move them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chairlift.errors import ConfigError
from chairlift.executor.host_memory import host_memory, host_moves


def resident() -> int:
    """Bytes of memory that this process has touched."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_zero_and_taken_as_it_is_touched() -> None:
    before = resident()
    memory = host_memory(1 << 30)
    assert resident() - before < 1 << 27
    assert memory.nbytes == 1 << 30
    assert not memory[:: 1 << 24].any()
    memory[5] = 7
    assert memory[5] == 7


def test_a_file_has_no_name_and_its_space_is_reserved(tmp_path: Path) -> None:
    memory = host_memory(1 << 20, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert not memory.any()
    memory[:] = 9
    assert memory.sum() == 9 << 20
    mapped = Path("/proc/self/maps").read_text()
    assert str(tmp_path) in mapped


@pytest.mark.parametrize("directory", [None, "here"])
def test_no_bytes_need_no_file(directory: str | None, tmp_path: Path) -> None:
    assert host_memory(0, directory and str(tmp_path / directory)).nbytes == 0


def test_a_file_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, nbytes, reason in [("none", 10, "No such file"), ("file", 10, "Not a directory"), ("", 1 << 50, "")]:
        with pytest.raises(ConfigError, match=f"swap_directory is .*no file of {nbytes:,} bytes .*{reason}.*lower"):
            host_memory(nbytes, str(tmp_path / name))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_blocks_side_by_side_in_host_memory_are_one_run() -> None:
    triples = [(0, 5, 1), (1, 6, 2), (0, 4, 9), (0, 7, 3), (0, 6, 8), (0, 0, 4)]
    first, second = host_moves(triples)
    assert (first.group, first.hosts.tolist(), first.blocks.tolist()) == (0, [0, 4, 5, 6, 7], [4, 9, 1, 8, 3])
    assert first.runs() == [(slice(0, 1), slice(0, 1)), (slice(1, 5), slice(4, 8))]
    assert (second.group, second.runs()) == (1, [(slice(0, 1), slice(6, 7))])
    assert host_moves([]) == []
