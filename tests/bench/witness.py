"""A proxy that writes down when it sees what: raw sockets, a monotonic clock, a thread of its own.

It shares no code with what it is a witness of: it reads HTTP's chunks and the events in them by itself. How many tokens
an answer has is what its request asked for, which must be exact (``ignore_eos``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import selectors
import socket
import threading
import time
from collections.abc import Iterator

__all__ = ["Sighting", "Witness", "witnessing"]


@dataclasses.dataclass
class Sighting:
    """One connection. Times in seconds of the monotonic clock."""

    began: float
    """When it was opened."""
    request: bytes = b""
    reply: bytes = b""
    choices: list[float] = dataclasses.field(default_factory=list)
    """When events with a choice in them came: with a token, or with the end of the answer."""
    seen: int = 0
    """Bytes of the reply that are understood."""
    events: bytes = b""

    @property
    def lengths(self) -> tuple[int, int]:
        """Tokens of the prompt, and of the answer that was asked for."""
        body = json.loads(self.request.partition(b"\r\n\r\n")[2])
        return len(body["prompt"]), body["max_tokens"]

    @property
    def ttft(self) -> float:
        return self.choices[0] - self.began

    @property
    def tpot(self) -> float:
        return (self.choices[-1] - self.choices[0]) / (self.lengths[1] - 1)

    def take(self, data: bytes, now: float) -> None:
        """Bytes of the reply, which came at ``now``."""
        self.reply += data
        if not self.seen:
            head = self.reply.find(b"\r\n\r\n")
            if head < 0:
                return
            self.seen = head + 4
        while (line := self.reply.find(b"\r\n", self.seen)) >= 0:
            size = int(self.reply[self.seen : line], 16)
            if len(self.reply) < line + 2 + size + 2:
                return
            self.events += self.reply[line + 2 : line + 2 + size]
            self.seen = line + 2 + size + 2
            *whole, self.events = self.events.split(b"\n\n")
            for event in whole:
                value = event.removeprefix(b"data: ")
                if value != b"[DONE]" and json.loads(value)["choices"]:
                    self.choices.append(now)


class Witness:
    """Passes everything on to ``port`` as it comes, and remembers."""

    def __init__(self, port: int) -> None:
        self.sightings: list[Sighting] = []
        self._target = port
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._listener.setblocking(False)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._stopping = False
        self._selector.register(self._listener, selectors.EVENT_READ)

    def run(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(0.05):
                now = time.monotonic()
                if key.fileobj is self._listener:
                    self._accept(now)
                else:
                    self._pass_on(key, now)

    def stop(self) -> None:
        self._stopping = True

    def _accept(self, now: float) -> None:
        client, _ = self._listener.accept()
        server = socket.create_connection(("127.0.0.1", self._target))
        for sock in (client, server):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sighting = Sighting(now)
        self.sightings.append(sighting)
        self._selector.register(client, selectors.EVENT_READ, (sighting, server, False))
        self._selector.register(server, selectors.EVENT_READ, (sighting, client, True))

    def _pass_on(self, key: selectors.SelectorKey, now: float) -> None:
        sock, (sighting, other, is_reply) = key.fileobj, key.data
        assert isinstance(sock, socket.socket)
        data = b""
        with contextlib.suppress(ConnectionError):
            data = sock.recv(1 << 16)
        if is_reply:
            sighting.take(data, now)
        else:
            sighting.request += data
        with contextlib.suppress(OSError):
            if data:
                other.sendall(data)
                return
            other.shutdown(socket.SHUT_WR)
        self._selector.unregister(sock)
        sock.close()


@contextlib.contextmanager
def witnessing(port: int) -> Iterator[Witness]:
    """A witness in front of a server of this machine."""
    witness = Witness(port)
    thread = threading.Thread(target=witness.run, daemon=True)
    thread.start()
    try:
        yield witness
    finally:
        witness.stop()
        thread.join(10)
