"""A real server on a free port, a fake engine that reports a state and computes nothing, and a client that sends
exactly the given bytes."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextvars import ContextVar
from typing import Any

import uvloop
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from chairlift.cli.commands import LIVE_COMPARISON
from chairlift.config import EngineConfig, ServerConfig
from chairlift.engine.async_engine import EngineState
from chairlift.engine.info import EngineInfo
from chairlift.engine.intake import Intake
from chairlift.engine.served_adapters import ServedAdapters
from chairlift.metrics.stats import RequestStats
from chairlift.server.http.auth import load_keys
from chairlift.server.http.http_protocol import HttpLimits, HttpServer
from chairlift.server.http.lifecycle import bind
from chairlift.server.http.limits import read_json
from chairlift.server.http.state import ServerState
from tests.server.fake_engine import FakeReplicas

PATIENCE = 60.0
"""Seconds after which a test that waits fails."""

INFO = EngineInfo(
    model="tiny",
    model_dir="",
    vocab_size=256,
    max_model_len=4096,
    eos_token_ids=(0,),
    capacity_tokens=43_008,
    pool_tokens=43_008,
    block_size=16,
    num_blocks=2688,
    max_num_seqs=64,
    max_num_batched_tokens=2048,
    dtype="bfloat16",
    device="cpu",
    kernels="avx512",
    threads=2,
    memory_plan="43,008 tokens of KV cache",
    held=False,
    deterministic=True,
    fingerprint="fp_0123456789",
)


class StateOnlyEngine:
    """An engine with only the attribute that the HTTP layer uses: its state."""

    def __init__(self, state: EngineState = EngineState.READY) -> None:
        self.state = state
        self.failure = ""
        self.adapters = ServedAdapters(lambda: None, lambda: None, enabled=False)
        self.info: EngineInfo | None = INFO
        self.stats = RequestStats()
        self.stopped = asyncio.Event()
        self.loaded: asyncio.Future[None] | None = None
        self.trouble = ""
        self.num_requests = self.num_queued = 0
        self.replicas = FakeReplicas()
        self.service_classes = None
        self.intake = Intake(256, 65_536)
        self.max_queued_requests, self.max_queued_tokens = 256, 65_536
        self.num_shutdowns = 0

    def check_health(self) -> str:
        return self.trouble

    def retry_after(self) -> float:
        return 7.2

    async def wait_ready(self) -> None:
        if self.loaded is not None:
            await asyncio.shield(self.loaded)
        self.state = EngineState.READY

    async def shutdown(self) -> None:
        self.num_shutdowns += 1
        self.state = EngineState.STOPPED
        self.stopped.set()

    def die(self, failure: str) -> None:
        self.state, self.failure = EngineState.STOPPED, failure
        self.stopped.set()


def make_state(engine: Any = None, **settings: Any) -> ServerState:
    config = ServerConfig(**settings)
    return ServerState(
        config, engine or StateOnlyEngine(), ("tiny",), api_keys=load_keys(config), comparison=LIVE_COMPARISON
    )


class Endpoints:
    """Fake HTTP endpoints for tests. Each records the requests that it receives."""

    def __init__(self) -> None:
        self.num_waiting = self.num_cancelled = 0
        self.arrived = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.go_on = asyncio.Event()
        self.read_timeout = 30.0
        self.routes = [
            Route("/v1/echo", self.echo, methods=["POST"]),
            Route("/v1/wait", self.wait, methods=["GET", "POST"]),
            Route("/v1/stream", self.stream, methods=["GET"]),
            Route("/v1/models", self.models, methods=["GET"]),
        ]

    async def echo(self, request: Request) -> Response:
        return Response(json.dumps(await read_json(request, timeout=self.read_timeout)), media_type="application/json")

    async def wait(self, request: Request) -> Response:
        self.num_waiting += 1
        self.arrived.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            self.cancelled.set()
            raise
        finally:
            self.num_waiting -= 1
        return Response(b"done")

    async def stream(self, request: Request) -> Response:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"first "
            await self.wait(request)
            yield b"last"

        return StreamingResponse(pieces())

    async def models(self, request: Request) -> Response:
        return Response(b"[]", media_type="application/json")


@dataclasses.dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """Body of the response, which must be an OpenAI error object."""
        content = self.json()
        assert set(content) == {"error"}
        assert set(content["error"]) == {"message", "type", "param", "code"}
        assert self.headers["content-type"] == "application/json"
        assert self.headers["x-request-id"]
        error: dict[str, Any] = content["error"]
        return error


_opened: ContextVar[contextlib.AsyncExitStack] = ContextVar("_opened")
"""Exit stack on which a test registers its resources. :func:`run` sets it, and closes the resources at the end of the
test."""


class Connection:
    """A client's end of a connection. It is closed no later than at the end of the test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        connection = cls(*await asyncio.open_connection("127.0.0.1", port))
        if opened := _opened.get(None):
            opened.push_async_callback(connection.close)
        return connection

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def get(self, path: str, *headers: str, method: str = "GET", host: str | None = "localhost") -> None:
        lines = [f"{method} {path} HTTP/1.1", *([] if host is None else [f"Host: {host}"]), *headers]
        self.send("\r\n".join([*lines, "", ""]).encode("latin-1"))

    def post(self, path: str, body: bytes, *headers: str, kind: str | None = "application/json") -> None:
        kinds = [] if kind is None else [f"Content-Type: {kind}"]
        self.get(path, *kinds, f"Content-Length: {len(body)}", *headers, method="POST")
        self.send(body)

    async def head(self) -> tuple[int, dict[str, str]]:
        raw = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENCE)
        status, *lines = raw.decode("latin-1").split("\r\n")
        pairs = [line.split(": ", 1) for line in lines if line]
        return int(status.split(" ")[1]), {name.lower(): value for name, value in pairs}

    async def reply(self, *, has_body: bool = True) -> Reply:
        status, headers = await self.head()
        body = b""
        if "content-length" in headers and has_body:
            body = await asyncio.wait_for(self.reader.readexactly(int(headers["content-length"])), PATIENCE)
        elif has_body:
            while chunk := await self.chunk():
                body += chunk
        return Reply(status, headers, body)

    async def chunk(self) -> bytes:
        size = int(await asyncio.wait_for(self.reader.readline(), PATIENCE), 16)
        data = await asyncio.wait_for(self.reader.readexactly(size + 2), PATIENCE)
        return data[:-2]

    async def is_closed(self) -> bool:
        """Wait until the server closes the connection. Fails if bytes arrive before that."""
        try:
            return await asyncio.wait_for(self.reader.read(1), PATIENCE) == b""
        except ConnectionError:
            return True

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


class Client:
    """Opens connections to one server, and closes all of them at the end."""

    def __init__(self, port: int, server: HttpServer) -> None:
        self.port, self.server = port, server
        self._open: list[Connection] = []

    async def connect(self) -> Connection:
        connection = await Connection.open(self.port)
        self._open.append(connection)
        return connection

    async def raw(self, data: bytes) -> Reply:
        connection = await self.connect()
        connection.send(data)
        return await connection.reply()

    async def get(self, path: str, *headers: str, method: str = "GET", host: str | None = "localhost") -> Reply:
        connection = await self.connect()
        connection.get(path, *headers, method=method, host=host)
        return await connection.reply(has_body=method != "HEAD")

    async def post(self, path: str, body: bytes, *headers: str, kind: str | None = "application/json") -> Reply:
        connection = await self.connect()
        connection.post(path, body, *headers, kind=kind)
        return await connection.reply()

    async def close(self) -> None:
        for connection in self._open:
            await connection.close()


@contextlib.asynccontextmanager
async def serving(
    app: ASGIApp, limits: HttpLimits | None = None, on_refused: Callable[[int], None] | None = None
) -> AsyncIterator[Client]:
    server = HttpServer(app, limits, on_refused)
    sock = bind(ServerConfig(port=0), ())
    await server.start(sock)
    client = Client(sock.getsockname()[1], server)
    try:
        yield client
    finally:
        await client.close()
        await server.close(PATIENCE)
        assert not server.requests()
        assert not server.state.connections


def run(test: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine on the event loop that ``chairlift serve`` uses, with a time limit."""

    async def limited() -> None:
        async with contextlib.AsyncExitStack() as opened:
            _opened.set(opened)
            await asyncio.wait_for(test, 6 * PATIENCE)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(limited())


async def until(condition: Callable[[], bool]) -> None:
    """Run the event loop until the condition holds."""

    async def turns() -> None:
        while not condition():
            await asyncio.sleep(0)

    await asyncio.wait_for(turns(), PATIENCE)


Start = Callable[[EngineConfig, ServerConfig, Callable[[str, float], None]], Any]
Handler = Callable[[Request], Awaitable[Response]]
