"""Delivers the outputs of one request to its reader, which may be slow or leave early."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from chairlift.base.outputs import OutputKind, RequestOutput
from chairlift.engine.output_processor import RequestState
from chairlift.errors import ChairliftError

__all__ = ["OutputStream"]

_log = logging.getLogger(__name__)


class OutputStream:
    """Outputs of one request, as an async iterator. A reader that stops before the end must call :meth:`abort`."""

    def __init__(self, state: RequestState, kind: OutputKind, abort: Callable[[str], None], name: str = "") -> None:
        self.request_id = state.request_id
        self.name = name
        """The caller's name for the request. Several requests may have the same name."""
        self.tenant = state.prepared.service.tenant
        self.prompt_token_ids = state.prepared.prompt_token_ids
        self.service_class = state.prepared.service.service_class
        self.leases = state.prepared.service.leases
        self.state = state
        self._abort = abort
        self._kind = kind
        self._news = asyncio.Event()
        self._error: ChairliftError | None = None
        self._over = False
        self._seen = 0
        """Number of generated tokens when the reader took the last output."""
        self._timers: list[asyncio.TimerHandle] = []

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._over:
            if self._error is not None:
                self._over = True
                raise self._error
            self._news.clear()
            finished = self._over = self.state.finished
            try:
                output = self._next(finished)
            except Exception as error:  # out of memory for its text, or a bug; the request ends and the engine is told
                _log.error("request %s ends with an error: its output could not be made", self.name, exc_info=error)
                self.state.fail(error)
                self._abort(self.request_id)
                finished = self._over = True
                output = self._next(finished)
            if output is not None:
                return output
            if not finished:
                await self._news.wait()
        raise StopAsyncIteration

    def _next(self, finished: bool) -> RequestOutput | None:
        if self._kind is OutputKind.DELTA:
            return self.state.delta()
        if finished:
            return self.state.output()
        seen = self._seen
        self._seen = self.state.num_tokens
        return self.state.output() if self._kind is OutputKind.CUMULATIVE and self._seen > seen else None

    def abort(self) -> None:
        """End the request in any state. Does nothing if it has ended."""
        self._over = True
        self._news.set()
        self._abort(self.request_id)

    async def aclose(self) -> None:
        self.abort()

    def wake(self) -> None:
        """Wake the reader, because there may be a new output."""
        self._news.set()

    def fail(self, error: ChairliftError) -> None:
        """End the stream: the reader gets this error."""
        if self._error is None and not self.state.finished:
            self._error = error
        self._news.set()

    def set_timer(self, seconds: float, call: Callable[[str], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, call, self.request_id))

    def settle(self) -> None:
        """Stop the timers, because the request has left the engine."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
