"""Images of requests: which requests wait for which tile, when the encoder computes, and which encoded tiles stay in
memory.

A request with images enters the queue only when all its tiles are encoded. The encoder computes a limited piece between
two steps, so that running requests are not delayed for long. The encoded rows of a tile stay in memory until the last
request with the tile has ended, even during preemption, and after that as long as there is room.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

from chairlift.errors import RequestError
from chairlift.executor.executor import ImageMemory
from chairlift.request import Request
from chairlift.vision.spans import ImageTile

__all__ = ["Images"]

_log = logging.getLogger(__name__)

_BUSY: Final = 128
"""Work of the encoder between two steps while requests run, in patches through half a layer; takes a few
milliseconds."""
_IDLE: Final = 2048
"""Work of the encoder in one turn while no request runs. A new request waits at most for one turn."""
_KEPT_BYTES: Final = 256 << 20
"""Maximum number of bytes of encoded rows that no request uses."""


@dataclasses.dataclass(slots=True)
class _Waiting:
    request: Request
    missing: set[bytes]


class Images:
    """The image tiles of all requests in the engine. ``memory`` holds the encoded rows of tiles; None for a model that
    reads only texts.

    ``kept_bytes`` is the maximum number of bytes of rows that no request uses. Only one thread may call the methods.
    """

    def __init__(self, memory: ImageMemory | None = None, kept_bytes: int = _KEPT_BYTES) -> None:
        self._memory, self._kept_bytes = memory, kept_bytes
        self._users: dict[bytes, int] = {}
        self._unused: OrderedDict[bytes, int] = OrderedDict()
        """Key of an encoded tile that no request uses -> bytes of its rows; least recently used first."""
        self._queue: OrderedDict[bytes, ImageTile] = OrderedDict()
        self._work: tuple[bytes, Iterator[int]] | None = None
        """(key, encoding in progress) of the first tile in the queue; None before its encoding has begun."""
        self._waiting: dict[str, _Waiting] = {}
        self._of: dict[str, tuple[bytes, ...]] = {}
        self._ready: list[Request] = []
        self._failed: list[tuple[Request, str]] = []
        self.num_encoded = self.num_hits = 0
        """Counters: tiles that were encoded; tiles of requests that were already encoded or in the queue."""

    @property
    def is_encoding(self) -> bool:
        """Whether the encoder has work, or a result waits for :meth:`take_ready`."""
        return bool(self._queue or self._ready or self._failed)

    def add(self, requests: Sequence[Request], tiles: Sequence[ImageTile]) -> None:
        """Note the tiles of all sequences of one request. Sequences that must wait for the encoder are marked as not
        ready. Raises RequestError for a model that reads no images."""
        memory, tiles_by_key = self._memory, {tile.key: tile for tile in tiles}
        if memory is None:
            raise RequestError("this engine reads no images; send texts only")
        for request in requests:
            keys = tuple(dict.fromkeys(span.key for span in request.images))
            for key in keys:
                if key not in tiles_by_key:
                    raise RequestError("an image span names a tile that was not sent")
            self._of[request.request_id] = keys
            for key in keys:
                self._users[key] = self._users.get(key, 0) + 1
                self._unused.pop(key, None)
                if memory.holds(key) or key in self._queue:
                    self.num_hits += 1
                else:
                    self._queue[key] = tiles_by_key[key]
            missing = {key for key in keys if not memory.holds(key)}
            if missing:
                request.is_ready, request.waits_for = False, "image"
                self._waiting[request.request_id] = _Waiting(request, missing)

    def work(self, busy: bool) -> None:
        """Encode for one turn, which is shorter if requests run (``busy``)."""
        remaining = _BUSY if busy else _IDLE
        while self._queue and self._memory is not None and remaining > 0:
            if self._work is None:
                key, tile = next(iter(self._queue.items()))
                self._work = key, self._memory.encode(tile)
            key, pieces = self._work
            try:
                remaining -= next(pieces)
            except StopIteration:
                self._end(key, "")
            except Exception as error:
                _log.exception("an image could not be encoded; its requests end with an error")
                self._end(key, f"an image could not be encoded ({type(error).__name__})")

    def take_ready(self) -> tuple[list[Request], list[tuple[Request, str]]]:
        """(requests whose images were all encoded since the last call, (request, reason) of requests with an image that
        could not be encoded). Requests that have ended are not included."""
        ready, self._ready = [each for each in self._ready if not each.is_finished], []
        failed, self._failed = [each for each in self._failed if not each[0].is_finished], []
        return ready, failed

    def waits(self, request: Request) -> bool:
        """Whether the request waits for a tile to be encoded."""
        return request.request_id in self._waiting

    def forget(self, request: Request) -> None:
        """Note that a request has ended."""
        self._waiting.pop(request.request_id, None)
        for key in self._of.pop(request.request_id, ()):
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._let_go(key)

    def shutdown(self) -> None:
        """Drop all requests and their tiles."""
        for mapping in (self._waiting, self._of, self._users, self._queue):
            mapping.clear()
        self._work = None

    def _let_go(self, key: bytes) -> None:
        if self._memory is None or not self._memory.holds(key):
            self._queue.pop(key, None)
            if self._work is not None and self._work[0] == key:
                self._work = None
            return
        self._unused[key] = self._memory.size(key)
        while sum(self._unused.values()) > self._kept_bytes:
            self._memory.drop(self._unused.popitem(last=False)[0])

    def _end(self, key: bytes, error: str) -> None:
        """Note that the encoding of a tile has ended. ``error`` is empty after success."""
        self._work = None
        del self._queue[key]
        self.num_encoded += not error
        for each in [each for each in self._waiting.values() if key in each.missing]:
            each.missing.discard(key)
            if error or not each.missing:
                del self._waiting[each.request.request_id]
                each.request.waits_for = ""
            if error:
                self._failed.append((each.request, error))
            elif not each.missing:
                self._ready.append(each.request)
