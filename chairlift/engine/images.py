"""Images of requests: which requests wait for which tile, when the encoder computes, and which encoded tiles stay in
memory.

A request with images enters the queue only when all its tiles are encoded. Between two steps the encoder computes for a
fraction of a step's time, so that running requests are not delayed for long. The encoded rows of a tile stay in memory
until the last request with the tile has ended, even during preemption, and after that as long as there is room.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from chairlift.engine.clock import Clock, SystemClock
from chairlift.errors import InvariantError, RequestError
from chairlift.executor.executor import ImageMemory
from chairlift.request import Request
from chairlift.vision.spans import ImageTile

__all__ = ["BUSY_FRACTION", "Images"]

_log = logging.getLogger(__name__)

BUSY_FRACTION: Final = 0.4
"""Fraction of a decode step's time that images may add to a step while requests run."""
_IDLE_SECONDS: Final = 0.05
"""Seconds for which the encoder computes without a pause while no request runs. A new request waits at most this
long."""
_FORGET: Final = 0.95
"""Factor by which the expected time of a piece decreases after each shorter piece."""
_ROUNDING: Final = 1e-9
"""Seconds by which sums of times may differ because of rounding."""
_KEPT_BYTES: Final = 256 << 20
"""Maximum number of bytes of encoded rows that no request uses."""


@dataclasses.dataclass(slots=True)
class _Waiting:
    request: Request
    missing: set[bytes]


class Images:
    """The image tiles of all requests in the engine. ``memory`` holds the encoded rows of tiles; None for a model that
    reads only texts.

    ``clock`` measures the encoder's time. ``kept_bytes`` is the maximum number of bytes of rows that no request uses.
    Only one thread may call the methods.
    """

    def __init__(
        self, memory: ImageMemory | None = None, clock: Clock | None = None, kept_bytes: int = _KEPT_BYTES
    ) -> None:
        self._memory = memory
        self._clock = clock or SystemClock()
        self._kept_bytes = kept_bytes
        self._longest = 0.0
        """Seconds that the next piece may take: a maximum over earlier pieces, in which old pieces fade."""
        self._saved = 0.0
        """Seconds of its time that the encoder has not used in earlier turns. It is below 0 if a piece took longer than
        expected."""
        self._users: dict[bytes, int] = {}
        self._unused: OrderedDict[bytes, int] = OrderedDict()
        """Key of an encoded tile that no request uses -> bytes of its rows; least recently used first."""
        self._seconds: dict[bytes, float] = {}
        """Key of a tile -> seconds that the encoder has computed for it; kept as long as its rows."""
        self._worth: dict[bytes, float] = {}
        """Key of an unused tile -> its rank; the tile with the lowest rank is dropped first."""
        self._age = 0.0
        """Rank of the tile that was dropped last."""
        self._queue: OrderedDict[bytes, ImageTile] = OrderedDict()
        self._work: tuple[bytes, Iterator[None]] | None = None
        """(key of the first tile in the queue, iterator that encodes it); None before the encoding has begun."""
        self._waiting: dict[str, _Waiting] = {}
        self._of: dict[str, tuple[bytes, ...]] = {}
        self._ready: list[Request] = []
        self._failed: list[tuple[Request, str]] = []
        self.num_encoded = self.num_hits = 0
        """Counters: tiles that were encoded; tiles that a new request found encoded already, or in the queue."""

    @property
    def is_used(self) -> bool:
        """Whether a request with images has not ended."""
        return bool(self._of)

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
                self._worth.pop(key, None)
                if memory.holds(key) or key in self._queue:
                    self.num_hits += 1
                else:
                    self._queue[key] = tiles_by_key[key]
            missing = {key for key in keys if not memory.holds(key)}
            if missing:
                request.is_ready, request.waits_for = False, "image"
                self._waiting[request.request_id] = _Waiting(request, missing)

    def work(self, step_seconds: float | None) -> None:
        """Encode for one turn. ``step_seconds`` is the time of a decode step of the running requests; None if none
        runs.

        The encoder works in pieces. A turn ends before a piece that would exceed its time limit. If a single piece
        exceeds the limit, the encoder saves the time of several turns for it.
        """
        limit = _IDLE_SECONDS if step_seconds is None else BUSY_FRACTION * step_seconds
        if step_seconds is None:
            self._saved, self._longest = limit, 0.0
        else:
            self._saved = min(self._saved + limit, limit if self._longest <= limit else self._longest + limit)
            if self._saved + _ROUNDING < self._longest:
                return
        start = self._clock.now()
        self._encode_until(start + self._saved)
        self._saved -= self._clock.now() - start
        if self._memory is not None:
            self._memory.rest()

    def _encode_until(self, end: float) -> None:
        """Encode piece by piece until no piece is left, or until the next piece would probably end after ``end``. At
        least one piece is computed."""
        while self._queue and self._memory is not None:
            if self._work is None:
                key, tile = next(iter(self._queue.items()))
                self._work = key, self._memory.encode(tile)
            key, pieces = self._work
            begin = self._clock.now()
            try:
                next(pieces)
            except StopIteration:
                self._end(key, "")
            except Exception as error:
                _log.exception("an image could not be encoded; its requests end with an error")
                self._end(key, f"an image could not be encoded ({type(error).__name__})")
            now = self._clock.now()
            if key in self._queue or (self._memory is not None and self._memory.holds(key)):
                self._seconds[key] = self._seconds.get(key, 0.0) + now - begin
            self._longest = max(now - begin, _FORGET * self._longest)
            if now + self._longest > end + _ROUNDING:
                return

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

    def check_invariants(self, requests: Iterable[Request]) -> None:
        """Raise InvariantError if a counter is wrong, or if the rows of a tile are missing for a request that may run.
        ``requests`` are the unfinished requests."""
        with_images = {request.request_id: request for request in requests if request.images}
        if self._of.keys() != with_images.keys():
            raise InvariantError(f"images belong to requests {sorted(self._of)} instead of {sorted(with_images)}")
        counts = Counter(key for keys in self._of.values() for key in keys)
        if counts != self._users:
            raise InvariantError("tiles have other numbers of requests than their counts say")
        for name, request in with_images.items():
            if request.is_ready and not all(self._memory is not None and self._memory.holds(k) for k in self._of[name]):
                raise InvariantError(f"request {name} is ready, and a tile of it is not encoded")
        if self._unused.keys() & counts.keys():
            raise InvariantError("a tile that a request uses may be dropped")
        if self._unused.keys() != self._worth.keys():
            raise InvariantError("unused tiles have no rank, or used tiles have one")
        if sum(self._unused.values()) > self._kept_bytes:
            raise InvariantError(f"unused tiles have more than {self._kept_bytes} bytes")

    def shutdown(self) -> None:
        """Drop all requests and their tiles."""
        for mapping in (self._waiting, self._of, self._users, self._queue):
            mapping.clear()
        self._work = None
        self._saved = 0.0

    def _let_go(self, key: bytes) -> None:
        if self._memory is None or not self._memory.holds(key):
            self._queue.pop(key, None)
            self._seconds.pop(key, None)
            if self._work is not None and self._work[0] == key:
                self._work = None
            return
        # GreedyDual-Size (Cao and Irani, 1997): a tile is kept for the seconds that encoding it again would take, for
        # each byte of its rows. Ranks of later tiles begin at the rank of the last dropped tile, so all tiles age.
        self._unused[key] = size = self._memory.size(key)
        self._worth[key] = self._age + self._seconds.get(key, 0.0) / max(size, 1)
        while sum(self._unused.values()) > self._kept_bytes:
            least = min(self._unused, key=self._worth.__getitem__)
            self._age = self._worth.pop(least)
            del self._unused[least]
            self._seconds.pop(least, None)
            self._memory.drop(least)

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
