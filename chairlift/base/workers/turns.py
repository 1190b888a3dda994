"""Runs a limited number of jobs at a time. A limited number of further jobs waits; beyond that an error is raised."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from chairlift.errors import QueueFullError

__all__ = ["Turns"]

_T = TypeVar("_T")


class Turns:
    """Runs at most ``at_once`` jobs at a time. At most ``max_waiting`` (at least 1) further callers wait. ``what``
    names the jobs in error messages.

    If a caller is cancelled, its job continues and still counts until it ends, because work on a thread or in a worker
    process cannot be stopped.
    """

    def __init__(self, at_once: int, max_waiting: int, what: str) -> None:
        self._at_once = at_once
        self._free = asyncio.Semaphore(at_once)
        self._max_waiting = max(1, max_waiting)
        self._what = what
        self.num_waiting = 0
        self._seconds = 0.0
        """Running mean of the duration of a job, in seconds."""

    async def take(self, start: Callable[[], asyncio.Future[_T]]) -> _T:
        """Run the job that ``start`` begins, and return its result. Raises QueueFullError if the queue is full."""
        if self.num_waiting >= self._max_waiting:
            message = f"{self.num_waiting} {self._what} wait already, as many as may; try again later"
            raise QueueFullError(message, min(60.0, self.num_waiting * self._seconds / self._at_once) or 1.0)
        self.num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.num_waiting -= 1
        began = asyncio.get_running_loop().time()
        work = start()
        work.add_done_callback(lambda work: self._ended(work, began))
        return await asyncio.shield(work)

    def _ended(self, work: asyncio.Future[Any], began: float) -> None:
        self._free.release()
        self._seconds += (0.2 if self._seconds else 1.0) * (asyncio.get_running_loop().time() - began - self._seconds)
        if not work.cancelled():
            work.exception()  # the caller may have left, and an error that is never fetched would be logged
