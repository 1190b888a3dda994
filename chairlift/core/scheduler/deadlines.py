"""Computes when requests must start to meet their deadlines, and finds requests that cannot meet them any more."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from chairlift.core.request import Request

__all__ = ["Deadlines", "Estimate", "EstimateOf"]

_URGENT_SHARE = 0.5
"""A request may preempt others for its deadline after this fraction of its slack has passed. The slack is the time from
its arrival to the latest start that meets the deadline."""


class Estimate(NamedTuple):
    """Expected times and answer length of a request. Times are in seconds."""

    to_first: float = 0.0
    """Expected time from the request's first step to its first token."""
    to_first_at_least: float = 0.0
    """Lower bound of ``to_first``, from the shortest steps seen."""
    num_tokens: int | None = None
    """Expected number of tokens of the answer; None if unknown."""
    per_token: float = 0.0
    """Expected time per token at the present load."""
    per_token_alone: float = 0.0
    """Expected time per token without other requests in the batch."""


EstimateOf = Callable[[Request], Estimate]
"""Function that makes the estimate for one request."""


class Deadlines:
    """Sets ``start_by`` of requests with deadlines: the latest time at which a request must start.

    The policy serves the request with the least slack first. Under overload this order alone would fail: requests that
    are late anyway would come first, and make all others late too. So two groups leave the order. A request is
    *doubtful* if it would be late even without other requests, with an answer of expected length. A request is *lost*
    if it will be late in any case; this test uses neither an estimate of the answer's length nor a step time that was
    never measured.
    """

    def __init__(self, estimate: EstimateOf | None = None) -> None:
        self.estimate_of = estimate or (lambda request: Estimate())
        self._due: list[tuple[float, int, Request]] = []
        self._moved: list[Request] = []

    def add(self, request: Request) -> None:
        """Watch a request that has arrived, if it has a deadline."""
        service = request.service
        if not service.has_deadline:  # no estimate: it would search the prefix cache for the whole prompt
            return
        estimate = self.estimate_of(request)
        num_tokens = estimate.num_tokens or request.max_total_tokens - request.num_prompt_tokens
        decode_seconds = (num_tokens - 1) * estimate.per_token
        request.start_by = min(service.first_token_by, service.finish_by - decode_seconds) - estimate.to_first
        heapq.heappush(self._due, (min(self._lost_and_doubtful_at(request, estimate)), request.sequence, request))

    def lost(self, now: float) -> Iterator[Request]:
        """Yield, once, each request that cannot meet its deadline any more, and remove its deadline."""
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
        """Requests that :meth:`lost` has marked as doubtful since the last call of this method."""
        moved = self._moved
        self._moved = []
        return moved

    def is_urgent(self, request: Request, now: float) -> bool:
        """Whether a request may take rows and blocks from running requests because of its deadline."""
        return now >= request.start_by - _URGENT_SHARE * (request.start_by - request.arrival_time)

    @staticmethod
    def _lost_and_doubtful_at(request: Request, estimate: Estimate) -> tuple[float, float]:
        """(time from which the request is lost, time from which the request is doubtful). The second time is infinite
        if the request runs, or if it is doubtful already."""
        service = request.service
        min_remaining = max(1, request.min_tokens) - request.num_output_tokens
        if request.num_output_tokens:
            return service.finish_by - max(0, min_remaining) * estimate.per_token_alone, math.inf
        first = estimate.to_first_at_least if request.slot < 0 else 0.0
        lost, doubtful = (
            min(service.first_token_by, service.finish_by - (count - 1) * estimate.per_token_alone) - first
            for count in (min_remaining, max(min_remaining, estimate.num_tokens or 0))
        )
        return lost, doubtful if request.slot < 0 and request.start_by < math.inf else math.inf
