"""The waiting line: policy order, a bounded look past those that do not fit, and ageing so that none starves."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from chairlift.request import Request
from chairlift.scheduler.policy import Policy

__all__ = ["WaitingQueue"]


class WaitingQueue:
    """Waiting requests in policy order.

    When the first in line does not fit, up to ``look_ahead`` requests may be looked past; once a request has been
    passed ``max_times_passed`` times, nobody passes it any more.
    """

    def __init__(self, policy: Policy, look_ahead: int = 8, max_times_passed: int = 16) -> None:
        self._order = policy.order
        self.look_ahead = look_ahead
        self.max_times_passed = max_times_passed
        self._keys: list[tuple[int, ...]] = []
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def oldest_arrival(self) -> float:
        return min((request.arrival_time for request in self._requests), default=0.0)

    def add(self, request: Request) -> None:
        key = self._order(request)
        at = bisect.bisect_right(self._keys, key)
        self._keys.insert(at, key)
        self._requests.insert(at, request)

    def remove(self, request: Request) -> None:
        at = bisect.bisect_left(self._keys, self._order(request))
        while self._requests[at] is not request:
            at += 1
        del self._keys[at]
        del self._requests[at]

    def first(self, count: int) -> list[Request]:
        """The next ``count`` in line, and those who may be tried when some of them do not fit."""
        return self._requests[: count + self.look_ahead]

    def may_pass(self, passed: list[Request]) -> bool:
        """Whether somebody behind the last of ``passed``, who did not fit, may be tried."""
        return len(passed) <= self.look_ahead and passed[-1].times_passed < self.max_times_passed
