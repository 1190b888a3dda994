"""Which requests must start by when to keep their deadlines, and which cannot keep them any more."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from chairlift.request import Request

__all__ = ["Deadlines", "Outlook", "OutlookOf"]

_URGENT_SHARE = 0.5
"""A request takes a row from running work for its deadline's sake once this share of its slack is gone."""


class Outlook(NamedTuple):
    """What is to be expected of a request. Times in seconds."""

    to_first: float = 0.0
    """From its first step to its first token."""
    to_first_at_least: float = 0.0
    """As far as anything has been seen of steps like that: it takes no less."""
    num_tokens: int | None = None
    """Of its answer; None while nobody knows."""
    per_token: float = 0.0
    """At the present load."""
    per_token_alone: float = 0.0
    """Were it the only one."""


OutlookOf = Callable[[Request], Outlook]


class Deadlines:
    """Sets ``start_by`` of the requests that have deadlines: when they must start at the latest, by ``outlook``.

    Going by it alone (least slack first) is known to fail under overload, where the most hopeless would go first and
    nobody make it. So one that would be late even alone, if its answer is as long as expected, is in doubt, and loses
    its place. One that will be late whatever happens is lost: no guess at the length of its answer is part of this, nor
    at times that were never seen.
    """

    def __init__(self, outlook: OutlookOf | None = None) -> None:
        self.outlook = outlook or (lambda request: Outlook())
        self._due: list[tuple[float, int, Request]] = []
        self._moved: list[Request] = []

    def add(self, request: Request) -> None:
        """It has come."""
        service = request.service
        if not service.has_deadline:  # an outlook is not free: it looks the whole prompt up in the prefix cache
            return
        outlook, most = self.outlook(request), request.max_total_tokens - request.num_prompt_tokens
        rest = ((outlook.num_tokens or most) - 1) * outlook.per_token
        request.start_by = min(service.first_token_by, service.finish_by - rest) - outlook.to_first
        heapq.heappush(self._due, (min(self._turns(request, outlook)), request.sequence, request))

    def lost(self, now: float) -> Iterator[Request]:
        """Those that cannot keep a deadline any more, each once. What was promised is taken from them."""
        while self._due and self._due[0][0] < now:
            _, _, request = heapq.heappop(self._due)
            service = request.service
            if request.is_finished or not service.has_deadline:
                continue
            lost, doubtful = self._turns(request, self.outlook(request))
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
        """Those that :meth:`lost` found in doubt since this was last asked."""
        moved, self._moved = self._moved, []
        return moved

    def is_urgent(self, request: Request, now: float) -> bool:
        """Whether it may take what it needs from running work."""
        return now >= request.start_by - _URGENT_SHARE * (request.start_by - request.arrival_time)

    @staticmethod
    def _turns(request: Request, outlook: Outlook) -> tuple[float, float]:
        """When it is lost; and when it is in doubt, infinite once it runs or that is known."""
        service = request.service
        least = max(1, request.min_tokens) - request.num_output_tokens
        if request.num_output_tokens:
            return service.finish_by - max(0, least) * outlook.per_token_alone, math.inf
        first = outlook.to_first_at_least if request.slot < 0 else 0.0
        lost, doubtful = (
            min(service.first_token_by, service.finish_by - (count - 1) * outlook.per_token_alone) - first
            for count in (least, max(least, outlook.num_tokens or 0))
        )
        return lost, doubtful if request.slot < 0 and request.start_by < math.inf else math.inf
