"""Calls that wait for vectors of their texts. They run in the process with the event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Protocol

from chairlift.engine.intake import Intake
from chairlift.engine.pooled.pooling_core import PooledText
from chairlift.engine.process.messages import PassBegun, Pooled
from chairlift.errors import ChairliftError, OverloadedError, QueueTimeoutError
from chairlift.metrics.stats import FinishedRequest, RequestStats

__all__ = ["PooledRequests"]


class _Client(Protocol):
    def pool(self, text: PooledText) -> None: ...

    def abort(self, sequence_ids: Sequence[str]) -> None: ...


@dataclasses.dataclass(slots=True)
class _WaitingText:
    vector: asyncio.Future[bytes]
    num_tokens: int
    since: float
    started: float | None = None


class PooledRequests:
    """Calls that wait for vectors. Each text is a separate request in the queue; a call waits for the vectors of all
    its texts."""

    def __init__(self, intake: Intake, stats: RequestStats) -> None:
        self._intake, self._stats = intake, stats
        self._texts: dict[str, _WaitingText] = {}

    def __len__(self) -> int:
        return len(self._texts)

    async def ask(
        self, texts: Sequence[PooledText], client: _Client, *, since: float, patience: float | None, limit: float | None
    ) -> list[bytes]:
        """Send the texts of one call to the engine, and return their vectors in order.

        Raises QueueTimeoutError if a text has not started ``patience`` seconds after ``since``, and OverloadedError if
        a text has not ended ``limit`` seconds after ``since``. Also raises errors from :meth:`fail_all` and the engine.
        After any error, the engine computes no further text of the call.
        """
        loop, now = asyncio.get_running_loop(), time.monotonic()
        for text in texts:
            client.pool(text)
            self._texts[text.request_id] = _WaitingText(loop.create_future(), len(text.token_ids), since)
            self._intake.enter(text.request_id, len(text.token_ids), now=now)
        waiting = [self._texts[text.request_id].vector for text in texts]
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
        """Note that a forward pass has begun, with the texts that ``message`` names."""
        now = time.monotonic()
        self._stats.engine.num_running = len(message.request_ids)
        for request_id in message.request_ids:
            self._intake.leave(request_id, now, started=True)
            if (waiting_text := self._texts.get(request_id)) is not None:
                waiting_text.started = now

    def pooled(self, message: Pooled) -> None:
        """Deliver the results of a forward pass to the calls that wait for them."""
        now = time.monotonic()
        self._intake.heard(now, busy=True)
        self._stats.step(message.stats)
        for vector in message.vectors:
            waiting_text = self._texts.pop(vector.request_id, None)
            if waiting_text is None:
                continue
            self._ended(waiting_text, "error" if vector.error else "stop", now)
            self._stats.prompt_computed(waiting_text.num_tokens, 0)
            if waiting_text.vector.done():
                continue
            if vector.error:
                retry = self._intake.retry_after(now)
                waiting_text.vector.set_exception(OverloadedError(f"the text has no result: {vector.error}", retry))
            else:
                waiting_text.vector.set_result(vector.values)

    def fail_all(self, error: ChairliftError) -> None:
        """End all calls with this error, because the engine has died."""
        for waiting_text in list(self._texts.values()):
            if not waiting_text.vector.done():
                waiting_text.vector.set_exception(error)

    def _queued_too_long(self, ids: Sequence[str]) -> None:
        late = [
            waiting_text
            for each in ids
            if (waiting_text := self._texts.get(each)) is not None and waiting_text.started is None
        ]
        if late and not late[0].vector.done():
            self._stats.rejected["queue_timeout"] += 1
            retry = self._intake.retry_after(time.monotonic())
            error = QueueTimeoutError("the request was not started within its queue_timeout", retry)
            late[0].vector.set_exception(error)

    def _drop(self, ids: Sequence[str], client: _Client) -> None:
        remaining = [each for each in ids if each in self._texts]
        now = time.monotonic()
        for each in remaining:
            waiting_text = self._texts.pop(each)
            waiting_text.vector.cancel()
            self._intake.leave(each, now, started=False)
            self._ended(waiting_text, "abort", now)
        if remaining:
            client.abort(remaining)

    def _ended(self, waiting_text: _WaitingText, reason: str, now: float) -> None:
        started = waiting_text.started
        self._stats.request_finished(
            FinishedRequest(
                reason=reason,
                prompt_tokens=waiting_text.num_tokens,
                cached_tokens=0,
                generation_tokens=0,
                n=1,
                max_tokens=None,
                num_preemptions=0,
                e2e_seconds=now - waiting_text.since,
                queue_seconds=None if started is None else started - waiting_text.since,
                prefill_seconds=None if started is None else now - started,
                decode_seconds=None,
            )
        )
