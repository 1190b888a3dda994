"""Images of requests: which requests wait for which tile, when the encoder computes, and which encoded tiles stay in
memory.

A request with images enters the queue only when all its tiles are encoded. Between two steps the encoder computes for a
fraction of a step's time, so that running requests are not delayed for long. The encoded rows of a tile stay in memory
until the last request with the tile has ended, and after that as long as there is room.

If the memory is full, and a tile of an earlier request must be encoded, rows that requests use may be given up (see
:mod:`chairlift.engine.image_room`). Which rows may go:

- rows whose KV a running request holds or a swapped request has in host memory, for any request;
- rows that a waiting request needs, for a request that arrived earlier. So the earliest request always gets room, and
  two requests cannot take each other's rows in turns.

A request whose rows are gone joins only if its KV begins after them (:attr:`Request.rows_lost_until`). Otherwise it
leaves the queue until its tiles are encoded again.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from chairlift.base.image_spans import ImageTile
from chairlift.core.request import Request, RequestStatus
from chairlift.engine.clock import Clock, SystemClock
from chairlift.engine.image_room import HeldRows, rows_to_give_up
from chairlift.errors import InvariantError, RequestError
from chairlift.executor.executor import ImageMemory

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

    ``clock`` measures the encoder's time. ``kept_bytes`` is the maximum number of bytes of rows that no request uses,
    and ``limit`` the maximum number of bytes of all rows (None: no limit). ``num_known`` returns the number of leading
    positions of a request whose KV exists, and ``compute_seconds`` the predicted seconds to compute a number of prompt
    tokens; both are needed with a limit. Only one thread may call the methods.
    """

    def __init__(
        self,
        memory: ImageMemory | None = None,
        clock: Clock | None = None,
        kept_bytes: int = _KEPT_BYTES,
        limit: int | None = None,
        num_known: Callable[[Request], int] = lambda request: 0,
        compute_seconds: Callable[[int], float] = lambda num_tokens: 0.0,
    ) -> None:
        self._memory = memory
        self._clock = clock or SystemClock()
        self.kept_bytes = kept_bytes
        self.limit = limit
        self._num_known = num_known
        self._compute_seconds = compute_seconds
        self.num_bytes = 0
        """Number of bytes of all rows in memory, and of the rows that are being computed."""
        self._sizes: dict[bytes, int] = {}
        """Key of a tile -> bytes of its rows."""
        self._tiles: dict[bytes, ImageTile] = {}
        """Tiles with pixels, for encoding. Pixels that take more memory than their rows are kept only while a request
        with the tile waits for the encoder; such rows are never given up after that."""
        self._given_up: set[bytes] = set()
        """Keys of tiles whose rows were given up and are not encoded again."""
        self._blocked_since: float | None = None
        """Time since which the next tile waits for room; None if it does not wait."""
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
        self._requests: dict[str, Request] = {}
        self._ready: list[Request] = []
        self._failed: list[tuple[Request, str]] = []
        self.num_encoded = self.num_hits = 0
        """Counters: tiles that were encoded; tiles that a new request found encoded already, or in the queue."""
        self.num_given_up = self.num_reencoded = 0
        """Counters: tiles whose rows were given up although requests used them; such tiles that were encoded again."""
        self._at_step = 0, 0, 0
        """Tiles encoded, given up and encoded again when the newest step ended."""

    @property
    def is_used(self) -> bool:
        """Whether a request with images has not ended."""
        return bool(self._of)

    @property
    def is_busy(self) -> bool:
        """Whether a result waits for :meth:`take_ready`."""
        return bool(self._ready or self._failed)

    def next_event(self, now: float) -> float | None:
        """``now`` if the encoder has work, or a result waits; otherwise None."""
        return now if self.is_encoding else None

    def counts(self) -> dict[str, Any]:
        """Fields of :class:`~chairlift.metrics.stats.EngineStats`; empty for a model that reads only texts."""
        if self._memory is None:
            return {}
        return {
            "num_tiles_encoded": self.num_encoded,
            "num_tile_hits": self.num_hits,
            "num_tiles_given_up": self.num_given_up,
            "num_tiles_reencoded": self.num_reencoded,
            "image_bytes": self.num_bytes,
            "max_image_bytes": self.limit or 0,
        }

    def state(self) -> tuple[int, ...]:
        """(tiles encoded, tiles whose rows were given up, such tiles encoded again, bytes of rows in memory, tiles in
        the encoder's queue, 1 if the next tile waits for room and else 0); empty for a model that reads only texts.
        The first three count from the engine's start."""
        if self._memory is None:
            return ()
        counters = self.num_encoded, self.num_given_up, self.num_reencoded
        return (*counters, self.num_bytes, len(self._queue), int(self._blocked_since is not None))

    def since_step(self) -> tuple[int, int, int, int]:
        """(tiles encoded, given up and encoded again since the last call, bytes of rows in memory)."""
        if self._memory is None:
            return 0, 0, 0, 0
        before = self._at_step
        self._at_step = (self.num_encoded, self.num_given_up, self.num_reencoded)
        encoded, given_up, again = (now - then for now, then in zip(self._at_step, before, strict=True))
        return encoded, given_up, again, self.num_bytes

    @property
    def is_encoding(self) -> bool:
        """Whether the encoder has work that does not wait for room, or a result waits for :meth:`take_ready`."""
        return bool((self._queue and self._blocked_since is None) or self._ready or self._failed)

    def add(self, requests: Sequence[Request], tiles: Sequence[ImageTile]) -> None:
        """Note the tiles of all sequences of one request. Sequences that must wait for the encoder are marked as not
        ready. Raises RequestError for a model that reads no images, and if the memory cannot hold all rows of the
        request."""
        memory = self._memory
        tiles_by_key = {tile.key: tile for tile in tiles}
        if memory is None:
            raise RequestError("this engine reads no images; send texts only")
        for request in requests:
            rows: dict[bytes, int] = {}
            for span in request.images:
                rows[span.key] = max(rows.get(span.key, 0), span.first + span.length)
            sizes = {key: memory.nbytes(count) for key, count in rows.items()}
            if not sizes.keys() <= tiles_by_key.keys():
                raise RequestError("an image span names a tile that was not sent")
            if self.limit is not None and sum(sizes.values()) > self.limit:
                raise RequestError(
                    f"the images need {sum(sizes.values()):,} bytes of encoded rows, and the server has"
                    f" {self.limit:,} for them; send fewer or smaller images, or raise image_memory_bytes"
                )
            self._of[request.request_id], self._requests[request.request_id] = tuple(sizes), request
            self._sizes.update(sizes)
            for key in sizes:
                self._users[key] = self._users.get(key, 0) + 1
                self._unused.pop(key, None)
                self._worth.pop(key, None)
                self._tiles.setdefault(key, tiles_by_key[key])
                if memory.holds(key) or key in self._queue:
                    self.num_hits += 1
                else:
                    self._queue[key] = tiles_by_key[key]
            self._note_rows(request)
            missing = {key for key in sizes if not memory.holds(key)}
            if missing:
                request.is_ready = False
                self._wait(request, missing)
            else:
                self._drop_pixels(sizes)

    def _wait(self, request: Request, missing: set[bytes]) -> None:
        request.waits_for = "image"
        self._waiting[request.request_id] = _Waiting(request, missing)

    def without_rows(self) -> list[Request]:
        """Requests that do not wait for the encoder although rows of their tiles are not in memory."""
        if not self._given_up:
            return []
        return [each for name, each in self._requests.items() if each.rows_lost_until and name not in self._waiting]

    def encode_again(self, request: Request) -> None:
        """Encode the tiles without rows that a request, which has left the queue, must read again."""
        known = self._num_known(request)
        memory = self._memory
        missing = {
            span.key
            for span in request.images
            if span.end > known and memory is not None and not memory.holds(span.key)
        }
        for key in missing:
            self._queue.setdefault(key, self._tiles[key])
        self._wait(request, missing)

    def find_room(self) -> None:
        """Begin the next tile of the earliest request that waits, if no tile was begun. The tile waits if the memory
        has no room for its rows, and no other rows are given up for it."""
        if self._memory is None or self._work is not None or not self._queue:
            return
        first = min(self._waiting.values(), key=lambda each: each.request.sequence)
        key = next(key for key in self._of[first.request.request_id] if key in first.missing)
        if not self._make_room(first.request, self._sizes[key]):
            if self._blocked_since is None:
                self._blocked_since = self._clock.now()
            return
        self._blocked_since = None
        self.num_bytes += self._sizes[key]
        self._seconds.pop(key, None)
        self._work = key, self._memory.encode(self._queue[key])

    def _make_room(self, needy: Request, size: int) -> bool:
        """Make room for ``size`` bytes of rows for a request. Returns False, and gives up no rows in use, if it must
        wait."""
        if self.limit is None:
            return True
        while self._unused and self.num_bytes + size > self.limit:
            self._drop_least()
        lack = self.num_bytes + size - self.limit
        if lack <= 0:
            return True
        since = self._blocked_since
        waited = 0.0 if since is None else self._clock.now() - since
        chosen = rows_to_give_up(self._held_rows(needy), lack, waited, len(self._requests), self._compute_seconds)
        for key in chosen:
            self._give_up(key)
        return bool(chosen)

    def _held_rows(self, needy: Request) -> Iterator[HeldRows]:
        """The rows in memory that requests use, as seen by a request that needs room."""
        users: dict[bytes, list[Request]] = {}
        for name, keys in self._of.items():
            for key in keys:
                users.setdefault(key, []).append(self._requests[name])
        known = {name: self._num_known(request) for name, request in self._requests.items()}
        for key, requests in users.items():
            if self._memory is None or not self._memory.holds(key):
                continue
            needing = [r for r in requests if self._needs(r, key, known[r.request_id])]
            # KV in the prefix cache may be evicted, so it spares no rows of a request that comes before the needy one.
            bound = [
                *needing,
                *(r for r in requests if r.slot < 0 and r.status is not RequestStatus.SWAPPED and r not in needing),
            ]
            may_go = all(each.slot < 0 and each.sequence > needy.sequence for each in bound) and key in self._tiles
            tokens = [each.images[-1].end - known[each.request_id] for each in needing]
            unready = any(each.request_id in self._waiting for each in needing)
            seconds = self._seconds.get(key, 0.0)
            size = self._sizes[key]
            yield HeldRows(key, size, seconds, may_go, bool(needing), None if unready else max(tokens, default=0))

    @staticmethod
    def _needs(request: Request, key: bytes, known: int) -> bool:
        """Whether a request must still read the rows of a tile. ``known`` is the number of its positions with KV."""
        return any(span.end > known for span in request.images if span.key == key)

    def _give_up(self, key: bytes) -> None:
        """Drop rows that requests use. Each request that needs them waits for them again, or is marked."""
        self._drop(key)
        self.num_given_up += 1
        self._given_up.add(key)
        for name, keys in self._of.items():
            if key in keys:
                self._note_rows(request := self._requests[name])
                waiting = self._waiting.get(name)
                if waiting is not None and self._needs(request, key, self._num_known(request)):
                    waiting.missing.add(key)
                    self._queue[key] = self._tiles[key]

    def _note_rows(self, request: Request) -> None:
        """Set the field of a request that says up to which position rows of its tiles are missing."""
        memory = self._memory
        ends = [span.end for span in request.images if memory is None or not memory.holds(span.key)]
        request.rows_lost_until = max(ends, default=0)

    def _drop_pixels(self, keys: Iterable[bytes]) -> None:
        """Drop the pixels of encoded tiles that take more memory than the rows, if no request waits with the tile."""
        waiting = {key for name in self._waiting for key in self._of[name]}
        for key in keys:
            tile = self._tiles.get(key)
            is_idle = key not in waiting and self._memory is not None and self._memory.holds(key)
            if tile is not None and is_idle and len(tile.pixels) > self._sizes[key]:
                del self._tiles[key]

    def work(self, step_seconds: float | None) -> None:
        """Encode for one turn. ``step_seconds`` is the time of a decode step of the running requests; None if none
        runs.

        The encoder works in pieces. A turn ends before a piece that would exceed its time limit. If a single piece
        exceeds the limit, the encoder saves the time of several turns for it.
        """
        limit = _IDLE_SECONDS if step_seconds is None else BUSY_FRACTION * step_seconds
        if step_seconds is None:
            self._saved = limit
            self._longest = 0.0
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
        while True:
            self.find_room()
            if self._work is None:
                return
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
        ready = [each for each in self._ready if not each.is_finished]
        self._ready = []
        failed = [each for each in self._failed if not each[0].is_finished]
        self._failed = []
        return ready, failed

    def waits(self, request: Request) -> bool:
        """Whether the request waits for a tile to be encoded."""
        return request.request_id in self._waiting

    def forget(self, request: Request) -> None:
        """Note that a request has ended."""
        self._waiting.pop(request.request_id, None)
        self._requests.pop(request.request_id, None)
        for key in self._of.pop(request.request_id, ()):
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._let_go(key)
            else:
                self._cancel_unwanted(key)

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
            lost = [span for span in request.images if self._memory is None or not self._memory.holds(span.key)]
            if max((span.end for span in lost), default=0) != request.rows_lost_until:
                raise InvariantError(f"request {name} does not know which of its rows are in memory")
            if request.slot >= 0 and request.num_computed_tokens < request.rows_lost_until:
                raise InvariantError(f"request {name} runs, and a tile that it must read is not encoded")
            missing = self._waiting[name].missing if name in self._waiting else set()
            if not missing <= self._queue.keys():
                raise InvariantError(f"request {name} waits for a tile that is not in the encoder's queue")
        wanted = {key for each in self._waiting.values() for key in each.missing}
        if self._queue.keys() != wanted:
            raise InvariantError("the encoder's queue has a tile for which no request waits")
        self._check_bytes()
        if self._unused.keys() & counts.keys():
            raise InvariantError("a tile that a request uses may be dropped")
        if self._unused.keys() != self._worth.keys():
            raise InvariantError("unused tiles have no rank, or used tiles have one")
        if sum(self._unused.values()) > self.kept_bytes:
            raise InvariantError(f"unused tiles have more than {self.kept_bytes} bytes")

    def _check_bytes(self) -> None:
        memory = self._memory
        held = [key for key in self._sizes if memory is not None and memory.holds(key)]
        begun = [] if self._work is None else [self._work[0]]
        if sum(self._sizes[key] for key in [*held, *begun]) != self.num_bytes:
            raise InvariantError(f"rows have other sizes than the {self.num_bytes} bytes that are counted")
        if self.limit is not None and self.num_bytes > self.limit:
            raise InvariantError(f"rows have {self.num_bytes} bytes, but the limit is {self.limit}")
        if self._queue.keys() & set(held):
            raise InvariantError("a tile is to be encoded although its rows are in memory")

    def shutdown(self) -> None:
        """Drop all requests and their tiles."""
        for mapping in (self._waiting, self._of, self._users, self._queue, self._requests, self._tiles):
            mapping.clear()
        self._work = None
        self._saved = 0.0

    def _let_go(self, key: bytes) -> None:
        """Note that no request uses a tile any more."""
        self._tiles.pop(key, None)
        self._given_up.discard(key)
        if self._memory is None or not self._memory.holds(key):
            self._cancel(key)
            self._seconds.pop(key, None)
            del self._sizes[key]
            return
        # GreedyDual-Size (Cao and Irani, 1997): a tile is kept for the seconds that encoding it again would take, for
        # each byte of its rows. Ranks of later tiles begin at the rank of the last dropped tile, so all tiles age.
        self._unused[key] = size = self._sizes[key]
        self._worth[key] = self._age + self._seconds.get(key, 0.0) / max(size, 1)
        while sum(self._unused.values()) > self.kept_bytes:
            self._drop_least()

    def _drop_least(self) -> None:
        """Drop the unused rows with the lowest rank."""
        least = min(self._unused, key=self._worth.__getitem__)
        self._age = self._worth.pop(least)
        del self._unused[least]
        self._seconds.pop(least, None)
        self._drop(least)
        del self._sizes[least]

    def _drop(self, key: bytes) -> None:
        if self._memory is not None:
            self._memory.drop(key)
        self.num_bytes -= self._sizes[key]

    def _cancel_unwanted(self, key: bytes) -> None:
        """Take a tile out of the encoder's queue if no request waits for it. Requests with KV for it may remain."""
        if not any(key in each.missing for each in self._waiting.values()):
            self._cancel(key)

    def _cancel(self, key: bytes) -> None:
        """Take a tile out of the encoder's queue, if it is there."""
        self._queue.pop(key, None)
        if self._work is not None and self._work[0] == key:
            self._work = None
            self.num_bytes -= self._sizes[key]

    def _end(self, key: bytes, error: str) -> None:
        """Note that the encoding of a tile has ended. ``error`` is empty after success."""
        self._work = None
        del self._queue[key]
        self.num_encoded += not error
        if error:
            self.num_bytes -= self._sizes[key]
        elif key in self._given_up:
            self._given_up.discard(key)
            self.num_reencoded += 1
        for name, keys in self._of.items():
            if key in keys:
                self._note_rows(self._requests[name])
        for each in [each for each in self._waiting.values() if key in each.missing]:
            each.missing.discard(key)
            if error or not each.missing:
                del self._waiting[each.request.request_id]
                each.request.waits_for = ""
            if error:
                self._failed.append((each.request, error))
                for other in each.missing:
                    self._cancel_unwanted(other)
            elif not each.missing:
                self._ready.append(each.request)
                self._drop_pixels(self._of[each.request.request_id])
