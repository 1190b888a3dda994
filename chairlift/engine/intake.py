"""How much may wait in front of the engine, and when to come again, from the rate at which the queue drains."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from chairlift.errors import QueueFullError

__all__ = ["Intake"]

_WINDOW: Final = 30.0
_LEAST, _MOST = 1.0, 60.0


class Intake:
    """Requests that were let in and have not been in a step yet. A bounded queue, so that waiting times are bounded.

    Refusing at once with a time to come again beats letting everybody wait too long (load shedding). Times are seconds
    on any one clock.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max(1, max_requests)
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._waiting: dict[str, int] = {}
        self._started: deque[float] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def check(self, now: float, num_requests: int = 1, num_tokens: int = 0) -> None:
        """Raise QueueFullError when so much more would be too much. A prompt of any length may wait alone."""
        if len(self._waiting) + num_requests > self.max_requests:
            raise QueueFullError(
                f"{len(self._waiting)} requests wait already, and {self.max_requests} may; try again later",
                self.retry_after(now),
                "requests",
            )
        if self._waiting and self.num_tokens + num_tokens > self.max_tokens:
            raise QueueFullError(
                f"requests with {self.num_tokens} prompt tokens wait already, and {self.max_tokens} tokens may; this"
                f" one has {num_tokens}; try again later",
                self.retry_after(now),
                "tokens",
            )

    def enter(self, request_id: str, num_tokens: int) -> None:
        self._waiting[request_id] = num_tokens
        self.num_tokens += num_tokens

    def leave(self, request_id: str, now: float, *, started: bool) -> None:
        """The request has been in a step, or has left without. Unknown ones are ignored."""
        tokens = self._waiting.pop(request_id, None)
        if tokens is None:
            return
        self.num_tokens -= tokens
        if started:
            self._started.append(now)
            self._forget(now)

    def clear(self) -> None:
        """Everybody has left."""
        self._waiting.clear()
        self.num_tokens = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def retry_after(self, now: float) -> float:
        """Whole seconds, 1 to 60, until what waits now will have started at the rate of the last half minute."""
        self._forget(now)
        if not self._waiting:
            return _LEAST
        if not self._started:
            return _WINDOW
        rate = len(self._started) / max(1.0, now - self._started[0])
        return min(_MOST, max(_LEAST, float(math.ceil(len(self._waiting) / rate))))

    def _forget(self, now: float) -> None:
        while self._started and self._started[0] < now - _WINDOW:
            self._started.popleft()
