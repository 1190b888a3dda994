"""HTTP/1.1 on a socket: uvicorn's protocol with limits on everything that a client can send without end.

A connection that exceeds a limit gets one OpenAI error object and is closed. Timers run only for connections in a phase
that has to end. When a client disconnects, the task of its request is cancelled at once.

This file overrides internals of uvicorn. Since uvicorn may change them, pyproject.toml limits its version, and
tests/server/test_uvicorn_internals.py fails when they change.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import fcntl
import logging
import secrets
import socket
import struct
import termios
import time
from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Final, cast

import httptools
import msgspec
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState as UvicornState

from chairlift.server.errors import ApiError, error_body

__all__ = ["HttpLimits", "HttpProtocol", "HttpServer"]

_PIECE: Final = 2048
"""Bytes given to the parser at a time while it reads headers, so that it cannot exceed the limits by much."""

_LEAST_READ: Final = 1 << 16
"""Least bytes that a client must read in each ``stall_timeout`` while more are waiting for it."""

_LOOKS: Final = 4
"""Checks per ``stall_timeout`` of how much a client has read, so that no client gets much more time."""

_MOST_UNSENT: Final = 1 << 17
"""Bytes that the kernel buffers for a client that does not read. Its default would be megabytes per connection."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits of a connection. Times in seconds, sizes in bytes."""

    max_connections: int = 2048
    max_url_bytes: int = 8 * 1024
    max_header_bytes: int = 16 * 1024
    """Names and values of all headers of a request, trailers included."""
    max_headers: int = 64
    header_timeout: float = 10.0
    """Time from the connection, or the first byte of a later request, to the end of its headers."""
    idle_timeout: float = 75.0
    """Time between an answer and the next request."""
    linger_timeout: float = 2.0
    """Time for a client to stop sending after an early answer. Closing at once would lose the answer."""
    stall_timeout: float = 60.0
    """Time for a client to read 64 KiB of the waiting bytes, or all of them if fewer. They may be an answer, its end,
    or a part of a stream."""
    max_ignored_bytes: int = 64 * 1024 * 1024


class HttpServer:
    """A listening socket and its connections.

    ``on_refused`` is called with the status of each request that is refused before the application gets it; 503 means
    too many connections.
    """

    def __init__(
        self, app: ASGIApp, limits: HttpLimits | None = None, on_refused: Callable[[int], None] | None = None
    ) -> None:
        self.limits = limits or HttpLimits()
        self.state = UvicornState()
        self.config = uvicorn.Config(
            cast(Any, app),
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
        )
        self.config.load()
        self.config.timeout_keep_alive = cast(int, self.limits.idle_timeout)
        self._on_refused = on_refused
        self._server: asyncio.Server | None = None
        self._date = 0
        self._all_closed = asyncio.Event()

    async def start(self, sock: socket.socket) -> None:
        """Accept connections on a bound socket. From now on this server owns it."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(AttributeError, OSError):  # not on every system; connections inherit it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MOST_UNSENT)
        self._server = await loop.create_server(lambda: HttpProtocol(self), sock=sock, backlog=2048)

    def requests(self) -> set[asyncio.Task[None]]:
        """Tasks of all requests whose answer is not finished."""
        return {task for task in self.state.tasks if not task.done()}

    async def close(self, timeout: float) -> None:
        """Stop listening. Close all connections when their data is sent, or after ``timeout`` seconds."""
        if self._server is not None:
            self._server.close()
        for task in self.requests():
            task.cancel()
        self._all_closed.clear()
        for connection in list(self.state.connections):
            cast(HttpProtocol, connection).transport.close()
        if self.state.connections:
            try:
                await asyncio.wait_for(self._all_closed.wait(), timeout)
            except TimeoutError:
                for connection in list(self.state.connections):
                    cast(HttpProtocol, connection).transport.abort()
        if tasks := self.requests():
            await asyncio.wait(tasks, timeout=timeout)

    def refused(self, status: int) -> None:
        if self._on_refused is not None:
            self._on_refused(status)

    def connection_closed(self) -> None:
        if not self.state.connections:
            self._all_closed.set()

    def refresh_date(self) -> None:
        """Update the Date header on demand, so that no timer runs in an idle server."""
        now = int(time.time())
        if now != self._date:
            self._date = now
            self.state.default_headers = [(b"date", formatdate(now, usegmt=True).encode())]


class HttpProtocol(HttpToolsProtocol):
    """One connection. Requests sent before the previous answer has ended are not served: the connection closes then."""

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server.config, server.state, {})
        self.logger = logging.getLogger("chairlift.server.http")
        self._server = server
        self._limits = server.limits
        self._timer: asyncio.TimerHandle | None = None
        """Ends the present phase of the connection: reading headers, waiting for a request, or lingering."""
        self._stall: asyncio.TimerHandle | None = None
        """Ends a connection whose client does not read, in any phase. Set while bytes may be waiting for it."""
        self._num_written = 0
        """Bytes of all answers, including unacknowledged ones."""
        self._task: asyncio.Task[None] | None = None
        self._in_head = True
        self._overhead = 0
        """Bytes since the message began, or since its last piece of body."""
        self._header_bytes = self._num_headers = 0
        self._framing: list[tuple[bytes, bytes]] = []
        """Headers with the length of a body after an upgrade was offered. The parser reads such a body as another
        protocol."""
        self._deaf = False
        """Whether further data is discarded."""
        self._ignored = 0
        self._lingers = False

    # --- the transport's side ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limit = self._limits.max_connections
        if len(self.connections) > limit:
            self._refuse(503, "too_many_connections", f"there are {limit} connections already; try again later", "1")
        else:
            self._start_timer(self._limits.header_timeout, self._headers_too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.resume_writing()
        if self._stall is not None:
            self._stall.cancel()
        self._stop_timer()
        self._unset_keepalive_if_required()
        if self._task is not None and self.cycle is not None and not self.cycle.response_complete:
            self._task.cancel()
        self._server.connection_closed()

    def data_received(self, data: bytes) -> None:
        while data:
            if self._deaf:
                self._ignored += len(data)
                if self._ignored > self._limits.max_ignored_bytes:
                    self.transport.abort()
                return
            piece, data = (data[:_PIECE], data[_PIECE:]) if self._in_head else (data, b"")
            self._overhead += len(piece)
            try:
                data = self._feed(piece) + data
            except httptools.HttpParserError:
                if not self._deaf:
                    self._refuse(400, "invalid_http", "this is not a valid HTTP/1.1 request")
            if not self._deaf and self._overhead > self._limits.max_url_bytes + self._limits.max_header_bytes + _PIECE:
                self._headers_too_large()

    def write(self, data: bytes) -> None:
        """Send data, and check that the client reads while data is waiting for it."""
        self._num_written += len(data)
        self.transport.write(data)
        if self._stall is None:
            self._expect_reading()

    def _expect_reading(self) -> None:
        owed, by = self._num_owed(), self.loop.time() + self._limits.stall_timeout
        self._look_later(self._num_written - owed, owed, by)

    def _look_later(self, num_read: int, owed: int, by: float) -> None:
        seconds = self._limits.stall_timeout / _LOOKS
        self._stall = self.loop.call_later(seconds, self._look_for_reading, num_read, owed, by)

    def _num_owed(self) -> int:
        """Bytes that the client's machine has not acknowledged, including those in this machine's kernel. (A stream may
        be completely in the kernel, which asks for more only when a third of its buffer is free.)"""
        held = b"\0" * 4
        with contextlib.suppress(OSError, ValueError):  # the connection may be gone
            held = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, held)
        return self.transport.get_write_buffer_size() + int(struct.unpack("i", held)[0])

    def _look_for_reading(self, num_read: int, owed: int, by: float) -> None:
        """Disconnect the client if it has not read enough before ``by``, a time of the event loop.

        At the start of this check it had read ``num_read`` bytes, and ``owed`` bytes were waiting for it.
        """
        self._stall = None
        left = self._num_owed()
        if not left:
            return
        if self._num_written - left - num_read >= min(owed, _LEAST_READ):
            self._expect_reading()
            return
        if self.loop.time() < by:
            self._look_later(num_read, owed, by)
            return
        request_id, limit = self.scope.get("state", {}).get("request_id", ""), self._limits.stall_timeout
        self.logger.info("request %s: nobody read its answer for %g s; it is cut off", request_id, limit)
        self.transport.abort()

    def _feed(self, piece: bytes) -> bytes:
        """Parse a piece. Returns the rest of it after an upgrade was offered; upgrades are never accepted."""
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            if self._framing and not self._deaf:
                self._read_without_offer()
            return piece[upgrade.args[0] :]
        return b""

    def _read_without_offer(self) -> None:
        """Read the body with a new parser, which is given headers with its length and without the offer."""
        head, self._framing = b"".join(b"%b: %b\r\n" % header for header in self._framing), []
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._deaf = True  # ignore its output for headers that were handled already
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % head)
        finally:
            self._deaf = False

    # --- the parser's side ---

    def on_message_begin(self) -> None:
        if self._deaf:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._deaf = True
            self.cycle.keep_alive = False
            return
        self._unset_keepalive_if_required()
        self._header_bytes = self._num_headers = 0
        if self._timer is None:
            self._start_timer(self._limits.header_timeout, self._headers_too_late)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._deaf:
            return
        super().on_url(url)
        if len(self.url) > self._limits.max_url_bytes:
            message = f"the path is longer than {self._limits.max_url_bytes:,} bytes; shorten it"
            self._refuse(414, "url_too_long", message)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._deaf:
            return
        self._header_bytes += len(name) + len(value)
        self._num_headers += 1
        if self._header_bytes > self._limits.max_header_bytes or self._num_headers > self._limits.max_headers:
            self._headers_too_large()
        elif self._in_head:  # and not in a trailer, which is ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._deaf:
            return
        self._in_head = False
        self._overhead = 0
        self._stop_timer()
        if not self._understands_framing():
            return
        if not self.url.startswith(b"/"):
            self._refuse(400, "invalid_http", "the request target must be a path, such as /v1/models")
            return
        if self.parser.should_upgrade():
            self._framing = [
                (name, value)
                for name, value in self.headers
                if name == b"transfer-encoding" or (name == b"content-length" and int(value))
            ]
        self._server.refresh_date()
        super().on_headers_complete()
        self.cycle.transport = cast(asyncio.Transport, _SoftTransport(self))

    def _understands_framing(self) -> bool:
        """Whether HTTP/1.1 with a plain body was sent. Refuses other framings that the parser would accept (RFC 9112,
        2.3 and 6.1), because a proxy might read another body, or another request after it."""
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            message = f"the request says HTTP/{version}, and this server speaks HTTP/1.1 and 1.0; send one of them"
            self._refuse(505, "http_version_not_supported", message)
            return False
        given = [value for name, value in self.headers if name == b"transfer-encoding"]
        if not given:
            return True
        codings = [coding.strip(b" \t").lower() for coding in b",".join(given).split(b",")]
        if version == "1.0":
            message = "HTTP/1.0 has no Transfer-Encoding; send Content-Length, or HTTP/1.1"
            self._refuse(400, "invalid_http", message)
        elif codings[-1] != b"chunked" or b"chunked" in codings[:-1] or b"" in codings:
            message = "Transfer-Encoding must be chunked, once; send that, or Content-Length"
            self._refuse(400, "invalid_http", message)
        elif len(codings) > 1:
            message = "bodies in another transfer coding than chunked are not supported; send it as it is, chunked"
            self._refuse(501, "unsupported_transfer_coding", message)
        else:
            return True
        return False

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        if not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._deaf or self._framing:
            return
        self._in_head = True
        self._overhead = 0
        self._stop_timer()
        super().on_message_complete()
        if self.cycle.response_complete:  # the rest of a body that is not needed
            self.cycle.more_body = False
            self._start_timer(self._limits.idle_timeout, self.finish)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        async def unchunked(message: Message) -> None:
            """Send for HTTP/1.0: an answer of unknown length ends with its connection."""
            if b"content-length" not in dict(message.get("headers", ())):
                cycle.chunked_encoding, cycle.expected_content_length = False, len(message.get("body", b""))
            await cycle.send(cast(Any, message))

        async def until_disconnected(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                await app(scope, receive, unchunked if scope["http_version"] == "1.0" else send)
            except asyncio.CancelledError:
                cycle.disconnected = True
                self.finish()  # after an interrupted answer, closing the connection is the only signal

        self._task = self.loop.create_task(cycle.run_asgi(cast(Any, until_disconnected)))
        self._task.add_done_callback(self.tasks.discard)
        self.tasks.add(self._task)

    # --- ends ---

    def on_response_complete(self) -> None:
        """The answer is written. Its request may still be arriving."""
        super().on_response_complete()
        if self.cycle.more_body and not self._deaf and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._start_timer(self._limits.linger_timeout, self.finish)

    def timeout_keep_alive_handler(self) -> None:
        self.finish()

    def finish(self) -> None:
        """Close when the client has read all data. A client that does not read is disconnected by the stall timeout."""
        self._stop_timer()
        if not self.transport.is_closing():
            self.transport.close()

    def finish_softly(self) -> None:
        """Close in the same way, after a pause in which the client can stop sending."""
        if self.transport.is_closing() or self._lingers:
            return
        self._deaf = self._lingers = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._start_timer(self._limits.linger_timeout, self.finish)

    def _refuse(self, status: int, code: str, message: str, retry_after: str | None = None) -> None:
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True  # its handler must not write after this
            if self._task is not None:
                self._task.cancel()
            if cycle.response_started:
                self.transport.abort()
                return
        self._server.refused(status)
        self._stop_timer()
        self._unset_keepalive_if_required()
        kind = None if status == 503 else "invalid_request_error"  # also where RFC 9112 uses another 5xx status
        body = msgspec.json.encode(error_body(ApiError(status, message, code=code, type=kind)))
        head = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            f"x-request-id: req-{secrets.token_hex(16)}",
            "connection: close",
        ]
        if retry_after is not None:
            head.append(f"retry-after: {retry_after}")
        self.write("\r\n".join([*head, "", ""]).encode() + body)
        self.finish_softly()

    def _headers_too_large(self) -> None:
        limits = self._limits
        message = f"a request may have {limits.max_headers} headers of {limits.max_header_bytes:,} bytes in all"
        self._refuse(431, "headers_too_large", message)

    def _headers_too_late(self) -> None:
        if self._overhead:
            message = f"the headers did not arrive within {self._limits.header_timeout:g} s"
            self._refuse(408, "request_timeout", message)
        else:
            self.finish()

    def _start_timer(self, seconds: float, action: Callable[[], object]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, action)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _SoftTransport:
    """The transport for an answer. Closing waits until the rest of the request was discarded."""

    def __init__(self, protocol: HttpProtocol) -> None:
        self._protocol = protocol

    def write(self, data: bytes) -> None:
        self._protocol.write(data)

    def is_closing(self) -> bool:
        return self._protocol.transport.is_closing()

    def close(self) -> None:
        if self._protocol.cycle.more_body:
            self._protocol.finish_softly()
        else:
            self._protocol.finish()
