"""A server that handles each request as a test's script says: raw HTTP on a loopback port, in its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

__all__ = ["Exchange", "ScriptedServer", "answer", "event", "serving", "usage"]

PATIENCE = 120.0


@dataclasses.dataclass
class Exchange:
    """One POST request, with methods to respond to it."""

    number: int
    """Index of the request among all POSTs, from 0."""
    body: dict[str, Any]
    seen: float
    """Time at which the request's headers had arrived, on the clock of ``time.perf_counter``."""
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    left: bool = False
    """Whether the client closed its connection while the script waited in :meth:`until_left`."""

    @property
    def words(self) -> int:
        """Number of words in a text prompt."""
        messages = self.body.get("messages")
        return len((messages[0]["content"] if messages else self.body["prompt"]).split())

    def head(self, status: str = "200 OK", kind: str = "text/event-stream", more: str = "") -> None:
        """Send the headers of the response. The body is chunked."""
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n{more}\r\n"
        self.writer.write(head.encode())

    def chunk(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        self.chunk(b"")

    def refuse(self, status: str, message: str) -> None:
        """Respond with an OpenAI error."""
        self.head(status, "application/json")
        self.chunk(json.dumps({"error": {"message": message, "code": "scripted"}}).encode())
        self.end()

    async def until_left(self) -> None:
        self.left = await asyncio.wait_for(self.reader.read(), PATIENCE) == b""


Script = Callable[[Exchange], Awaitable[None]]


def event(value: Any) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def usage(prompt: int, completion: int, cached: int | None = None) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": prompt, "completion_tokens": completion, **details}


async def answer(exchange: Exchange) -> None:
    """Send the number of tokens that the request asks for, and the parts that its stream options ask for."""
    body, prompt = exchange.body, exchange.body.get("prompt")
    read = len(prompt) if isinstance(prompt, list) else exchange.words
    options = body.get("stream_options", {})
    exchange.head()
    for number in range(1, body["max_tokens"] + 1):
        last = number == body["max_tokens"]
        piece = {"delta": {"content": "x"}} if "messages" in body else {"text": "x"}
        told = {"choices": [piece | {"finish_reason": "length" if last else None}]}
        if options.get("continuous_usage_stats"):
            told["usage"] = usage(read, number)  # type: ignore[assignment]
        exchange.chunk(event(told))
    if options.get("include_usage"):
        exchange.chunk(event({"choices": [], "usage": usage(read, body["max_tokens"])}))
    exchange.chunk(event(b"[DONE]"))
    exchange.end()


class ScriptedServer:
    """A server that responds to /v1/models and, if it has ``metrics``, to /metrics, and runs a script for every POST.
    ``exchanges`` are all POSTs so far."""

    def __init__(
        self,
        script: Script = answer,
        *,
        name: str = "scripted",
        owner: str = "a test",
        room: int | None = 4096,
        key: str = "",
        metrics: str = "",
    ) -> None:
        self.script = script
        self.url = ""
        self.exchanges: list[Exchange] = []
        self.failures: list[BaseException] = []
        self._card = {"id": name, "object": "model", "owned_by": owner}
        self._card |= {} if room is None else {"max_model_len": room}  # type: ignore[dict-item]
        self._key = key
        self._metrics = metrics
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    def stop_listening(self) -> None:
        """Refuse connections from now on. A script may call this."""
        if self._server is not None:
            self._server.close()

    def start(self) -> threading.Thread:
        self._server = self._loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        thread.start()
        return thread

    def stop(self, thread: threading.Thread) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(PATIENCE)
        self._loop.call_soon_threadsafe(self._loop.stop)
        thread.join(PATIENCE)
        self._loop.close()

    async def _close(self) -> None:
        self.stop_listening()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (ConnectionError, asyncio.CancelledError, asyncio.IncompleteReadError):
            pass
        except BaseException as error:
            self.failures.append(error)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        seen = time.perf_counter()
        method, path, _ = head.split("\r\n")[0].split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head.split("\r\n")[1:])}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        exchange = Exchange(len(self.exchanges), json.loads(body or b"{}"), seen, reader, writer)
        if self._key and headers.get("authorization") != f"Bearer {self._key}":
            exchange.refuse("401 Unauthorized", "a key, please")
        elif path == "/v1/models":
            exchange.head(kind="application/json")
            exchange.chunk(json.dumps({"data": [self._card]}).encode())
            exchange.end()
        elif path == "/metrics" and self._metrics:
            exchange.head(kind="text/plain")
            exchange.chunk(self._metrics.encode())
            exchange.end()
        elif method == "POST" and path in ("/v1/completions", "/v1/chat/completions"):
            self.exchanges.append(exchange)
            await self.script(exchange)
        else:
            exchange.refuse("404 Not Found", f"no {path} here")
        with contextlib.suppress(ConnectionError):
            await writer.drain()


@contextlib.contextmanager
def serving(server: ScriptedServer) -> Iterator[ScriptedServer]:
    thread = server.start()
    try:
        yield server
    finally:
        server.stop(thread)
    assert not server.failures
