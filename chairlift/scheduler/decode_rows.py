"""Requests that compute one token in every step. They share one decode clock and a timing wheel.

The wheel makes a steady step cheap. A request is filed under the tick at which its block is full or its last token is
due, so that no step has to ask every request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from chairlift.request import DecodeClock, Request

__all__ = ["DecodeRows", "receivers"]


def _drop(token: int) -> None:
    """Receiver of tokens that no request takes."""


def receivers(requests: Iterable[Request | None]) -> tuple[list[Request | None], list[Callable[[int], Any]]]:
    """(request, function that appends its token) for each sample position. Tokens of held rows are dropped."""
    sampled = [None if request is None or request.finish_reason else request for request in requests]
    return sampled, [_drop if request is None else request.token_ids.append for request in sampled]


class DecodeRows:
    """The lists are replaced, never changed in place: steps in flight keep the ones they were scheduled with."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._clock = DecodeClock()
        self._wheel: dict[int, list[Request]] = {}
        """Tick -> requests that the scheduler must look at then."""
        self.retiring: list[Request] = []
        """Rows whose last step is in flight. They are not in the wheel."""
        self.stale = False
        """Whether a request came or went. :meth:`rebuild` must then run before the lists are used."""
        self.count = 0
        """Rows that will compute in the next tick; the lists below may still have some that have left."""
        self.requests: list[Request] = []
        self.sampled: list[Request | None] = []
        """The same, with None for held rows, whose tokens are dropped."""
        self.appends: list[Callable[[int], Any]] = []
        """Slot of each row's next token."""
        self.slots: tuple[int, ...] = ()
        self.ids: tuple[tuple[str, int], ...] = ()
        """(request id, slot) of every row."""
        self.adapters: frozenset[int] = frozenset()
        """Adapters of all rows; 0 may be among them."""

    @property
    def num_held(self) -> int:
        """Finished rows that keep computing until their static batch ends."""
        return len(self.sampled) - len(list(filter(None, self.sampled))) if None in self.sampled else 0

    def due(self) -> list[Request]:
        """Requests that the scheduler must look at before the clock ticks."""
        return self._wheel.pop(self._clock.count, [])

    def tick(self) -> None:
        self._clock.count += 1

    def start(self, requests: list[Request]) -> None:
        """Let these requests advance with the clock from the next tick on."""
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
        if request in bucket:  # else the scheduler has just taken it out of the wheel
            bucket.remove(request)
        request.due_at = -1
        self.stale = True

    def watch(self, request: Request, position: int, ticks: int) -> None:
        """File the request, which computes ``position`` in ``ticks`` ticks, under its next new block or its end."""
        wait = min(-position % self._block_size, request.limit - 1 - position)
        own_end = request.max_total_tokens - 2 - position
        request.due_at = self._clock.count + ticks + (min(wait, own_end) if own_end >= 0 else wait)
        self._wheel.setdefault(request.due_at, []).append(request)

    def watched(self) -> list[Request]:
        return [request for bucket in [self.retiring, *self._wheel.values()] for request in bucket]

    def rebuild(self) -> None:
        # Rows of one adapter lie side by side, so that kernels read its matrices once for all of them.
        self.requests = sorted(filter(attrgetter("decoding"), self.requests), key=attrgetter("adapter_id"))
        any_adapter = bool(self.requests) and self.requests[-1].adapter_id
        self.adapters = frozenset([request.adapter_id for request in self.requests]) if any_adapter else frozenset()
        self.slots = tuple([request.slot for request in self.requests])
        self.ids = tuple([(request.request_id, request.slot) for request in self.requests])
        self.sampled, self.appends = receivers(self.requests)
        self.stale = False
