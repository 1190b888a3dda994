"""A socket with one deadline for all its operations."""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Callable
from typing import Any

__all__ = ["TimedSocket"]


class TimedSocket:
    """The socket of an ``http.client`` connection. All its operations together end at ``end``, a time of ``clock``, and
    then raise TimeoutError.

    The timeout of a socket is for one operation only: a peer that sends a byte now and then keeps a reader for ever.
    ``sock`` is a connected socket, which may use TLS. The caller closes it when the response has been read.
    """

    def __init__(self, sock: socket.socket, end: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._sock = sock
        self._end = end
        self._clock = clock

    def sendall(self, data: Any) -> None:
        self._limit()
        self._sock.sendall(data)

    def recv_into(self, buffer: Any) -> int:
        self._limit()
        return self._sock.recv_into(buffer)

    def makefile(self, mode: str) -> io.BufferedReader:
        """File object for reading. ``mode`` must be ``rb``, the only mode that ``http.client`` uses."""
        if mode != "rb":
            raise ValueError(f"a file of this socket has the mode 'rb', got {mode!r}")
        return io.BufferedReader(_Reader(self))

    def close(self) -> None:
        """Do nothing. ``http.client`` closes its socket before it reads a response with ``Connection: close``."""

    def _limit(self) -> None:
        left = self._end - self._clock()
        if left <= 0:
            raise TimeoutError("the deadline has passed")
        self._sock.settimeout(left)


class _Reader(io.RawIOBase):
    def __init__(self, sock: TimedSocket) -> None:
        super().__init__()
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._sock.recv_into(buffer)
