"""A client that reads only after it has sent its whole request gets the answer, although the server reads no more."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import time
from collections.abc import Iterator

import pytest

from chairlift.server.http.http_protocol import HttpLimits
from tests.server.harness import PATIENCE, Client, run
from tests.server.test_limits import CHUNKED, HEAD, echo_server

PIECE = b" " * (1 << 16)


def exchange(port: int, head: bytes, pieces: Iterator[bytes]) -> tuple[int, str | None, bytes]:
    """Send a whole request on a blocking socket, and only then read. Returns (status, header Connection, body)."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as sock:
        sock.sendall(head)
        for piece in pieces:
            sock.sendall(piece)
        reply = http.client.HTTPResponse(sock)
        reply.begin()
        return reply.status, reply.headers["Connection"], reply.read()


def body(count: int, *, chunked: bool, pause: float = 0.0) -> Iterator[bytes]:
    """``count`` pieces of 64 KiB."""
    for _ in range(count):
        yield b"10000\r\n" + PIECE + b"\r\n" if chunked else PIECE
        if pause:
            time.sleep(pause)
    if chunked:
        yield b"0\r\n\r\n"


def head(count: int, chunked: bool) -> bytes:
    return CHUNKED if chunked else HEAD + b"Content-Length: %d\r\n\r\n" % (count * len(PIECE))


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(("count", "pause"), [(4, 0.0), (3200, 0.0), (40, 0.03)])
def test_a_body_that_is_too_long_gets_its_answer(count: int, pause: float, chunked: bool) -> None:
    """Also 200 MiB, and a client that sends for longer than a pause may be."""

    async def test(client: Client) -> None:
        pieces = body(count, chunked=chunked, pause=pause)
        status, connection, answer = await asyncio.to_thread(exchange, client.port, head(count, chunked), pieces)
        assert (status, connection) == (413, "close")
        assert b"body_too_large" in answer and b"--max-body-bytes" in answer

    run(echo_server(test, HttpLimits(linger_timeout=0.5), max_body_bytes=2048))


@pytest.mark.parametrize("chunked", [False, True])
def test_another_early_answer_arrives_too_and_keeps_the_connection(chunked: bool) -> None:
    """The server answers 415 by the headers alone. The client sends for longer than a pause may be."""

    async def test(client: Client) -> None:
        start = head(40, chunked).replace(b"application/json", b"text/plain")
        pieces = body(40, chunked=chunked, pause=0.03)
        status, connection, _ = await asyncio.to_thread(exchange, client.port, start, pieces)
        assert (status, connection) == (415, None)

    run(echo_server(test, HttpLimits(linger_timeout=0.5)))


@pytest.mark.parametrize(
    "limits",
    [HttpLimits(max_linger_seconds=0.3), HttpLimits(max_ignored_bytes=1 << 20, linger_timeout=0.1)],
    ids=["seconds", "bytes"],
)
@pytest.mark.parametrize("kind", [b"application/json", b"text/plain"])
def test_a_client_that_never_stops_is_disconnected(limits: HttpLimits, kind: bytes) -> None:
    def send_until_disconnected(port: int) -> None:
        end = time.monotonic() + PATIENCE
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as sock, contextlib.suppress(ConnectionError):
            sock.sendall(HEAD.replace(b"application/json", kind) + b"Content-Length: 99999999999\r\n\r\n")
            while time.monotonic() < end:
                sock.sendall(PIECE)
                time.sleep(0.001)
        assert time.monotonic() < end

    async def test(client: Client) -> None:
        await asyncio.to_thread(send_until_disconnected, client.port)

    run(echo_server(test, limits, max_body_bytes=2048))


def test_a_pause_ends_the_connection() -> None:
    """The pause counts from the last byte, also if the client has sent for a long time before."""

    async def test(client: Client) -> None:
        connection, loop = await client.connect(), asyncio.get_running_loop()
        connection.send(HEAD + b"Content-Length: 99999999999\r\n\r\n")
        for _ in range(25):
            connection.send(PIECE)
            await asyncio.sleep(0.03)
        begin = loop.time()
        assert (await connection.reply()).status == 413
        assert await connection.is_closed()
        assert loop.time() - begin < PATIENCE / 2

    run(echo_server(test, HttpLimits(linger_timeout=0.5, max_linger_seconds=PATIENCE), max_body_bytes=2048))
