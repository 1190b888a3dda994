"""Space of files: the way of Linux, and that of macOS with a function that stands for the system's."""

from __future__ import annotations

import errno
import os
import struct
import tempfile
from pathlib import Path

import pytest

from chairlift.base import disk_space
from chairlift.base.disk_space import reserve_space

SIZE = 1 << 20


def test_a_file_gets_its_space_and_keeps_its_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    with path.open("r+b") as file:
        reserve_space(file.fileno(), SIZE)
        reserve_space(file.fileno(), 10)  # smaller: nothing changes
    assert path.stat().st_size == SIZE
    assert path.stat().st_blocks * 512 >= SIZE
    assert path.read_bytes() == b"content".ljust(SIZE, b"\0")


def test_macos_reserves_what_is_missing(tmp_path: Path) -> None:
    calls = []

    def control(descriptor: int, command: int, argument: bytes) -> bytes:
        calls.append((command, struct.unpack("=Iiqqq", argument)))
        os.posix_fallocate(descriptor, os.fstat(descriptor).st_size, SIZE)
        return argument

    path = tmp_path / "file"
    with path.open("w+b") as file:
        file.write(b"content")
        file.flush()
        os.fsync(file.fileno())
        before = os.fstat(file.fileno()).st_blocks * 512
        disk_space._by_fcntl(file.fileno(), SIZE, control)
        disk_space._by_fcntl(file.fileno(), SIZE, control)
    assert calls == [(42, (4, 3, 0, SIZE - before, 0))]
    assert path.stat().st_size >= SIZE
    assert path.read_bytes()[:8] == b"content\0"


def test_macos_reports_a_full_disk() -> None:
    def full(descriptor: int, command: int, argument: bytes) -> bytes:
        raise OSError(errno.ENOSPC, "no space")

    with tempfile.TemporaryFile() as file:
        with pytest.raises(OSError, match="no space"):
            disk_space._by_fcntl(file.fileno(), SIZE, full)
        assert os.fstat(file.fileno()).st_size == 0
