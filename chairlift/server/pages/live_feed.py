"""Buffers of the recent steps of each engine, encoded once for all viewers of the live view page."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from chairlift.engine.async_engine import AsyncEngine
    from chairlift.engine.output_stream import OutputStream

__all__ = ["LiveFeed", "StepRing", "as_event"]

_LINGER_SECONDS: Final = 30.0
"""Seconds for which recording continues after the last viewer has left. A reloaded page then still finds the past
steps."""
_KEY: Final = b'{"key":'
_CHUNK: Final = 1 << 16
_MAX_NAMES: Final = 4096
"""Maximum number of X-Request-Ids that wait for the next entry of a ring."""


def as_event(lines: bytes) -> bytes:
    """Encode lines as one server-sent event."""
    return b"data: " + lines.replace(b"\n", b"\ndata: ") + b"\n\n"


class StepRing:
    """Buffer of one engine's steps: the entries of the last ``max_seconds`` seconds, at most ``max_bytes`` in all.

    Old entries are dropped up to a snapshot, so that the oldest entry is always a snapshot.
    """

    def __init__(
        self,
        *,
        max_bytes: int = 16 << 20,
        max_seconds: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.first = 0
        """Number of the oldest entry in the buffer. Entries are numbered without gaps."""
        self.num_bytes = 0
        self.max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._clock = clock
        self._entries: deque[tuple[bytes, float]] = deque()
        """(lines as one server-sent event, time). All viewers receive the same bytes."""
        self._keys: deque[int] = deque()
        """Numbers of the entries in the buffer that begin with a snapshot."""
        self._names: dict[str, str] = {}
        """Engine request id -> X-Request-Id, for requests that are new since the last entry."""
        self._news = asyncio.Event()

    @property
    def end(self) -> int:
        """Number that the next entry will get."""
        return self.first + len(self._entries)

    @property
    def newest_key(self) -> int:
        """Number of the newest entry that begins with a snapshot, at which a viewer can start."""
        return self._keys[-1] if self._keys else self.first

    def __getitem__(self, number: int) -> bytes:
        return self._entries[number - self.first][0]

    def lines(self) -> bytes:
        """The JSON lines of all entries in the buffer, joined."""
        events = [event[len(b"data: ") : -2].replace(b"\ndata: ", b"\n") for event, _ in self._entries]
        return b"\n".join(events)

    async def wait_for_entry(self, timeout: float) -> None:
        """Wait until there is a new entry, or for ``timeout`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._news.wait()

    def add(self, lines: bytes, streams: Callable[[], Iterable[OutputStream]]) -> None:
        """Add lines from the engine's step recorder. ``streams`` returns the unfinished requests."""
        if lines.startswith(_KEY):
            for stream in streams():
                self.name(stream)
            if b'"past":true' in lines[:4096].partition(b"\n")[0]:  # a new recorder began; it repeats what is known
                self.first = self.end
                self.num_bytes = 0
                self._entries.clear()
                self._keys.clear()
        if self._names:
            lines += b'\n{"names":' + json.dumps(self._names, separators=(",", ":")).encode() + b"}"
            self._names = {}
        self._append(lines)
        self._trim()
        self._news.set()
        self._news = asyncio.Event()

    def name(self, stream: OutputStream) -> None:
        """Remember the X-Request-Id of a request for the next entry. If there are too many requests, the newest are
        kept."""
        if stream.name:
            self._names[stream.request_id] = stream.name
            if len(self._names) > _MAX_NAMES:  # an idle replica has no entries
                del self._names[next(iter(self._names))]

    def _append(self, lines: bytes) -> None:
        if lines.startswith(_KEY):
            self._keys.append(self.end)
        self._entries.append((as_event(lines), self._clock()))
        self.num_bytes += len(self._entries[-1][0])

    def _trim(self) -> None:
        while len(self._keys) > 1:
            age = self._clock() - self._entries[self._keys[1] - self.first][1]
            if self.num_bytes <= self.max_bytes and age <= self._max_seconds:
                return
            self._keys.popleft()
            while self.first < self._keys[0]:
                self.num_bytes -= len(self._entries.popleft()[0])
                self.first += 1


class LiveFeed(StepRing):
    """Buffer of the steps of an engine, or of a ``recording``, which never changes. Counts the viewers.

    The engine reports its steps only while there is a viewer (:meth:`viewing`). If the engine has several replicas,
    this is the ring of the first one, and :meth:`ring` returns the others. The rings divide ``max_bytes``.
    """

    def __init__(
        self,
        engine: AsyncEngine | None,
        *,
        recording: bytes = b"",
        max_bytes: int = 16 << 20,
        max_seconds: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(max_bytes=max_bytes, max_seconds=max_seconds, clock=clock)
        self.num_viewers = 0
        self.working = asyncio.Semaphore(1)
        """Lets the simulator work for only one viewer at a time."""
        self.num_callers = 0
        """Number of viewers that wait for a simulation."""
        self.num_uses: Counter[tuple[str, str]] = Counter()
        """("viewers" or "simulations", holder of an API key) -> number of uses in progress."""
        self._engine = engine
        self._bytes_of_all = max_bytes
        self._rings: dict[int, StepRing] = {0: self}
        self._leaving: asyncio.TimerHandle | None = None
        lines = recording.splitlines(keepends=True)
        while lines:
            size = count = 0
            while count < len(lines) and size < _CHUNK:
                size = size + len(lines[count])
                count = count + 1
            self._append(b"".join(lines[:count]).rstrip(b"\n"))
            del lines[:count]

    @property
    def is_recording(self) -> bool:
        return self._engine is None

    @property
    def num_rings(self) -> int:
        """Number of engines that have a buffer of steps."""
        return max(1, 0 if self._engine is None else len(self._engine.replicas.shown()))

    def ring(self, replica: int) -> StepRing:
        """Buffer of the steps of a replica. Replicas are counted from 0."""
        if replica not in self._rings:
            self._rings[replica] = StepRing(max_seconds=self._max_seconds, clock=self._clock)
            for ring in self._rings.values():
                ring.max_bytes = self._bytes_of_all // len(self._rings)
        return self._rings[replica]

    @contextlib.contextmanager
    def viewing(self) -> Iterator[None]:
        """Context manager: count a viewer while the block runs. The engine reports its steps during this time and
        ``_LINGER_SECONDS`` longer."""
        self.num_viewers += 1
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        elif self.num_viewers == 1 and self._engine is not None:
            self._engine.events.subscribe("the live view", self)
        try:
            yield
        finally:
            self.num_viewers -= 1
            if not self.num_viewers and self._engine is not None:
                self._leaving = asyncio.get_running_loop().call_later(_LINGER_SECONDS, self._stop)

    def steps(self, lines: bytes, replica: int = 0) -> None:
        """Add lines from the step recorder of a replica to the replica's buffer."""
        self.ring(replica).add(lines, lambda: [] if self._engine is None else self._engine.requests())

    def began(self, stream: OutputStream) -> None:
        """Remember the X-Request-Id of a new request for all buffers, because it is not known yet which replica serves
        the request."""
        for ring in self._rings.values():
            ring.name(stream)

    def _stop(self) -> None:
        self._leaving = None
        if self._engine is not None:
            self._engine.events.unsubscribe("the live view")
