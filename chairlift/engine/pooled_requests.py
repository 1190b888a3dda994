"""Texts that wait for their vectors, in the process of the event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Protocol

from chairlift.engine.intake import Intake
from chairlift.engine.messages import PassBegun, Pooled
from chairlift.engine.pooling_core import PooledText
from chairlift.errors import ChairliftError, OverloadedError, QueueTimeoutError
from chairlift.metrics.stats import FinishedRequest, RequestStats

__all__ = ["PooledRequests"]


class _Client(Protocol):
    def pool(self, text: PooledText) -> None: ...

    def abort(self, sequence_ids: Sequence[str]) -> None: ...


@dataclasses.dataclass(slots=True)
class _Asked:
    vector: asyncio.Future[bytes]
    num_tokens: int
    since: float
    started: float | None = None


class PooledRequests:
    """Calls that wait for vectors. Each text is a separate request in the queue; a call waits for all of its texts."""

    def __init__(self, intake: Intake, stats: RequestStats) -> None:
        self._intake, self._stats = intake, stats
        self._asked: dict[str, _Asked] = {}

    def __len__(self) -> int:
        return len(self._asked)

    async def ask(
        self, texts: Sequence[PooledText], client: _Client, *, since: float, patience: float | None, limit: float | None
    ) -> list[bytes]:
        """The vectors of the texts of one call, in order.

        The last text must have started ``patience`` seconds after ``since``, and all must have ended ``limit`` seconds
        after it. Raises QueueTimeoutError and OverloadedError when they have not, and errors from :meth:`fail` and the
        engine. In every case the engine keeps none of the texts.
        """
        loop, now = asyncio.get_running_loop(), time.monotonic()
        for text in texts:
            client.pool(text)
            self._asked[text.request_id] = _Asked(loop.create_future(), len(text.token_ids), since)
            self._intake.enter(text.request_id, len(text.token_ids), now=now)
        waiting = [self._asked[text.request_id].vector for text in texts]
        ids = [text.request_id for text in texts]
        timers = [] if patience is None else [loop.call_later(since + patience - now, self._queued_too_long, ids)]
        try:
            async with asyncio.timeout(None if limit is None else since + limit - now):
                return list(await asyncio.gather(*waiting))
        except TimeoutError:
            retry = self._intake.retry_after(time.monotonic())
            raise OverloadedError("the request was not finished in time", retry) from None
        finally:
            for timer in timers:
                timer.cancel()
            self._drop(ids, client)

    def begun(self, message: PassBegun) -> None:
        """A pass with these texts has begun."""
        now = time.monotonic()
        self._stats.engine.num_running = len(message.request_ids)
        for request_id in message.request_ids:
            self._intake.leave(request_id, now, started=True)
            if (asked := self._asked.get(request_id)) is not None:
                asked.started = now

    def pooled(self, message: Pooled) -> None:
        """A pass has ended."""
        now = time.monotonic()
        self._intake.heard(now, busy=True)
        self._stats.step(message.stats)
        for vector in message.vectors:
            asked = self._asked.pop(vector.request_id, None)
            if asked is None:
                continue
            self._ended(asked, "error" if vector.error else "stop", now)
            self._stats.prompt_computed(asked.num_tokens, 0)
            if asked.vector.done():
                continue
            if vector.error:
                retry = self._intake.retry_after(now)
                asked.vector.set_exception(OverloadedError(f"the text has no result: {vector.error}", retry))
            else:
                asked.vector.set_result(vector.values)

    def fail_all(self, error: ChairliftError) -> None:
        """End all calls: the engine has died."""
        for asked in list(self._asked.values()):
            if not asked.vector.done():
                asked.vector.set_exception(error)

    def _queued_too_long(self, ids: Sequence[str]) -> None:
        late = [asked for each in ids if (asked := self._asked.get(each)) is not None and asked.started is None]
        if late and not late[0].vector.done():
            self._stats.rejected["queue_timeout"] += 1
            retry = self._intake.retry_after(time.monotonic())
            error = QueueTimeoutError("the request was not started within its queue_timeout", retry)
            late[0].vector.set_exception(error)

    def _drop(self, ids: Sequence[str], client: _Client) -> None:
        left = [each for each in ids if each in self._asked]
        now = time.monotonic()
        for each in left:
            asked = self._asked.pop(each)
            asked.vector.cancel()
            self._intake.leave(each, now, started=False)
            self._ended(asked, "abort", now)
        if left:
            client.abort(left)

    def _ended(self, asked: _Asked, reason: str, now: float) -> None:
        started = asked.started
        self._stats.request_finished(
            FinishedRequest(
                reason=reason,
                prompt_tokens=asked.num_tokens,
                cached_tokens=0,
                generation_tokens=0,
                n=1,
                max_tokens=None,
                num_preemptions=0,
                e2e_seconds=now - asked.since,
                queue_seconds=None if started is None else started - asked.since,
                prefill_seconds=None if started is None else now - started,
                decode_seconds=None,
            )
        )
