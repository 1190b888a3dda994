"""The waiting queue. The policy divides its requests into lanes (for example, one lane per tenant) and sorts them. If a
request does not fit, a limited number of later requests are tried."""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Iterator

from chairlift.core.request import Request, RequestStatus
from chairlift.core.scheduler.policy import Policy

__all__ = ["WaitingQueue"]

_Key = tuple[float, ...]


def _first(entry: tuple[_Key, Request]) -> _Key:
    return entry[0]


class _Lane:
    """One lane: waiting requests that the policy compares only by their sort keys. Preempted requests come first."""

    __slots__ = ("by_size", "keys", "requests", "served_at")

    def __init__(self) -> None:
        self.keys: list[_Key] = []
        self.requests: list[Request] = []
        self.by_size: list[tuple[_Key, Request]] = []
        """Entries (sort key, request) for all requests of the lane. The order is: :meth:`Policy.standing`; requests
        that were not preempted before preempted ones; size."""
        self.served_at = 0.0
        """Time at which a request of this lane last joined the batch."""


class WaitingQueue:
    """Waiting requests in policy order.

    If the first request does not fit, up to ``look_ahead`` later requests are tried. After later requests have passed a
    request ``max_times_passed`` times, no more requests may pass it.
    """

    def __init__(self, policy: Policy, look_ahead: int = 8, max_times_passed: int = 16) -> None:
        self.policy = policy
        self.look_ahead = look_ahead
        self.max_times_passed = max_times_passed
        self.num_changes = 0
        """Number of times that a request entered or left the queue."""
        self._lanes: dict[Hashable, _Lane] = {}
        self._places: dict[str, tuple[Hashable, _Key, _Key]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request: Request) -> bool:
        return request.request_id in self._places

    def __iter__(self) -> Iterator[Request]:
        """Iterate over all waiting requests, one lane after another."""
        for lane in self._lanes.values():
            yield from lane.requests

    @property
    def oldest_arrival(self) -> float:
        return min((request.arrival_time for request in self), default=0.0)

    def first_but_for_age(self, now: float) -> Request:
        """Request that would be first in policy order if waiting time did not count."""
        heads = [lane.requests[0] for lane in self._lanes.values()]
        return min(heads, key=lambda head: self.policy.rank(head, 0.0, now)) if len(heads) > 1 else heads[0]

    def add(self, request: Request) -> None:
        self.num_changes += 1
        name = self.policy.lane(request)
        key = (float(request.status is RequestStatus.WAITING), *self.policy.order(request))
        lane = self._lanes.setdefault(name, _Lane())
        at = bisect.bisect_right(lane.keys, key)
        lane.keys.insert(at, key)
        lane.requests.insert(at, request)
        # Policy order puts a preempted request first. Order of size puts it last: it may need many blocks for few
        # tokens, and the requests after it would have to wait until it fits.
        preempted = float(request.status is not RequestStatus.WAITING)
        size_key = (*self.policy.standing(request), preempted, request.size, request.sequence)
        bisect.insort(lane.by_size, (size_key, request), key=_first)
        self._places[request.request_id] = (name, key, size_key)

    def remove(self, request: Request, served_at: float | None = None) -> None:
        """Remove a request from the queue. ``served_at`` is the time if the request joins the batch; None if it
        leaves."""
        self.num_changes += 1
        name, key, size_key = self._places.pop(request.request_id)
        lane = self._lanes[name]
        at = bisect.bisect_left(lane.keys, key)
        while lane.requests[at] is not request:
            at += 1
        del lane.keys[at]
        del lane.requests[at]
        at = bisect.bisect_left(lane.by_size, size_key, key=_first)
        while lane.by_size[at][1] is not request:
            at += 1
        del lane.by_size[at]
        if served_at is not None:
            lane.served_at = served_at
        if not lane.requests:
            del self._lanes[name]

    def line(self, now: float) -> Iterator[Request]:
        """Yield all waiting requests in policy order. A lane is a group of requests with one :meth:`Policy.lane` value;
        the policy compares the lanes again before each request.

        The caller may remove the request that was just yielded. After any other change of the queue, the caller must
        call this method again.
        """
        passed = dict.fromkeys(self._lanes, 0)
        while passed:
            name = next(iter(passed))
            if len(passed) > 1:
                name = min(passed, key=lambda name: self._rank(name, passed[name], now))
            lane = self._lanes[name]
            at = passed[name]
            request = lane.requests[at]
            yield request
            if at < len(lane.requests) and lane.requests[at] is request:
                passed[name] = at = at + 1
            if at >= len(lane.requests):
                del passed[name]

    def size_order(self, request: Request) -> _Key:
        """Sort key for giving a part of each step's tokens to the smallest requests: :meth:`Policy.standing`, then
        size, then arrival."""
        return (*self.policy.standing(request), request.size, request.sequence)

    def smallest(self, now: float) -> Iterator[Request]:
        """Yield the smallest request of each lane. Lanes whose requests have another :meth:`Policy.standing` than the
        first lane are skipped."""
        names = list(self._lanes)
        if len(names) > 1:
            names.sort(key=lambda name: self._rank(name, 0, now))
        standing = None
        for name in names:
            request = self._lanes[name].by_size[0][1]
            standing = standing or (self.policy.standing(request),)
            if (self.policy.standing(request),) == standing:
                yield request

    def catch_up(self, original: WaitingQueue) -> None:
        """Copy, for each lane, the time at which a request of the lane last joined the batch. This queue holds copies
        of the requests in ``original``."""
        for name, lane in self._lanes.items():
            if name in original._lanes:
                lane.served_at = original._lanes[name].served_at

    def may_pass(self, passed: list[Request]) -> bool:
        """Whether the requests after those in ``passed`` may be tried. The requests in ``passed`` were tried and did
        not fit."""
        return len(passed) <= self.look_ahead and passed[-1].times_passed < self.max_times_passed

    def _rank(self, name: Hashable, at: int, now: float) -> _Key:
        lane = self._lanes[name]
        head = lane.requests[at]
        return self.policy.rank(head, now - max(head.arrival_time, lane.served_at), now)
