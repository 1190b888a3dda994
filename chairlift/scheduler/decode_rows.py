"""Requests that compute one token in every step: they share one beat, and a timing wheel knows who needs attention.

The wheel is what makes a steady step cost next to nothing: instead of asking every request in every step whether its
block is full or its last token is near, each is filed under the beat at which that will be so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any

from chairlift.request import Beat, Request

__all__ = ["DecodeRows", "receivers"]


def _drop(token: int) -> None:
    """Where tokens go that nobody wants."""


def receivers(requests: Iterable[Request | None]) -> tuple[list[Request | None], list[Callable[[int], Any]]]:
    """Who gets the token of each sample position, and how it is appended: a held row's, and nobody's, go nowhere."""
    sampled = [None if request is None or request.finish_reason else request for request in requests]
    return sampled, [_drop if request is None else request.token_ids.append for request in sampled]


class DecodeRows:
    """The lists are replaced, never changed in place: steps in flight keep the ones they were scheduled with."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._beat = Beat()
        self._wheel: dict[int, list[Request]] = {}
        self.retiring: list[Request] = []
        """Rows whose last step is in flight; they are due at no beat."""
        self.stale = False
        """Somebody came or went: :meth:`rebuild` before the lists are used."""
        self.count = 0
        """Rows that will compute in the next tick; the lists below may still have some that have left."""
        self.requests: list[Request] = []
        self.sampled: list[Request | None] = []
        """The same, with None for held rows, whose tokens nobody wants."""
        self.appends: list[Callable[[int], Any]] = []
        """Where each row's next token goes."""
        self.slots: tuple[int, ...] = ()
        self.ids: tuple[tuple[str, int], ...] = ()
        """(request id, slot) of every row."""

    @property
    def num_held(self) -> int:
        """Finished rows that keep computing until their static batch ends."""
        return len(self.sampled) - len(list(filter(None, self.sampled))) if None in self.sampled else 0

    def due(self) -> list[Request]:
        """Requests to attend to before this beat ticks."""
        return self._wheel.pop(self._beat.count, [])

    def tick(self) -> None:
        self._beat.count += 1

    def start(self, requests: list[Request]) -> None:
        """From the next tick on, these advance with the beat."""
        self.requests = self.requests + requests
        self.count += len(requests)
        self.stale = True
        for request in requests:
            request.join(self._beat)
            self.watch(request, request.num_computed_tokens, 0)

    def stop(self, request: Request) -> None:
        request.leave()
        self.count -= 1
        bucket = self._wheel.get(request.due_at, self.retiring)
        if request in bucket:  # else it is being attended to
            bucket.remove(request)
        request.due_at = -1
        self.stale = True

    def watch(self, request: Request, position: int, beats: int) -> None:
        """File the request, which computes ``position`` in ``beats`` beats, under its next block or its end."""
        wait = min(-position % self._block_size, request.limit - 1 - position)
        own_end = request.max_total_tokens - 2 - position
        request.due_at = self._beat.count + beats + (min(wait, own_end) if own_end >= 0 else wait)
        self._wheel.setdefault(request.due_at, []).append(request)

    def watched(self) -> list[Request]:
        return [request for bucket in [self.retiring, *self._wheel.values()] for request in bucket]

    def rebuild(self) -> None:
        self.requests = list(filter(attrgetter("decoding"), self.requests))
        self.slots = tuple([request.slot for request in self.requests])
        self.ids = tuple([(request.request_id, request.slot) for request in self.requests])
        self.sampled, self.appends = receivers(self.requests)
        self.stale = False
