"""Requests that compute one token in every step. They share a decode clock and a timing wheel.

The wheel makes a steady step cheap: it stores each request under the tick at which its block is full or its last token
is due. So no step has to check every request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from chairlift.core.request import DecodeClock, Request

__all__ = ["DecodeRows", "receivers"]


def _drop(token: int) -> None:
    """Discard the token of a row whose request has ended."""


def receivers(requests: Iterable[Request | None]) -> tuple[list[Request | None], list[Callable[[int], Any]]]:
    """(list of requests, list of functions that store a token), each with one entry per sample position. The tokens of
    rows that have ended and are held in a static batch are dropped."""
    sampled = [None if request is None or request.finish_reason else request for request in requests]
    return sampled, [_drop if request is None else request.token_ids.append for request in sampled]


class DecodeRows:
    """The decode rows of a batch. The lists are replaced, never changed in place, because steps in flight still use the
    old lists."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._clock = DecodeClock()
        self._wheel: dict[int, list[Request]] = {}
        """Tick of the decode clock -> requests that need a new KV block, or compute their last token, at this tick."""
        self.retiring: list[Request] = []
        """Requests whose last step is in flight. They are not in the timing wheel any more."""
        self.stale = False
        """Whether a request was added or removed, so that :meth:`rebuild` must run before the lists are used."""
        self.count = 0
        """Number of rows that compute in the next tick. The lists below may still include requests that have left their
        rows."""
        self.requests: list[Request] = []
        self.sampled: list[Request | None] = []
        """Same list as ``requests``, but with None for each request that has ended and holds its row until its static
        batch ends. The row's tokens are dropped."""
        self.num_held = 0
        """Number of rows whose request has ended, and that compute on until their static batch ends."""
        self.appends: list[Callable[[int], Any]] = []
        """One entry per row: function that stores the row's next token."""
        self.slots: tuple[int, ...] = ()
        self.ids: tuple[tuple[str, int], ...] = ()
        """One entry per row: (request id, slot of the row)."""

    def due(self) -> list[Request]:
        """Requests that need a new KV block, or compute their last token, at the next tick. They are removed from the
        timing wheel."""
        return self._wheel.pop(self._clock.count, [])

    def tick(self) -> None:
        self._clock.count += 1

    def start(self, requests: list[Request]) -> None:
        """Let these requests advance with the decode clock, beginning with the next tick."""
        self.requests = self.requests + requests
        self.count += len(requests)
        self.stale = True
        for request in requests:
            request.join(self._clock)
            self.watch(request, request.num_computed_tokens, 0)

    def stop(self, request: Request) -> None:
        request.leave()
        self.count -= 1
        bucket = self._wheel.get(request.due_at, self.retiring)
        if request in bucket:  # otherwise the scheduler has just removed it from the wheel
            bucket.remove(request)
        request.due_at = -1
        self.stale = True

    def watch(self, request: Request, position: int, ticks: int) -> None:
        """Put the request into the timing wheel, at the tick at which it needs a new block or computes its last token.
        After ``ticks`` more ticks, its next position to compute is ``position``."""
        wait = min(-position % self._block_size, request.limit - 1 - position)
        own_end = request.max_total_tokens - 2 - position
        request.due_at = self._clock.count + ticks + (min(wait, own_end) if own_end >= 0 else wait)
        self._wheel.setdefault(request.due_at, []).append(request)

    def watched(self) -> list[Request]:
        return [request for bucket in [self.retiring, *self._wheel.values()] for request in bucket]

    def rebuild(self) -> None:
        self.requests = sorted(filter(attrgetter("decoding"), self.requests), key=attrgetter("row_order"))
        self.slots = tuple([request.slot for request in self.requests])
        self.ids = tuple([(request.request_id, request.slot) for request in self.requests])
        self.sampled, self.appends = receivers(self.requests)
        self.num_held = self.sampled.count(None)
        self.stale = False
