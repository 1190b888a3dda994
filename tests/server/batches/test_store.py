"""The store of batches: each request is answered once, whenever the process is killed."""

from __future__ import annotations

import errno
import io
import json
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chairlift.errors import ConfigError, StorageError
from chairlift.server.openai.batches import (
    ACTIVE,
    BatchStore,
    FileRecord,
    answer_line,
    error_line,
    read_line,
    storage_error,
)
from chairlift.server.openai.batches import store as store_module

PATH = "/v1/completions"
DAY = 86_400


class Killed(BaseException):
    """The process ends here."""


class Mortal(BatchStore):
    """A store that is killed at a given write: before it, or when it is done."""

    def __init__(self, directory: Path, lives: int = 1 << 30) -> None:
        self.lives = lives
        super().__init__(directory)
        self._commits = self._database._commit
        self._database._commit = self._commit  # type: ignore[method-assign]

    def _point(self) -> None:
        self.lives -= 1
        if self.lives < 0:
            raise Killed

    def _around(self, write: Callable[[], None]) -> None:
        self._point()
        write()
        self._point()

    def _commit(self) -> None:
        if self.lives <= 0:
            self.lives = -1
            raise Killed
        self._commits()
        self._point()

    def _move_content(self, part: Path, record: FileRecord) -> None:
        self._around(lambda: BatchStore._move_content(self, part, record))

    def _remove(self, path: Path) -> None:
        self._around(lambda: BatchStore._remove(self, path))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BatchStore]:
    made = BatchStore(tmp_path / "kept")
    yield made
    made.close()


def requests(count: int, **changes: Any) -> bytes:
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": PATH, "body": {"prompt": str(i)}, **changes}
        for i in range(count)
    ]
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


def add(store: BatchStore, content: bytes, owner: str = "") -> FileRecord:
    return store.add_file(io.BytesIO(content), "in.jsonl", "batch", owner=owner, now=100)


def begin(store: BatchStore, content: bytes) -> str:
    batch = store.add_batch(add(store, content), PATH, now=100, seconds=DAY, window="24h")
    store.begin(batch.id, 101, 10_000)
    return batch.id


def written(store: BatchStore, batch_id: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of the output and the error file of a batch that has ended."""
    batch = store.batch(batch_id)
    assert batch is not None and batch.status not in ACTIVE
    ids = (batch.output_file_id, batch.error_file_id)
    return tuple(
        [json.loads(line) for line in store.path(each).read_bytes().splitlines()] if each else [] for each in ids
    )


def answer_all(store: BatchStore, batch_id: str, good: Callable[[int], bool] = lambda line: True) -> None:
    batch = store.batch(batch_id)
    assert batch is not None
    while found := store.pending(batch_id, 0, 2):
        for pending in found:
            name = read_line(store.read(batch.input_file_id, pending), PATH).custom_id
            assert store.record(batch_id, pending.line, answer_line(name, 200, "q", b"{}"), good(pending.line))


def test_a_batch_passes_through_its_states_in_order(store: BatchStore) -> None:
    bad = b'{"custom_id": "r0", "method": "POST", "url": "/v1/completions", "body": {}}\nnonsense\n\n' + b"x" * 20_000
    batch_id = begin(store, requests(3) + bad)
    batch = store.batch(batch_id)
    assert batch is not None and (batch.status, batch.total, batch.failed, batch.completed) == ("in_progress", 6, 3, 0)
    assert [each.line for each in store.pending(batch_id, 1, 10)] == [2, 3]
    answer_all(store, batch_id, lambda line: line != 2)
    assert not store.record(batch_id, 1, b"again\n", True), "an answer is kept once"
    store.finalize(batch_id, 102)
    store.finish(batch_id, "completed", 103)
    batch = store.batch(batch_id)
    assert batch is not None and (batch.completed, batch.failed, batch.completed_at) == (2, 4, 103)
    output, errors = written(store, batch_id)
    assert [each["custom_id"] for each in output] == ["r0", "r2"]
    assert [each["custom_id"] for each in errors] == ["r1", "r0", None, None]
    codes = [each["error"]["code"] for each in errors if each["error"]]
    assert codes == ["duplicate_custom_id", "invalid_json_line", "line_too_long"]
    assert [each["error"]["line"] for each in errors if each["error"]] == [4, 5, 7]
    assert not store.record(batch_id, 1, b"late\n", True)
    names = [record.filename for record in store.files("", limit=9)]
    assert names == [f"{batch_id}_error.jsonl", f"{batch_id}_output.jsonl", "in.jsonl"]


@pytest.mark.parametrize(("status", "code"), [("cancelled", "batch_cancelled"), ("expired", "batch_expired")])
def test_requests_without_an_answer_get_the_reason(store: BatchStore, status: str, code: str) -> None:
    batch_id = begin(store, requests(3))
    store.record(batch_id, 2, answer_line("r1", 200, "q", b"{}"), True)
    store.cancel(batch_id, 105)
    store.finish(batch_id, status, 106)
    output, errors = written(store, batch_id)
    assert [each["custom_id"] for each in output] == ["r1"]
    assert [(each["custom_id"], each["error"]["code"]) for each in errors] == [("r0", code), ("r2", code)]


def test_a_file_without_requests_fails_its_batch(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_REQUESTS", 2)
    for content, code in ((b"\n \n", "empty_file"), (requests(3), "too_many_requests")):
        batch = store.batch(begin(store, content))
        assert batch is not None and batch.status == "failed" and json.loads(batch.errors)[0]["code"] == code
        assert not store.pending(batch.id, 0, 9)


def test_files_and_batches_are_their_owners(store: BatchStore) -> None:
    mine, other = add(store, requests(1), "me"), add(store, requests(1), "you")
    batch = store.add_batch(mine, PATH, now=1, seconds=DAY, window="24h")
    assert store.file(mine.id, "me") and not store.file(mine.id, "you") and not store.file(mine.id, "")
    assert store.batch(batch.id, "me") and not store.batch(batch.id, "you")
    assert [each.id for each in store.files("you", limit=9)] == [other.id]
    assert not store.batches("you", limit=9) and store.num_files("me") == 1


def test_lists_come_in_pages(store: BatchStore) -> None:
    ids = [add(store, b"x").id for _ in range(5)]
    assert [each.id for each in store.files("", limit=2)] == [ids[4], ids[3]]
    assert [each.id for each in store.files("", after=ids[3], limit=9)] == [ids[2], ids[1], ids[0]]
    assert [each.id for each in store.files("", after=ids[3], limit=9, newest_first=False)] == [ids[4]]
    assert not store.files("", after="file-unknown", limit=9)
    batches = [store.add_batch(add(store, b"x"), PATH, now=1, seconds=1, window="24h").id for _ in range(3)]
    assert [each.id for each in store.batches("", after=batches[2], limit=9)] == batches[1::-1]


def test_files_expire_unless_a_batch_reads_them(store: BatchStore) -> None:
    source = store.add_file(io.BytesIO(requests(1)), "in", "batch", owner="", now=1, expires_at=50)
    batch = store.add_batch(source, PATH, now=1, seconds=DAY, window="24h", output_seconds=10)
    store.begin(batch.id, 2, 1000)
    store.expire_files(60)
    assert store.file(source.id, "") and store.reader_of(source.id) == batch.id
    answer_all(store, batch.id)
    store.finish(batch.id, "completed", 70)
    store.expire_files(79)
    assert [each.expires_at for each in store.files("", limit=9)] == [80]
    store.expire_files(80)
    assert not store.files("", limit=9) and not list((store.path("x").parent).iterdir())


def test_a_file_in_the_place_of_the_directory_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file: it is not a directory; give another --batch-dir"):
        BatchStore(tmp_path / "file")


def test_a_directory_is_one_servers(tmp_path: Path) -> None:
    first = BatchStore(tmp_path)
    with pytest.raises(ConfigError, match="another server uses"):
        BatchStore(tmp_path)
    first.close()
    BatchStore(tmp_path).close()
    db = sqlite3.connect(tmp_path / "batches.sqlite3")
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ConfigError, match="format 99"):
        BatchStore(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="give another --batch-dir"):
        BatchStore(tmp_path / "file")


def work(store: BatchStore) -> None:
    """Run a store as a server does, from its start until all batches have ended and an expired file is deleted."""
    found = store.files("", purpose="batch", limit=9)
    if not any(each.filename == "in.jsonl" for each in found) and not store.batches("", limit=9):
        add(store, requests(3) + b"bad\n")
    if not store.batches("", limit=9):
        store.add_batch(store.files("", limit=1)[0], PATH, now=1, seconds=DAY, window="24h")
    for batch in store.active():
        store.begin(batch.id, 2, 1000)
        answer_all(store, batch.id, lambda line: line != 3)
        store.finalize(batch.id, 3)
        store.finish(batch.id, "completed", 4)
    for record in store.files("", purpose="batch", limit=9):
        store.delete_file(record.id)


def test_each_request_is_answered_once_whichever_write_is_the_last(tmp_path: Path) -> None:
    """The process is killed at every point of every life; a second kill follows the first after as many writes."""
    for first in range(40):
        folder = tmp_path / str(first)
        num_lives, lives = 0, first
        while True:
            num_lives += 1
            store = Mortal(folder, lives)
            try:
                work(store)
            except Killed:
                store.close()
                lives = first if num_lives == 1 else 1 << 30
                continue
            break
        (batch,) = store.batches("", limit=9)
        assert (batch.status, batch.total, batch.completed, batch.failed) == ("completed", 4, 2, 2)
        output, errors = written(store, batch.id)
        assert [each["custom_id"] for each in output] == ["r0", "r1"]
        assert [each["custom_id"] for each in errors] == ["r2", None]
        kept = {record.id for record in store.files("", limit=9)}
        assert kept == {batch.output_file_id, batch.error_file_id}
        assert {path.name for path in store.path("x").parent.iterdir()} == kept
        store.close()
        if num_lives == 1:
            assert first > 10, "there are more writes than that"
            return
    raise AssertionError("the work has no end")


def test_a_disk_that_fails_leaves_nothing_half_done(store: BatchStore, monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id = begin(store, requests(2))
    with monkeypatch.context() as patch:

        def full(part: Path, record: FileRecord) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(store, "_move_content", full)
        answer_all(store, batch_id)
        with pytest.raises(OSError, match="No space"):
            store.finish(batch_id, "completed", 5)
        with pytest.raises(OSError, match="No space"):
            add(store, b"x")
    assert len(list(store.path("x").parent.iterdir())) == 1
    store.finish(batch_id, "completed", 6)
    assert [each["custom_id"] for each in written(store, batch_id)[0]] == ["r0", "r1"]
    assert error_line("x", "a", "b").endswith(b"\n")


class Full(BatchStore):
    """A store whose files end on a full disk, as long as ``is_full``."""

    is_full = True

    def part(self) -> Path:
        part = super().part()
        if self.is_full:
            part.symlink_to("/dev/full")
        return part


def test_an_error_of_the_disk_says_whether_there_is_no_room(tmp_path: Path) -> None:
    store = Full(tmp_path)
    with pytest.raises(OSError, match="No space") as file:
        add(store, b"x" * 100_000)
    store.is_full = False
    batch_id = begin(store, requests(2))
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(sqlite3.Error, match="full") as database:
        store.record(batch_id, 1, b"x" * 100_000, True)
    for caught in (file, database):
        found = storage_error(caught.value, "the directory")
        assert found.is_full and "full" in str(found)
    store._db.execute(f"PRAGMA max_page_count = {pages + 1000}")
    assert store.record(batch_id, 1, b"x" * 100_000, True), "the failed transaction is undone, and the store goes on"
    assert list(tmp_path.glob("files/*.part")) == []
    read_only = storage_error(OSError(errno.EROFS, "Read-only file system"), "the directory")
    assert not read_only.is_full and "only be read" in str(read_only)
    store.close()


def test_the_size_of_all_files_and_answers_is_limited(tmp_path: Path) -> None:
    store = BatchStore(tmp_path, max_bytes=200_000)
    batch_id = begin(store, requests(3))
    record = add(store, b"x" * 60_000)
    used = store.num_bytes()
    assert 60_000 < used < 140_000
    with pytest.raises(
        StorageError, match=f"have {used:,} bytes, and at most 200,000 .* 140,000 more: delete"
    ) as caught:
        add(store, b"x" * 140_000)
    assert caught.value.is_quota and caught.value.is_full
    with pytest.raises(StorageError, match="an answer has 150,000 more"):
        store.record(batch_id, 1, b"x" * 150_000, True)
    store.delete_file(record.id)
    assert store.record(batch_id, 1, b"x" * 70_000, True)
    before = store.num_bytes()
    store.record(batch_id, 2, b"x" * 10_000, True)
    store.record(batch_id, 3, b"x", True)
    store.finish(batch_id, "completed", 6)
    assert store.num_bytes() < before + 40_000, "rows of answers are gone when the output file has them"
    store.close()
