"""A proxy that records the times of stream events, with raw sockets, a monotonic clock and its own process.

The proxy shares no code and no interpreter lock with the measured client. It parses HTTP chunks and their events
itself, after it has forwarded them. It takes the number of output tokens from the request, so this number must be exact
(``ignore_eos``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import selectors
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

__all__ = ["Sighting", "Witness", "witnessing"]


@dataclasses.dataclass
class Sighting:
    """Record of one connection. Times are in seconds of the monotonic clock."""

    began: float
    """Time at which the connection was opened."""
    request: bytes = b""
    reply: bytes = b""
    choices: list[float] = dataclasses.field(default_factory=list)
    """Times at which events with a choice were forwarded. Such an event is a token or the end of the output."""
    seen: int = 0
    """Number of bytes of the response that have been parsed."""
    events: bytes = b""

    @property
    def lengths(self) -> tuple[int, int]:
        """(number of prompt tokens, number of requested output tokens)."""
        body = json.loads(self.request.partition(b"\r\n\r\n")[2])
        return len(body["prompt"]), body["max_tokens"]

    @property
    def ttft(self) -> float:
        return self.choices[0] - self.began

    @property
    def tpot(self) -> float:
        return (self.choices[-1] - self.choices[0]) / (self.lengths[1] - 1)

    def take(self, data: bytes, now: float) -> None:
        """Parse bytes of the response, which were forwarded at ``now``."""
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


def _stand(port: int, ours: Connection) -> None:
    """Main function of the proxy's process. It forwards everything to ``port`` until it receives a stop message on
    ``ours``, then sends its records."""
    selector, sightings = selectors.DefaultSelector(), []
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    selector.register(listener, selectors.EVENT_READ)
    selector.register(ours, selectors.EVENT_READ)
    ours.send(listener.getsockname()[1])
    while not ours.poll():
        for key, _ in selector.select():
            if key.fileobj is listener:
                sightings.append(_accept(selector, listener, port))
            elif key.fileobj is not ours:
                _pass_on(selector, key)
    ours.send(sightings)


def _accept(selector: selectors.BaseSelector, listener: socket.socket, port: int) -> Sighting:
    client, _ = listener.accept()
    sighting = Sighting(time.monotonic())
    server = socket.create_connection(("127.0.0.1", port))
    for sock in (client, server):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    selector.register(client, selectors.EVENT_READ, (sighting, server, False))
    selector.register(server, selectors.EVENT_READ, (sighting, client, True))
    return sighting


def _pass_on(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> None:
    """Forward bytes. Their time is taken just before they are sent on, so that the proxy's later work is not
    measured."""
    sock, (sighting, other, is_reply) = key.fileobj, key.data
    assert isinstance(sock, socket.socket)
    data = b""
    with contextlib.suppress(ConnectionError):
        data = sock.recv(1 << 16)
    now = time.monotonic()
    with contextlib.suppress(OSError):
        if data:
            other.sendall(data)
        else:
            other.shutdown(socket.SHUT_WR)
    if is_reply:
        sighting.take(data, now)
    else:
        sighting.request += data
    if not data:
        selector.unregister(sock)
        sock.close()


class Witness:
    """A proxy between a client and the server at ``port`` of this machine. It forwards until its records are read."""

    def __init__(self, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_stand, args=(port, theirs), daemon=True)
        self.process.start()
        self.url = f"http://127.0.0.1:{self._pipe.recv()}"

    def sightings(self) -> list[Sighting]:
        """Records of all connections, in order. The proxy stops recording afterwards."""
        self._pipe.send(None)
        seen: list[Sighting] = self._pipe.recv()
        return seen


@contextlib.contextmanager
def witnessing(port: int) -> Iterator[Witness]:
    """Run a :class:`Witness` in front of a server of this machine."""
    witness = Witness(port)
    try:
        yield witness
    finally:
        witness.process.kill()
        witness.process.join(10)
