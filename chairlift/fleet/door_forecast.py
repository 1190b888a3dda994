"""Forecasts when requests that wait for a replica will start, from the rate at which the fleet has started requests."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Final

from chairlift.core.scheduler.forecast import Forecast
from chairlift.fleet.door import Door

__all__ = ["DoorForecast"]

_WINDOW: Final = 10.0
"""Time in seconds over which the rate of started requests is measured."""
_MIN_STARTS: Final = 4
_PAUSE: Final = 0.5
"""Minimum time in seconds between two forecasts."""


class DoorForecast:
    """Forecasts start times. It assumes that requests start in the order of the policy, at the rate of the last seconds
    in which requests waited.

    ``priorities`` maps a service class to the priority of a new request. Times are in seconds on the caller's clock.
    """

    def __init__(self, priorities: Mapping[str, int]) -> None:
        self._priorities = dict(priorities)
        self._starts: deque[float] = deque()
        self._line_since: float | None = None
        """Time since which requests have been waiting without interruption. Earlier starts are not counted, because the
        rate was then limited by the arrivals, not by the fleet."""
        self._not_before = 0.0
        self._loading: dict[str, float] = {}
        """Value of ``loading`` in the newest forecast."""
        self.last: Forecast | None = None
        """The newest forecast. None before the first one."""

    def started(self, now: float) -> None:
        """Record the first token of a request."""
        self._starts.append(now)

    def make(self, door: Door, now: float, loading: Mapping[str, float] | None = None) -> Forecast | None:
        """A new forecast, or None if the last forecast is recent or the rate of starts is unknown.

        ``loading`` has the requests in replicas that wait until their KV is read from files, and when it should be
        there. When the door's queue becomes empty and no request loads, one last forecast is returned, in which no
        request waits.
        """
        loads = dict(loading or {})
        made = self._made(door, now, loads != self._loading)
        if made is not None:
            self._loading = loads
            self.last = made = made.with_loads(loads)
        return made

    def _made(self, door: Door, now: float, is_news: bool) -> Forecast | None:
        """A new forecast without the requests that load. ``is_news``: one is needed because of them."""
        if not len(door):
            had = self._line_since is not None
            self._line_since = None
            return Forecast(now, {}, dict.fromkeys(self._priorities, now), 0.0) if had or is_news else None
        if self._line_since is None:
            self._line_since = now
        pace = self._seconds_per_start(now, self._line_since)
        if pace is None or now < self._not_before:
            return None
        self._not_before = now + _PAUSE
        line = list(door.line(now))
        ahead = [name for replica in door.replicas for name in replica.unstarted]
        names = [*ahead, *(request.request_id for request in line)]
        starts = {name: now + position * pace for position, name in enumerate(names, start=1)}
        tenants = Counter(request.service.tenant for request in line)
        newcomers = {}
        strangers = {}
        for name, priority in self._priorities.items():
            before = [request for request in line if request.priority <= priority]
            newcomers[name] = now + (len(ahead) + len(before) + 1) * pace
            others = len({request.service.tenant for request in before})  # each other tenant gets one turn first
            strangers[name] = now + (len(ahead) + min(len(before), others) + 1) * pace
        busiest = max(tenants, key=lambda tenant: (tenants[tenant], tenant))
        return Forecast(now, starts, newcomers, pace, strangers, busiest)

    def _seconds_per_start(self, now: float, since: float) -> float | None:
        while self._starts and self._starts[0] < now - _WINDOW:
            self._starts.popleft()
        begin = max(since, now - _WINDOW)
        count = sum(when >= begin for when in self._starts)
        return (now - begin) / count if count >= _MIN_STARTS and now > begin else None
