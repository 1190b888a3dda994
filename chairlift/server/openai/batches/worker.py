"""Sends the requests of batches to the application, a few at a time, in the class of service ``flex``.

A request of a batch passes the same checks and endpoint as a client's request. If the queue is full or the engine
died, the request is sent again later. All progress is stored in the
:class:`~chairlift.server.openai.batches.BatchStore`, so after a restart of the server the unanswered requests are sent
again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import sqlite3
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

import msgspec
from starlette.types import ASGIApp, Message, Scope

from chairlift.config import ServerConfig
from chairlift.engine.async_engine import EngineState
from chairlift.errors import StorageError
from chairlift.server.http.auth import INTERNAL_CALLER, caller_of
from chairlift.server.http.state import ServerState
from chairlift.server.openai.batches import (
    BadLine,
    BatchRecord,
    BatchStore,
    Pending,
    answer_line,
    error_line,
    read_line,
    storage_error,
)

__all__ = ["BatchWorker", "open_store", "working"]

_LOADED_AT_ONCE: Final = 64
"""Number of requests that are read from the store at a time, per batch."""
_CHECK_SECONDS: Final = 1.0
"""Seconds between checks of conditions that have no event: deadlines, the state of the engine, the queue length."""
_FIRST_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 60.0
"""Seconds for which the batch worker pauses after a disk error. The pause is as long as the error has lasted, within
these limits."""
_LOG_SECONDS: Final = 60.0
"""Minimum number of seconds between two log lines about disk errors."""
_MAX_ATTEMPTS: Final = 5
"""Maximum number of attempts to send a request, if the engine dies or the request times out. After the last attempt,
the error is stored as the request's result."""
_MAX_DELAY: Final = 30.0
_T = TypeVar("_T")
_log: Final = logging.getLogger("chairlift.server")


def open_store(config: ServerConfig) -> BatchStore | None:
    """The batch store from the settings; None if no directory is set. Raises ConfigError."""
    return None if config.batch_dir is None else BatchStore(config.batch_dir, config.max_batch_dir_bytes)


@contextlib.asynccontextmanager
async def working(state: ServerState, app: ASGIApp) -> AsyncIterator[None]:
    """Context manager: process batches while the block runs, if the server has a batch store. Closes the store at the
    end."""
    if state.batches is None:
        yield
        return
    task = asyncio.create_task(state.batches.run(app), name="batches")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        state.batches.close()


@dataclasses.dataclass(slots=True)
class _Work:
    """State of one batch while it is processed."""

    queue: deque[Pending] = dataclasses.field(default_factory=deque)
    reached: int = 0
    """Number of the last line of the batch's input file that was read from the store."""
    tasks: dict[int, asyncio.Task[None]] = dataclasses.field(default_factory=dict)
    """Line number in the input file -> task that runs the line's request."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Reply:
    status: int
    request_id: str
    body: bytes
    retry_after: float


class _Disk:
    """State of the disk as the batch worker sees it: since when it fails, and what was logged. ``clock`` returns
    seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failing_since: float | None = None
        self._logged_at = -math.inf

    @property
    def is_failing(self) -> bool:
        """Whether the worker's newest write failed."""
        return self._failing_since is not None

    def failed(self) -> float:
        """Note that the worker could not write or read. Returns the seconds to wait before the next try."""
        if self._failing_since is None:
            self._failing_since = self._clock()
        return min(_LONGEST_PAUSE, max(_FIRST_PAUSE, self._clock() - self._failing_since))

    def worked(self) -> None:
        """Note that the worker could write or read."""
        if self._failing_since is not None:
            _log.info("batches go on after %.0f s without a disk", self._clock() - self._failing_since)
            self._failing_since = None

    def log(self, error: StorageError, cause: Exception | None) -> None:
        """Log an error, unless one was logged a short time ago."""
        if self._clock() - self._logged_at >= _LOG_SECONDS:
            self._logged_at = self._clock()
            _log.error("batches: %s%s", error, "" if cause is None else f" ({cause})")


class BatchWorker:
    """Processes the batches of one server. All methods run on one event loop; calls of the store run on one thread."""

    def __init__(self, state: ServerState, store: BatchStore) -> None:
        self.store = store
        self.uploads = asyncio.Semaphore(2)
        """Limits concurrent file uploads to two."""
        self._state = state
        self._thread = ThreadPoolExecutor(1, "batches")
        self._works: dict[str, _Work] = {}
        self._news = asyncio.Event()
        self._disk = _Disk()

    async def call(self, work: Callable[[BatchStore], _T]) -> _T:
        """Run ``work`` with the store, on the store's thread. Raises StorageError if the directory is full or its disk
        fails."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, self.store)
        except (OSError, sqlite3.Error) as error:
            found = storage_error(error, "the directory of batches")
            self._disk.log(found, error)
            raise found from error

    async def _surely(self, work: Callable[[BatchStore], _T]) -> _T:
        """Run ``work`` with the store, again after growing pauses until the disk takes it. So an answer that was
        computed is not computed again because it could not be stored."""
        while True:
            try:
                found = await self.call(work)
            except StorageError as error:
                self._disk.log(error, None)
                await asyncio.sleep(self._disk.failed())
            else:
                self._disk.worked()
                return found

    def wake(self) -> None:
        """Tell the worker that a batch or its status has changed."""
        self._news.set()

    def close(self) -> None:
        """Close the store after its current call."""
        self._thread.shutdown(wait=True)
        self.store.close()

    @property
    def num_in_flight(self) -> int:
        """Number of running batch requests."""
        return sum(len(work.tasks) for work in self._works.values())

    async def run(self, app: ASGIApp) -> None:
        """Run until the server drains. After the next start, unanswered requests are sent again."""
        try:
            while not self._state.draining:
                try:
                    await self._turn(app)
                except StorageError as error:
                    self._disk.log(error, None)
                    await self._rest(self._disk.failed())
                else:
                    await self._wait_for_news(_CHECK_SECONDS)
        finally:
            await self._stop([task for work in self._works.values() for task in work.tasks.values()])

    async def _wait_for_news(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), seconds)
        self._news.clear()

    async def _rest(self, seconds: float) -> None:
        """Wait for ``seconds``, or until the server drains. News do not end the pause."""
        end = time.monotonic() + seconds
        while not self._state.draining and (left := end - time.monotonic()) > 0:
            await self._wait_for_news(left)

    async def _write(self, work: Callable[[BatchStore], _T]) -> _T:
        """Run ``work`` with the store as :meth:`call` does, and note that the disk works."""
        found = await self.call(work)
        self._disk.worked()
        return found

    async def _turn(self, app: ASGIApp) -> None:
        now = int(time.time())
        await self.call(lambda store: store.expire_files(now))
        active = await self.call(lambda store: store.active())
        for batch in active:
            await self._advance(batch, now)
        self._works = {batch.id: self._works[batch.id] for batch in active if batch.id in self._works}
        if self._state.engine.state is EngineState.READY:
            await self._fill([batch for batch in active if batch.status == "in_progress"], app)

    async def _advance(self, batch: BatchRecord, now: int) -> None:
        """Change the status of a batch if the conditions for its next status are met."""
        work = self._works.setdefault(batch.id, _Work())
        if batch.status == "validating":
            longest = self._state.max_body_bytes + (1 << 16)
            await self._write(lambda store: store.begin(batch.id, now, longest))
            self.wake()
            return
        end = "completed"
        if batch.status == "cancelling" or now >= batch.expires_at:
            end = "cancelled" if batch.status == "cancelling" else "expired"
            work.queue.clear()
            await self._stop(list(work.tasks.values()))
        elif batch.status == "in_progress":
            if work.tasks or await self._more(batch, work):
                return
            await self._write(lambda store: store.finalize(batch.id, now))
        await self._write(lambda store: store.finish(batch.id, end, now))
        del self._works[batch.id]
        _log.info("batch %s: %s", batch.id, end)

    async def _more(self, batch: BatchRecord, work: _Work) -> bool:
        """Load further requests of a batch from the store into the batch's queue. Returns whether the batch has a
        request to send."""
        if not work.queue:
            reached = work.reached
            found = await self.call(lambda store: store.pending(batch.id, reached, _LOADED_AT_ONCE))
            work.queue += (each for each in found if each.line not in work.tasks)
            work.reached = found[-1].line if found else reached
        return bool(work.queue)

    async def _fill(self, batches: list[BatchRecord], app: ASGIApp) -> None:
        """Send requests of the batches in turn, up to the limit. While other clients' requests wait for the engine,
        only one batch request runs. While the disk fails, no request is sent, because its answer could not be
        stored."""
        info = self._state.engine.info
        engine = self._state.engine
        rows = 1 if info is None else info.max_num_seqs
        limit = self._state.config.batch_max_in_flight or max(1, rows // 2)
        started = not self._disk.is_failing
        while started:
            started = False
            for batch in batches:
                work = self._works.setdefault(batch.id, _Work())
                if self.num_in_flight >= (1 if engine.num_queued else limit) or not await self._more(batch, work):
                    continue
                self._start(batch, work, work.queue.popleft(), app)
                started = True

    def _start(self, batch: BatchRecord, work: _Work, pending: Pending, app: ASGIApp) -> None:
        task = asyncio.create_task(self._answer(batch, pending, app), name=f"{batch.id}-{pending.line}")
        work.tasks[pending.line] = task
        task.add_done_callback(lambda task: self._ended(work, pending, task))

    def _ended(self, work: _Work, pending: Pending, task: asyncio.Task[None]) -> None:
        work.tasks.pop(pending.line, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("line %d of a batch is sent again: %s", pending.line, error, exc_info=error)
            work.queue.clear()
            work.reached = 0  # start again at the first unanswered line
            return  # retry at the next check, not at once
        self.wake()

    async def _stop(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- one request ---------------------------------------------------------------------------------------------

    async def _answer(self, batch: BatchRecord, pending: Pending, app: ASGIApp) -> None:
        """Send a request, with retries, until there is a final response, and store the response."""
        content = await self._surely(lambda store: store.read(batch.input_file_id, pending))
        try:
            line = read_line(content, batch.endpoint)
        except BadLine as error:  # it was valid when the batch began
            message = f"the input file has changed on the disk: {error}"
            await self._refuse(batch, pending, error_line(error.custom_id, error.code, message, line=pending.line))
            return
        caller = caller_of(self._state.api_keys, batch.owner)
        if caller is None:
            message = "the API key that created the batch is no longer one of this server's"
            lost = error_line(line.custom_id, "invalid_api_key", message, line=pending.line)
            await self._refuse(batch, pending, lost)
            return
        scope = _scope(batch.endpoint, line.body, f"{batch.id}-{pending.line}")
        scope[INTERNAL_CALLER] = {
            "caller": dataclasses.replace(caller, request_id=f"{batch.id}-{pending.line}"),
            "is_batch": True,
        }
        attempts = 0
        while True:
            reply = await _ask(app, dict(scope), line.body)
            if reply.status not in (429, 503):
                break
            attempts += reply.status == 503
            if attempts >= _MAX_ATTEMPTS:
                break
            await asyncio.sleep(reply.retry_after)
            while self._state.engine.state is not EngineState.READY:
                await asyncio.sleep(_CHECK_SECONDS)
        answer = answer_line(line.custom_id, reply.status, reply.request_id, reply.body)
        good = 200 <= reply.status < 300
        await self._surely(lambda store: store.record(batch.id, pending.line, answer, good))
        self._state.engine.stats.batch_requests["completed" if good else "failed"] += 1

    async def _refuse(self, batch: BatchRecord, pending: Pending, answer: bytes) -> None:
        """Store an error as the result of a request that is not sent."""
        await self._surely(lambda store: store.record(batch.id, pending.line, answer, False))
        self._state.engine.stats.batch_requests["failed"] += 1


def _scope(path: str, body: bytes, request_id: str) -> dict[str, Any]:
    headers = [
        (b"host", b"localhost"),
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"x-request-id", request_id.encode()),
    ]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
    }


async def _ask(app: ASGIApp, scope: Scope, body: bytes) -> _Reply:
    """Send a request to the application without HTTP, and return the response."""
    given = False
    status = 500
    headers = dict[bytes, bytes]()
    parts = list[bytes]()

    async def receive() -> Message:
        nonlocal given
        if given:
            await asyncio.Event().wait()  # there is no client that could disconnect
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update(message["headers"])
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    content = b"".join(parts)
    if not content:
        content = msgspec.json.encode({"error": {"message": "the server gave no answer", "type": "server_error"}})
    wait = headers.get(b"retry-after", b"1")
    seconds = min(_MAX_DELAY, float(wait)) if wait.isdigit() else 1.0
    return _Reply(status, headers.get(b"x-request-id", b"").decode("latin-1"), content, seconds)
