"""Long responses that are written while they are sent: long lists are encoded piece by piece, on a thread.

A response with a million log-probabilities has 60 MB. Encoded in one call, it would block the event loop for a second,
and stay in memory until the client has read it.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chairlift.server.http.state import ServerState

__all__ = ["Pieces", "json_items", "respond"]

_PIECE: Final = 1 << 16
"""Minimum number of bytes of a piece, except the last."""
_AT_ONCE: Final = 2048
"""Maximum number of list entries of a response that is encoded on the event loop, which takes a few milliseconds.
Longer responses use a thread."""
_encode: Final = msgspec.json.encode


class Pieces:
    """Collects the long parts of one response. ``num_entries`` is the number of values in them."""

    def __init__(self) -> None:
        self.num_entries = 0
        self._mark = secrets.token_hex(16).encode()  # random, so that no client can send the same text
        self._parts: list[Iterator[bytes]] = []

    def later(self, part: Iterator[bytes], num_entries: int) -> Any:
        """Return a placeholder for ``part``, which is JSON with ``num_entries`` values. :meth:`write` replaces it by
        the JSON."""
        self._parts.append(part)
        self.num_entries += num_entries
        return msgspec.Raw(b'"%b%08d"' % (self._mark, len(self._parts) - 1))

    def write(self, content: Any) -> Iterator[bytes]:
        """JSON of ``content``, piece by piece, with each placeholder replaced by its long part."""
        buffer = bytearray()
        rest = re.split(b'"%b([0-9]{8})"' % self._mark, _encode(content))
        for index, piece in enumerate(rest):
            for each in self._parts[int(piece)] if index % 2 else (piece,):
                buffer += each
                if len(buffer) >= _PIECE:
                    yield bytes(buffer)
                    buffer.clear()
        yield bytes(buffer)


def json_items(items: Iterable[Any], num_at_once: int = 256) -> Iterator[bytes]:
    """Encode a list as JSON; ``num_at_once`` items are encoded at a time."""
    iterator = iter(items)
    yield b"["
    between = b""
    while some := list(itertools.islice(iterator, num_at_once)):
        yield between + _encode(some)[1:-1]
        between = b","
    yield b"]"


def respond(state: ServerState, content: Any, pieces: Pieces, headers: Mapping[str, str]) -> Response:
    """A response with status 200. If it has many entries, it is encoded while it is sent."""
    if pieces.num_entries <= _AT_ONCE:
        return Response(b"".join(pieces.write(content)), headers=headers, media_type="application/json")
    return _LongReply(state, pieces.write(content), headers)


class _LongReply(Response):
    """A response that sends JSON piece by piece. A piece is encoded when the connection has room for it. One thread
    encodes for all responses."""

    media_type = "application/json"

    def __init__(self, state: ServerState, pieces: Iterator[bytes], headers: Mapping[str, str]) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(headers)
        self._state = state
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        while piece := await self._next():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self) -> bytes:
        async with self._state.writing:
            return await asyncio.to_thread(next, self._pieces, b"")
