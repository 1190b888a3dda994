from __future__ import annotations

import os
import resource
import select
import stat
import tempfile
from pathlib import Path

import pytest

from chairlift.base.writing import check_writable, replacing
from chairlift.errors import ConfigError


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


def test_an_error_of_the_block_is_raised_unchanged(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="not a terminal"), replacing(tmp_path / "result.json"):
        raise OSError("not a terminal")


def test_a_folder_that_is_not_there_is_told_by_the_files_name(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "result.json"
    with pytest.raises(FileNotFoundError) as raised, replacing(path):
        pass
    assert raised.value.filename == str(path)


def test_an_interruption_leaves_nothing(tmp_path: Path) -> None:

    def write() -> None:
        with replacing(tmp_path / "result.json") as file:
            file.write("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert os.listdir(tmp_path) == []


def test_memory_is_no_device() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        with replacing(Path(folder, "result.json")) as file:
            assert os.listdir(folder) == ["result.json.part"]
            file.write("all")
        assert os.listdir(folder) == ["result.json"]


def test_a_replaced_file_keeps_its_mode(tmp_path: Path) -> None:
    """A file that only its owner may read stays so when it is replaced."""
    path = tmp_path / "result.json"
    path.write_text("before")
    path.chmod(0o600)
    with replacing(path) as file:
        assert stat.S_IMODE((tmp_path / "result.json.part").stat().st_mode) == 0o600
        file.write("all")
    assert path.read_text() == "all"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path: Path, there: bool) -> None:
    (tmp_path / "elsewhere").mkdir()
    file, link = tmp_path / "elsewhere" / "file", tmp_path / "link"
    link.symlink_to(Path("elsewhere", "file"))
    if there:
        file.write_text("before")

    def write(text: str, error: type[BaseException] | None = None) -> None:
        with replacing(link) as opened:
            opened.write(text)
            if error is not None:
                raise error

    with pytest.raises(KeyboardInterrupt):
        write("half", KeyboardInterrupt)
    assert (file.read_text() if file.exists() else None) == ("before" if there else None)
    write("all")
    assert link.is_symlink()
    assert file.read_text() == "all"
    assert os.listdir(file.parent) == ["file"]


def test_an_open_file_is_written_in_place(tmp_path: Path) -> None:
    """As /dev/stdout is: what it leads to must not become another file than the one that is open."""
    with (tmp_path / "file").open("w+") as opened:
        with replacing(Path("/proc/self/fd", str(opened.fileno()))) as file:
            file.write("all")
        assert opened.read() == "all"


def test_a_pipe_is_written_in_place(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with replacing(path) as file:
            file.write("all")
        assert os.read(reader, 10) == b"all"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_check_writable_changes_nothing(tmp_path: Path) -> None:
    file, link, pipe = tmp_path / "file", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to("not there")
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_writable(pipe, "json")
        poll = select.poll()
        poll.register(reader)
        assert poll.poll(0) == [], "a reader who was told of an end reads no more"
    finally:
        os.close(reader)
    for path in (file, link):
        check_writable(path, "json")
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]
    file.write_text("before")
    check_writable(file, "json")
    assert file.read_text() == "before"
    for path, words in ((tmp_path, "Is a directory"), (tmp_path / "a" / "b", "No such file"), (file / "x", "Not a")):
        with pytest.raises(ConfigError, match=f"cannot write {path}: {words}.*; give another --save-steps"):
            check_writable(path, "save-steps")


def test_a_file_with_two_uses_is_not_overwritten(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("an hour of traffic")
    link.symlink_to(file)
    for path, other in ((file, file), (link, str(file)), (tmp_path / "new", tmp_path / "new")):
        with pytest.raises(ConfigError, match="is read or written for something else, too; give another --json"):
            check_writable(path, "json", None, other)
    check_writable(Path(os.devnull), "json", os.devnull)
    check_writable(file, "json", tmp_path / "other")
    assert file.read_text() == "an hour of traffic"
