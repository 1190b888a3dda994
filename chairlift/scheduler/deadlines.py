"""Which requests must start by when to keep their deadlines, and which cannot keep them any more."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from chairlift.request import Request

__all__ = ["Deadlines", "Estimate", "EstimateOf"]

_URGENT_SHARE = 0.5
"""A request may preempt running work for its deadline once this share of its slack is gone."""


class Estimate(NamedTuple):
    """Expected times and answer length of a request. Times in seconds."""

    to_first: float = 0.0
    """Expected time from its first step to its first token."""
    to_first_at_least: float = 0.0
    """Lower bound of ``to_first``, by the shortest steps seen."""
    num_tokens: int | None = None
    """Expected number of tokens of its answer; None if unknown."""
    per_token: float = 0.0
    """Expected time per token at the present load."""
    per_token_alone: float = 0.0
    """Expected time per token without other requests."""


EstimateOf = Callable[[Request], Estimate]
"""Function that estimates one request."""


class Deadlines:
    """Sets ``start_by`` of requests with deadlines: the latest time at which they must start.

    Least slack first fails under overload: the most hopeless requests would go first, and all would be late. So two
    groups leave this order. A request is *doubtful* if it would be late even alone, with an answer of expected length.
    A request is *lost* if it will be late in any case. The second test uses no guess of the answer's length and no
    step time that was never seen.
    """

    def __init__(self, estimate: EstimateOf | None = None) -> None:
        self.estimate_of = estimate or (lambda request: Estimate())
        self._due: list[tuple[float, int, Request]] = []
        self._moved: list[Request] = []

    def add(self, request: Request) -> None:
        """Watch a request that has arrived, if it has a deadline."""
        service = request.service
        if not service.has_deadline:  # an estimate looks the whole prompt up in the prefix cache, which costs time
            return
        estimate = self.estimate_of(request)
        num_tokens = estimate.num_tokens or request.max_total_tokens - request.num_prompt_tokens
        decode_seconds = (num_tokens - 1) * estimate.per_token
        request.start_by = min(service.first_token_by, service.finish_by - decode_seconds) - estimate.to_first
        heapq.heappush(self._due, (min(self._lost_and_doubtful_at(request, estimate)), request.sequence, request))

    def lost(self, now: float) -> Iterator[Request]:
        """Yield each request that cannot keep its deadline any more, once, and remove its deadline."""
        while self._due and self._due[0][0] < now:
            _, _, request = heapq.heappop(self._due)
            service = request.service
            if request.is_finished or not service.has_deadline:
                continue
            lost, doubtful = self._lost_and_doubtful_at(request, self.estimate_of(request))
            if lost < now:
                request.service = dataclasses.replace(service, first_token_by=math.inf, finish_by=math.inf)
                request.start_by = math.inf
                yield request
                continue
            if doubtful < now:
                request.start_by = doubtful = math.inf
                self._moved.append(request)
            if lost < math.inf:
                heapq.heappush(self._due, (min(lost, doubtful), request.sequence, request))

    def doubtful(self) -> list[Request]:
        """Requests that :meth:`lost` found doubtful since the last call."""
        moved, self._moved = self._moved, []
        return moved

    def is_urgent(self, request: Request, now: float) -> bool:
        """Whether a request may take rows and blocks from running work for its deadline."""
        return now >= request.start_by - _URGENT_SHARE * (request.start_by - request.arrival_time)

    @staticmethod
    def _lost_and_doubtful_at(request: Request, estimate: Estimate) -> tuple[float, float]:
        """(time at which the request is lost, time at which it is doubtful). The second is infinite once the request
        runs or is doubtful already."""
        service = request.service
        least = max(1, request.min_tokens) - request.num_output_tokens
        if request.num_output_tokens:
            return service.finish_by - max(0, least) * estimate.per_token_alone, math.inf
        first = estimate.to_first_at_least if request.slot < 0 else 0.0
        lost, doubtful = (
            min(service.first_token_by, service.finish_by - (count - 1) * estimate.per_token_alone) - first
            for count in (least, max(least, estimate.num_tokens or 0))
        )
        return lost, doubtful if request.slot < 0 and request.start_by < math.inf else math.inf
