"""All operations of a socket end by one deadline, however its peer sends."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator

import pytest

from chairlift.base.timed_socket import TimedSocket


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


class Clock:
    """A second passes at each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_reads_end_by_the_deadline_although_each_of_them_gets_a_byte(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    timed, buffer = TimedSocket(ours, 4.5, Clock()), bytearray(1)
    for _ in range(4):
        theirs.sendall(b"x")
        assert timed.recv_into(buffer) == 1
    theirs.sendall(b"x")
    with pytest.raises(TimeoutError, match="the deadline has passed"):
        timed.recv_into(buffer)


def test_each_operation_gets_the_rest_of_the_time(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    clock = Clock()
    timed = TimedSocket(ours, 10.0, clock)
    timed.sendall(b"x")
    assert (theirs.recv(1), ours.gettimeout()) == (b"x", 9.0)
    clock.now = 8.9
    with pytest.raises(TimeoutError):
        timed.recv_into(bytearray(1))
    assert ours.gettimeout() == pytest.approx(0.1)


@pytest.mark.parametrize("head", ["HTTP/1.0 200 OK\r\n", "HTTP/1.1 200 OK\r\nConnection: close\r\n"])
def test_http_client_reads_a_response_that_closes_the_connection(
    pair: tuple[socket.socket, socket.socket], head: str
) -> None:
    ours, theirs = pair
    connection = http.client.HTTPConnection("host")
    connection.sock = TimedSocket(ours, 1e6, Clock())
    connection.request("GET", "/")
    theirs.sendall(f"{head}Content-Length: 4\r\n\r\nbody".encode())
    with connection.getresponse() as response:
        assert response.read() == b"body"


def test_only_files_for_reading_are_made(pair: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(ValueError, match="has the mode 'rb', got 'wb'"):
        TimedSocket(pair[0], 1.0).makefile("wb")
