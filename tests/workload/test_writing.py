from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from chairlift.workload.writing import replacing


def test_a_full_disk_leaves_what_was_there_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(OSError, match=r"result\.json") as raised, replacing(path) as file:
            file.write("x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert raised.value.filename == str(path)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["result.json"]


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:

    def write() -> None:
        with replacing(tmp_path / "result.json") as file:
            file.write("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert os.listdir(tmp_path) == []


def test_a_link_is_written_through(tmp_path: Path) -> None:
    """/dev/stdout is one, and must stay what it is."""
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with replacing(tmp_path / "link") as file:
        file.write("all")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "all"
