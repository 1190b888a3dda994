"""HTTP/1.1 on a socket: uvicorn's protocol class with limits on everything that a client can send.

A connection that exceeds a limit gets one OpenAI error object and is closed. Timers run only while a connection is in
a phase with a time limit. When a client disconnects, the task of its request is cancelled at once.

This file overrides internals of uvicorn, which may change in any release. So pyproject.toml limits uvicorn's version,
and tests/server/test_uvicorn_internals.py fails if they change.
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

from chairlift.server.http.errors import ApiError, error_body

__all__ = ["HttpLimits", "HttpProtocol", "HttpServer"]

_PIECE: Final = 2048
"""Number of bytes that the parser gets at a time while it reads headers. Small pieces keep the headers close to their
limit."""

_MIN_READ: Final = 1 << 16
"""Minimum number of bytes that a client must read in each ``stall_timeout``, if at least this many wait for the
client."""

_NUM_CHECKS: Final = 4
"""Number of checks of a client's reading per ``stall_timeout``. With few checks a slow client would get much more time
than the timeout."""

_SEND_BUFFER: Final = 1 << 17
"""Size in bytes of the kernel's send buffer per connection. The kernel's default would be megabytes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits of a connection. Times in seconds, sizes in bytes."""

    max_connections: int = 2048
    max_url_bytes: int = 8 * 1024
    max_header_bytes: int = 16 * 1024
    """Maximum size of all headers of a request together, names and values, including trailers."""
    max_headers: int = 64
    header_timeout: float = 10.0
    """Maximum time to receive all headers. It starts with the connection, or with the first byte of a later request."""
    idle_timeout: float = 75.0
    """Maximum time between a response and the next request on the connection."""
    linger_timeout: float = 2.0
    """Maximum pause of a client that still sends after a response was sent before the whole request arrived. What it
    sends is discarded. If the connection closed at once, the client would lose the response: many clients read it only
    after they have sent the whole request."""
    max_linger_seconds: float = 30.0
    """Maximum time for which such a client may send."""
    stall_timeout: float = 60.0
    """Time for a client to read 64 KiB of the bytes that wait for it, or all bytes if there are fewer. They may be a
    whole response or a part of a stream."""
    max_ignored_bytes: int = 512 * 1024 * 1024
    """Maximum number of bytes that such a client may send. It is more than any request that the default settings allow,
    which is an upload of 200 MiB. Discarding a gigabyte takes less than a second."""


class HttpServer:
    """A listening socket and its connections.

    ``on_refused`` is called with the HTTP status when a request is refused before it reaches the application. Status
    503 means too many connections.
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
        """Accept connections on a bound socket. The server now owns the socket and closes it."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(AttributeError, OSError):  # not on every system; connections inherit it
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _SEND_BUFFER)
        self._server = await loop.create_server(lambda: HttpProtocol(self), sock=sock, backlog=2048)

    def requests(self) -> set[asyncio.Task[None]]:
        """Tasks of all requests whose response is not finished."""
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
        """Update the Date header when a response is sent. So an idle server needs no timer."""
        now = int(time.time())
        if now != self._date:
            self._date = now
            self.state.default_headers = [(b"date", formatdate(now, usegmt=True).encode())]


class HttpProtocol(HttpToolsProtocol):
    """One connection. A client must not send a request before the previous response has ended: such a connection is
    closed."""

    def __init__(self, server: HttpServer) -> None:
        super().__init__(server.config, server.state, {})
        self.logger = logging.getLogger("chairlift.server.http")
        self._server = server
        self._limits = server.limits
        self._timer: asyncio.TimerHandle | None = None
        """Timer for the current phase: reading headers, waiting for a request, or lingering. It closes the connection.
        """
        self._stall: asyncio.TimerHandle | None = None
        """Timer that closes the connection if the client does not read. It runs in any phase while bytes may be
        waiting for the client."""
        self._num_written = 0
        """Number of bytes written to the connection so far, over all responses, including bytes that the client has not
        acknowledged."""
        self._task: asyncio.Task[None] | None = None
        self._in_head = True
        self._overhead = 0
        """Number of bytes outside the body (headers, chunk sizes, trailers) that have arrived since the request began,
        or since the last part of its body."""
        self._header_bytes = self._num_headers = 0
        self._framing: list[tuple[bytes, bytes]] = []
        """Headers with the length of the body (Content-Length, Transfer-Encoding), for a request that also offers a
        protocol upgrade. The parser would read the body of such a request as another protocol, so it is parsed again
        with these headers only."""
        self._discards = False
        """Whether received data is discarded from now on."""
        self._num_received = 0
        """Number of bytes that have arrived on the connection."""
        self._ignored_from = 0
        """Value of ``_num_received`` when the response was sent, while the connection lingers."""
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
        self._num_received += len(data)
        while data:
            if self._discards:
                if self._num_received - self._ignored_from > self._limits.max_ignored_bytes:
                    self.transport.abort()
                return
            piece, data = (data[:_PIECE], data[_PIECE:]) if self._in_head else (data, b"")
            self._overhead += len(piece)
            try:
                data = self._feed(piece) + data
            except httptools.HttpParserError:
                if not self._discards:
                    self._refuse(400, "invalid_http", "this is not a valid HTTP/1.1 request")
            if (
                not self._discards
                and self._overhead > self._limits.max_url_bytes + self._limits.max_header_bytes + _PIECE
            ):
                self._headers_too_large()

    def write(self, data: bytes) -> None:
        """Send data, and start checking that the client reads it."""
        self._num_written += len(data)
        self.transport.write(data)
        if self._stall is None:
            self._expect_reading()

    def _expect_reading(self) -> None:
        unread = self._num_unread()
        by = self.loop.time() + self._limits.stall_timeout
        self._schedule_check(self._num_written - unread, unread, by)

    def _schedule_check(self, num_read: int, unread: int, by: float) -> None:
        seconds = self._limits.stall_timeout / _NUM_CHECKS
        self._stall = self.loop.call_later(seconds, self._check_reading, num_read, unread, by)

    def _num_unread(self) -> int:
        """Number of written bytes that the client's machine has not acknowledged.

        This includes bytes in this machine's kernel. (A whole stream may be in the kernel, which asks for more data
        only when a third of its buffer is free.)
        """
        raw = b"\0" * 4
        with contextlib.suppress(OSError, ValueError):  # the connection may be gone
            raw = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, raw)
        return self.transport.get_write_buffer_size() + int(struct.unpack("i", raw)[0])

    def _check_reading(self, num_read: int, unread: int, by: float) -> None:
        """Disconnect the client if it has not read enough by the time ``by`` (of the event loop's clock).

        At the start of the checked period, the client had read ``num_read`` bytes, and ``unread`` bytes were waiting
        for it.
        """
        self._stall = None
        still_unread = self._num_unread()
        if not still_unread:
            return
        if self._num_written - still_unread - num_read >= min(unread, _MIN_READ):
            self._expect_reading()
            return
        if self.loop.time() < by:
            self._schedule_check(num_read, unread, by)
            return
        request_id = self.scope.get("state", {}).get("request_id", "")
        limit = self._limits.stall_timeout
        self.logger.info(
            "request %s: the client did not read its response for %g s; the connection is closed", request_id, limit
        )
        self.transport.abort()

    def _feed(self, piece: bytes) -> bytes:
        """Parse a piece of data. Returns the unparsed rest if the request offers an upgrade. The server never accepts
        an upgrade."""
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            if self._framing and not self._discards:
                self._read_without_offer()
            return piece[upgrade.args[0] :]
        return b""

    def _read_without_offer(self) -> None:
        """Read the body with a new parser. This parser gets the length headers but no upgrade offer, so it reads the
        body as HTTP."""
        head = b"".join(b"%b: %b\r\n" % header for header in self._framing)
        self._framing = []
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._discards = True  # ignore its output for headers that were handled already
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % head)
        finally:
            self._discards = False

    # --- the parser's side ---

    def on_message_begin(self) -> None:
        if self._discards:
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._discards = True
            self.cycle.keep_alive = False
            return
        self._unset_keepalive_if_required()
        self._header_bytes = self._num_headers = 0
        if self._timer is None:
            self._start_timer(self._limits.header_timeout, self._headers_too_late)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._discards:
            return
        super().on_url(url)
        if len(self.url) > self._limits.max_url_bytes:
            message = f"the path is longer than {self._limits.max_url_bytes:,} bytes; shorten it"
            self._refuse(414, "url_too_long", message)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._discards:
            return
        self._header_bytes += len(name) + len(value)
        self._num_headers += 1
        if self._header_bytes > self._limits.max_header_bytes or self._num_headers > self._limits.max_headers:
            self._headers_too_large()
        elif self._in_head:  # and not in a trailer, which is ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._discards:
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
        """Whether the request uses HTTP/1.1 framing without doubt.

        The parser would accept other framings (RFC 9112, 2.3 and 6.1), but a proxy may read them differently, as
        another body or as a second request. So they are refused.
        """
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
        if not self._discards:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._discards or self._framing:
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
            """Send without chunked encoding, for HTTP/1.0: the end of the connection marks the end of a response of
            unknown length."""
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
        """Handle the end of a response. Its request may still be arriving."""
        super().on_response_complete()
        if self.cycle.more_body and not self._discards and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._linger()

    def _linger(self) -> None:
        """Close the connection when the client stops sending."""
        self._ignored_from = self._num_received
        self._linger_on(self.loop.time() + self._limits.max_linger_seconds)

    def _linger_on(self, end: float) -> None:
        """Wait for ``linger_timeout`` seconds, and again if data has arrived meanwhile. ``end`` is the last moment, on
        the event loop's clock."""
        seen = self._num_received
        seconds = min(self._limits.linger_timeout, end - self.loop.time())

        def check() -> None:
            too_many = self._num_received - self._ignored_from > self._limits.max_ignored_bytes
            if self._num_received == seen or too_many or self.loop.time() >= end:
                self.finish()
            else:
                self._linger_on(end)

        self._start_timer(seconds, check)

    def timeout_keep_alive_handler(self) -> None:
        self.finish()

    def finish(self) -> None:
        """Close the connection when the client has read all data. The stall timeout disconnects a client that does not
        read."""
        self._stop_timer()
        if not self.transport.is_closing():
            self.transport.close()

    def finish_softly(self) -> None:
        """Close the connection as :meth:`finish` does, but first wait until the client stops sending."""
        if self.transport.is_closing() or self._lingers:
            return
        self._discards = self._lingers = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._linger()

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
    """A transport that delays its closing until the rest of the request has been received and discarded."""

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
