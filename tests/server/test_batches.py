"""Files and batches over HTTP, as the official client uses them; the engine is scripted, the store is real."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.testclient import TestClient

from chairlift.base.service_class import parse_service_classes
from chairlift.engine.async_engine import EngineState
from chairlift.errors import EngineDeadError
from chairlift.server.http.app import make_app
from chairlift.server.openai.batches import BatchStore
from chairlift.server.openai.batches import worker as batch_worker
from chairlift.server.openai.batches.worker import BatchWorker
from tests.server.fake_engine import FakeEngine, make_state

TEXT = "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
KEYS = "admin a-key\nbob b-key\n"


class Kept:
    """A server that keeps batches, and its client."""

    def __init__(self, directory: Path, engine: FakeEngine | None = None, key: str = "", **settings: Any) -> None:
        self.engine = engine or FakeEngine()
        self.engine.service_classes = parse_service_classes("")
        self.state = make_state(self.engine, batch_dir=str(directory), **settings)
        self.worker = self.state.batches = BatchWorker(self.state, BatchStore(directory))
        self.app = make_app(self.state)
        self._key = key

    def __enter__(self) -> Kept:
        self.http = TestClient(self.app, base_url="http://localhost", raise_server_exceptions=False)
        self.http.__enter__()
        self.client = self.as_(self._key)
        self._run: Future[None] | None = None
        return self

    def as_(self, key: str) -> openai.OpenAI:
        made: Any = self.http
        return openai.OpenAI(base_url="http://localhost/v1", api_key=key or "none", http_client=made, max_retries=0)

    def work(self) -> None:
        """Begin to answer."""
        assert self.http.portal is not None
        self._run = self.http.portal.start_task_soon(self.worker.run, self.app)

    def wait(self, ready: Callable[[], bool]) -> None:
        for _ in range(20_000):
            if ready():
                return
            self.http.get("/health")  # gives the loop a turn
        raise AssertionError("it does not come")

    def ended(self, batch_id: str) -> Any:
        self.wait(lambda: self.client.batches.retrieve(batch_id).status in ENDED)
        return self.client.batches.retrieve(batch_id)

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.client.files.content(file_id).content.splitlines()] if file_id else []

    def batch(self, content: bytes, endpoint: Any = TEXT) -> str:
        source = self.client.files.create(file=("in.jsonl", content), purpose="batch")
        made = self.client.batches.create(input_file_id=source.id, endpoint=endpoint, completion_window="24h")
        assert made.status == "validating"
        return made.id

    def __exit__(self, *_: Any) -> None:
        self.state.draining = True
        self.http.portal.call(self.worker.wake)  # type: ignore[union-attr]
        if self._run is not None:
            self._run.result(60)
        self.http.__exit__()
        self.worker.close()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    with Kept(tmp_path) as made:
        yield made


def line(name: str, url: str = TEXT, **body: Any) -> bytes:
    longest = "max_output_tokens" if url == "/v1/responses" else "max_tokens"
    fields = {"custom_id": name, "method": "POST", "url": url, "body": {longest: 3, **body}}
    return json.dumps(fields).encode() + b"\n"


def test_a_batch_is_answered_in_the_class_that_can_wait(kept: Kept) -> None:
    content = b"".join(line(f"r{i}", prompt=f"number {i}", seed=i) for i in range(20))
    bad = line("long", prompt="x", max_tokens=5000) + line("twice", prompt="x")[:-2] + b"\nnonsense\n"
    bad += b'{"custom_id": "two", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "prompt": "y"}}\n'
    refused = {"stream": True, "priority": -5, "service_tier": "priority", "deadline_ms": 5}
    bad += b"".join(line(name, prompt="x", **{name: value}) for name, value in refused.items())
    batch_id = kept.batch(content + bad)
    kept.work()
    batch = kept.ended(batch_id)
    assert (batch.status, batch.endpoint, batch.model) == ("completed", TEXT, "fake")
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (28, 20, 8)
    assert kept.engine.stats.batch_requests == {"completed": 20, "failed": 6}  # two lines are no requests
    output, errors = kept.lines(batch.output_file_id), kept.lines(batch.error_file_id)
    assert [each["custom_id"] for each in output] == [f"r{i}" for i in range(20)]
    for i, each in enumerate(output):
        alone = kept.client.completions.create(model="fake", prompt=f"number {i}", seed=i, max_tokens=3)
        body = each["response"]["body"]
        assert (each["response"]["status_code"], each["error"]) == (200, None)
        assert body["choices"][0]["text"] == alone.choices[0].text and body["service_tier"] == "flex"
        assert each["response"]["request_id"] == f"{batch_id}-{i + 1}"
    assert [each["custom_id"] for each in errors] == ["long", None, None, "two", *refused]
    assert [each["response"] and each["response"]["status_code"] for each in errors] == [400, None, None, *[400] * 5]
    params = [each["response"]["body"]["error"]["param"] for each in errors[-4:]]
    assert params == list(refused)
    assert {service.service_class for service in kept.engine.services[:20]} == {"flex"}
    assert batch.in_progress_at and batch.completed_at and batch.expires_at - batch.created_at == 86_400


def test_requests_that_the_model_cannot_answer_get_an_error_line(kept: Kept) -> None:
    chat, embed = "/v1/chat/completions", "/v1/embeddings"
    chats = kept.batch(line("c", chat, messages=[{"role": "user", "content": "Hi"}]), chat)
    embeddings = kept.batch(line("e", embed, input="Hi"), embed)
    kept.work()
    (answer,) = kept.lines(kept.ended(chats).output_file_id)
    assert answer["response"]["body"]["object"] == "chat.completion"
    (refused,) = kept.lines(kept.ended(embeddings).error_file_id)
    assert refused["response"]["status_code"] == 400 and "message" in refused["response"]["body"]["error"]


def test_responses_are_answered_as_alone_and_kept_only_on_demand(kept: Kept) -> None:
    url = "/v1/responses"
    content = line("plain", url, input="Hi", seed=1)
    content += line("kept", url, input=[{"role": "user", "content": "Ho"}], instructions="Be kind.", store=True)
    content += line("streamed", url, input="Hi", stream=True)
    batch_id = kept.batch(content, url)
    kept.work()
    batch = kept.ended(batch_id)
    plain, stored = (each["response"]["body"] for each in kept.lines(batch.output_file_id))
    alone = kept.client.responses.create(model="fake", input="Hi", max_output_tokens=3, extra_body={"seed": 1})
    assert plain["object"] == "response" and plain["service_tier"] == "flex"
    assert plain["output"][0]["content"][0]["text"] == alone.output_text
    assert (plain["store"], stored["store"]) == (False, True)
    assert kept.client.responses.retrieve(stored["id"]).id == stored["id"]
    with pytest.raises(openai.NotFoundError):
        kept.client.responses.retrieve(plain["id"])
    (refused,) = kept.lines(batch.error_file_id)
    assert (refused["custom_id"], refused["response"]["body"]["error"]["param"]) == ("streamed", "stream")


def test_files_are_kept_listed_and_deleted(kept: Kept) -> None:
    files = kept.client.files
    first = files.create(file=("../a .jsonl", io.BytesIO(b"one")), purpose="batch")
    second = files.create(
        file=("b.jsonl", b"two!"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (first.filename, first.bytes, first.purpose, first.expires_at) == ("a.jsonl", 3, "batch", None)
    assert second.expires_at == second.created_at + 3600
    assert [each.id for each in files.list()] == [second.id, first.id]
    assert [each.id for each in files.list(order="asc", limit=1)] == [first.id, second.id]
    assert files.retrieve(first.id) == first and files.content(second.id).content == b"two!"
    assert files.delete(first.id).deleted
    with pytest.raises(openai.NotFoundError, match="no file"):
        files.retrieve(first.id)
    with pytest.raises(openai.NotFoundError, match="no file"):
        files.content("file-none")
    batch = kept.client.batches.create(input_file_id=second.id, endpoint=TEXT, completion_window="24h")
    with pytest.raises(openai.BadRequestError, match=f"batch {batch.id} reads"):
        files.delete(second.id)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"k": 3}}, "metadata[...]"),
        ({"metadata": {f"k{i}": "v" for i in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "x", "seconds": 5000}}, "output_expires_after.anchor"),
    ],
)
def test_an_impossible_batch_is_refused(kept: Kept, fields: dict[str, Any], param: str) -> None:
    source = kept.client.files.create(file=b"{}", purpose="batch")
    good = {"input_file_id": source.id, "endpoint": TEXT, "completion_window": "24h"}
    reply = kept.http.post("/v1/batches", json={**good, **fields})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text


def test_a_malformed_upload_is_refused(tmp_path: Path) -> None:
    with Kept(tmp_path, max_batch_file_bytes=1024) as kept:

        def post(**request: Any) -> tuple[int, str]:
            reply = kept.http.post("/v1/files", **request)
            return reply.status_code, reply.json()["error"]["code"]

        good = {"data": {"purpose": "batch"}, "files": {"file": ("a", b"x")}}
        assert post(json={}) == (415, "unsupported_media_type")
        assert post(**{**good, "data": {"purpose": "assistants"}}) == (400, "invalid_value")
        assert post(data={"purpose": "batch"}, files={"x": ("a", b"x")}) == (400, "missing_required_parameter")
        assert post(**{**good, "data": {"purpose": "batch", "other": "x"}}) == (400, "unsupported_parameter")
        assert post(**{**good, "data": {"purpose": "batch", "expires_after[seconds]": "5"}}) == (400, "invalid_value")
        kind = {"content-type": "multipart/form-data; boundary=x"}
        assert post(content=b"--y\r\nnothing", headers=kind) == (400, "invalid_form")
        assert post(**{**good, "files": {"file": ("a", b"x" * 70_000)}}) == (413, "file_too_large")

        def pieces() -> Iterator[bytes]:
            yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
            yield from [b"y" * 10_000] * 10
            yield b"\r\n--x--\r\n"

        assert post(content=pieces(), headers=kind) == (413, "file_too_large")
        assert not kept.client.files.list().data


def test_without_a_directory_there_are_none() -> None:
    with TestClient(make_app(make_state()), base_url="http://localhost") as http:
        for method, path in (
            ("GET", "/v1/files"),
            ("POST", "/v1/batches"),
            ("POST", "/v1/files"),
            ("GET", "/v1/batches/b"),
        ):
            reply = http.request(method, path)
            assert reply.status_code == 404 and "--batch-dir" in reply.json()["error"]["message"]


def test_keys_do_not_see_the_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEYS)
    with Kept(tmp_path / "kept", key="b-key", api_key_file=str(tmp_path / "keys")) as kept:
        source = kept.client.files.create(file=line("r", prompt="x"), purpose="batch")
        batch_id = kept.batch(line("r", prompt="x"))
        other = kept.as_("a-key")
        for ask in (
            lambda: other.files.retrieve(source.id),
            lambda: other.files.content(source.id),
            lambda: other.files.delete(source.id),
            lambda: other.batches.retrieve(batch_id),
            lambda: other.batches.cancel(batch_id),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        with pytest.raises(openai.BadRequestError, match="a file of yours"):
            other.batches.create(input_file_id=source.id, endpoint=TEXT, completion_window="24h")
        assert not other.files.list().data and not other.batches.list().data
        assert [each.id for each in kept.client.batches.list()] == [batch_id]
        kept.work()
        kept.ended(batch_id)
        assert [service.tenant for service in kept.engine.services] == ["bob"]
        kept.client.completions.create(model="fake", prompt="x")
        salts = [more["cache_salt"] for _, _, more in kept.engine.submitted]
        assert salts[0] == salts[1] != "", "its own requests share its cache"


def test_a_key_that_is_gone_is_the_answer(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEYS)
    with Kept(tmp_path / "kept", key="b-key", api_key_file=str(tmp_path / "keys")) as kept:
        batch_id = kept.batch(line("r", prompt="x"))
    (tmp_path / "keys").write_text("admin a-key\n")
    with Kept(tmp_path / "kept", key="a-key", api_key_file=str(tmp_path / "keys")) as kept:
        kept.work()
        kept.wait(lambda: kept.worker.store.batch(batch_id).status == "completed")  # type: ignore[union-attr]
        batch = kept.worker.store.batch(batch_id)
        assert batch is not None and not kept.engine.submitted
        assert b"no longer" in kept.worker.store.path(str(batch.error_file_id)).read_bytes()


def test_a_restart_asks_what_has_no_answer_and_nothing_twice(tmp_path: Path) -> None:
    count = 12
    with Kept(tmp_path, batch_max_in_flight=3) as kept:
        kept.engine.gate, kept.engine.gate_after = asyncio.Event(), 0
        batch_id = kept.batch(b"".join(line(f"r{i}", prompt=str(i)) for i in range(count)))
        kept.work()
        kept.wait(lambda: kept.engine.num_requests == 3)
        assert kept.worker.num_in_flight == 3, "no more than may be"
        kept.http.portal.call(kept.engine.gate.set)  # type: ignore[union-attr]
        kept.wait(lambda: kept.client.batches.retrieve(batch_id).request_counts.completed >= 4)
        kept.engine.gate.clear()
        done = kept.client.batches.retrieve(batch_id).request_counts.completed
    with Kept(tmp_path) as kept:
        kept.work()
        batch = kept.ended(batch_id)
        assert batch.request_counts.completed == count
        assert [each["custom_id"] for each in kept.lines(batch.output_file_id)] == [f"r{i}" for i in range(count)]
        assert len(kept.engine.submitted) <= count - done


def test_a_cancelled_batch_ends_with_what_it_has(kept: Kept) -> None:
    kept.engine.gate = asyncio.Event()
    batch_id = kept.batch(line("a", prompt="x") + b"bad\n")
    kept.work()
    kept.wait(lambda: kept.engine.num_requests == 1)
    assert kept.client.batches.cancel(batch_id).status in ("cancelling", "cancelled")
    batch = kept.ended(batch_id)
    assert batch.status == "cancelled" and kept.engine.num_requests == 0 and batch.cancelled_at
    assert [each["error"]["code"] for each in kept.lines(batch.error_file_id)] == [
        "batch_cancelled",
        "invalid_json_line",
    ]
    assert kept.client.batches.cancel(batch_id).status == "cancelled"


def test_a_batch_whose_time_is_over_expires(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id = kept.batch(line("a", prompt="x"))
    kept.engine.state = EngineState.LOADING
    now = batch_worker.time.time()
    monkeypatch.setattr(batch_worker.time, "time", lambda: now + 86_401)
    kept.work()
    batch = kept.ended(batch_id)
    kept.engine.state = EngineState.READY
    assert batch.status == "expired"
    assert [each["error"]["code"] for each in kept.lines(batch.error_file_id)] == ["batch_expired"]


def test_a_full_queue_is_tried_again_and_is_no_answer(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_worker, "_MAX_DELAY", 0.0)
    kept.engine.full = True
    batch_id = kept.batch(line("a", prompt="x"))
    kept.work()
    kept.wait(lambda: len(kept.engine.room_asked) > 8)
    assert kept.client.batches.retrieve(batch_id).status == "in_progress"
    kept.engine.full = False
    assert kept.ended(batch_id).request_counts.completed == 1


def test_a_request_that_kills_the_engine_is_not_asked_for_ever(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_worker, "_MAX_DELAY", 0.0)
    kept.engine.failure_of_streams = EngineDeadError("it died")
    batch_id = kept.batch(line("a", prompt="x"))
    kept.work()
    batch = kept.ended(batch_id)
    (refused,) = kept.lines(batch.error_file_id)
    assert refused["response"]["status_code"] == 503 and len(kept.engine.submitted) == 5


def test_while_others_wait_one_request_goes_on(tmp_path: Path) -> None:
    with Kept(tmp_path, batch_max_in_flight=8) as kept:
        kept.engine.gate = asyncio.Event()
        kept.engine.num_queued = 1
        kept.batch(b"".join(line(f"r{i}", prompt=str(i)) for i in range(9)))
        kept.work()
        kept.wait(lambda: kept.engine.num_requests == 1)
        kept.http.portal.call(kept.worker.wake)  # type: ignore[union-attr]
        kept.http.get("/health")
        assert kept.worker.num_in_flight == 1
        kept.engine.num_queued = 0
        kept.http.portal.call(kept.worker.wake)  # type: ignore[union-attr]
        kept.wait(lambda: kept.engine.num_requests == 8)


def limit_pages(kept: Kept, more: int) -> None:
    """Let the database grow by at most ``more`` pages; further pages are a full disk for SQLite."""
    database = kept.worker.store._db
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    database.execute(f"PRAGMA max_page_count = {pages + more}")


def test_answers_wait_for_a_full_disk_and_are_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(batch_worker, "_FIRST_PAUSE", 0.0)
    monkeypatch.setattr(batch_worker, "_LONGEST_PAUSE", 0.0)
    tries: list[int] = []
    record = BatchStore.record

    def counted(self: BatchStore, batch: str, number: int, answer: bytes, good: bool) -> bool:
        tries.append(number)
        return record(self, batch, number, answer + b" " * 5000, good)

    monkeypatch.setattr(BatchStore, "record", counted)
    with Kept(tmp_path, batch_max_in_flight=2) as kept:
        batch_id = kept.batch(b"".join(line(f"r{i}", prompt=str(i)) for i in range(40)))
        kept.worker.store.begin(batch_id, 1, 1 << 20)
        kept.worker.store._db.execute("VACUUM")
        limit_pages(kept, 0)
        kept.work()
        kept.wait(lambda: len(tries) > 200)
        assert len(kept.engine.submitted) <= 4, "what cannot be stored is not computed"
        assert len([each for each in caplog.records if each.levelname == "ERROR"]) == 1
        assert "the disk of the directory of batches is full" in caplog.text and "Traceback" not in caplog.text
        limit_pages(kept, 1000)
        assert kept.ended(batch_id).request_counts.completed == 40
        assert len(kept.engine.submitted) == 40, "each request was computed once"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (OSError(28, "No space left on device"), 507, "insufficient_storage"),
        (OSError(30, "Read-only file system"), 503, "storage_unavailable"),
        (OSError(5, "Input/output error"), 503, "storage_unavailable"),
    ],
)
def test_clients_hear_that_the_disk_fails(
    kept: Kept,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: OSError,
    status: int,
    code: str,
) -> None:
    source = kept.client.files.create(file=line("r", prompt="x"), purpose="batch")

    def fail(*_: Any, **__: Any) -> None:
        raise error

    for name in ("add_file", "add_batch", "delete_file"):
        monkeypatch.setattr(BatchStore, name, fail)
    for _ in range(5):
        for ask in (
            lambda: kept.client.files.create(file=line("r", prompt="x"), purpose="batch"),
            lambda: kept.client.batches.create(input_file_id=source.id, endpoint=TEXT, completion_window="24h"),
            lambda: kept.client.files.delete(source.id),
        ):
            with pytest.raises(openai.APIStatusError) as refused:
                ask()
            body: Any = refused.value.body
            assert (refused.value.status_code, body["code"]) == (status, code) and "try again" in body["message"]
    assert len(caplog.records) == 1 and "Traceback" not in caplog.text


def test_a_full_directory_refuses_with_both_numbers_before_the_file_is_read(tmp_path: Path) -> None:
    with Kept(tmp_path) as kept:
        kept.worker.store._max_bytes = 300_000
        with pytest.raises(openai.APIStatusError, match="at most 300,000 are kept; the file has") as refused:
            kept.client.files.create(file=b"x" * 400_000, purpose="batch")
        assert refused.value.status_code == 507
        source = kept.client.files.create(file=line("r", prompt="x"), purpose="batch")
        assert [each.id for each in kept.client.files.list()] == [source.id]


def test_a_full_disk_for_temporary_files_is_no_mistake_of_the_server(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("starlette.formparsers.SpooledTemporaryFile", full)
    with pytest.raises(openai.APIStatusError, match="temporary files is full") as refused:
        kept.client.files.create(file=line("r", prompt="x"), purpose="batch")
    assert refused.value.status_code == 507


def test_an_input_file_that_the_disk_has_damaged_is_an_answer(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    batch_id = kept.batch(line("a", prompt="x") + line("b", prompt="y"))
    kept.worker.store.begin(batch_id, 1, 1 << 20)
    batch = kept.worker.store.batch(batch_id)
    assert batch is not None
    path = kept.worker.store.path(batch.input_file_id)
    path.write_bytes(path.read_bytes()[: len(line("a", prompt="x"))])
    kept.work()
    ended = kept.ended(batch_id)
    assert [each["custom_id"] for each in kept.lines(ended.output_file_id)] == ["a"]
    (damaged,) = kept.lines(ended.error_file_id)
    assert "has changed on the disk" in damaged["error"]["message"] and not caplog.text.count("Traceback")


def test_content_that_is_gone_from_the_disk_is_an_error_of_the_disk(kept: Kept) -> None:
    source = kept.client.files.create(file=line("r", prompt="x"), purpose="batch")
    kept.worker.store.path(source.id).unlink()
    with pytest.raises(openai.APIStatusError, match="its disk fails") as refused:
        kept.client.files.content(source.id)
    assert refused.value.status_code == 503
