"""Limits the queue in front of the engine: how many requests may wait and for how long, and when a refused client
should retry."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Final

from chairlift.base.service_class import DEFAULT_CLASS, ServiceClass
from chairlift.core.scheduler.forecast import Forecast
from chairlift.engine.calibration import SHORTEST_WAIT, Calibration
from chairlift.errors import QueueFullError
from chairlift.metrics.stats import RequestStats

__all__ = ["Intake", "Place", "counting_refusals"]

_WINDOW: Final = 30.0
"""Seconds over which arrival and start rates are measured."""
_MIN_RETRY: Final = 1.0
_MAX_RETRY: Final = 60.0
_OUTDATED: Final = 5.0
"""A forecast is outdated if the engine sent no message for this many seconds, unless the engine's steps take longer."""
_LAST_SHARE: Final = 0.5
"""Fraction of the queue that requests of the least urgent class may fill."""
_MAX_FUTURE_SHARE: Final = 0.8
"""Maximum fraction of future starts that is assumed to go to more urgent requests, which have not arrived yet. So a
forecast wait grows at most five times."""
_WRONG_REFUSALS: Final = 0.1
"""Target for the fraction of wrong refusals: requests that are refused because of the forecast, although they would
have started in time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Position of one request in the queue, with its times in seconds."""

    request_id: str
    position: int
    """Position in the queue; 1 starts next."""
    waited: float
    expected_start: float | None
    """Seconds from now until the request's expected start; None if there is no forecast."""
    loading: float | None = None
    """Expected seconds from now until the request's KV is read from files; None if it does not wait for that."""


_Lane = tuple[str, str]
"""(class of service, tenant) of a request. Requests with the same pair form a lane."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    num_tokens: int
    service_class: str
    level: int
    lane: _Lane | None
    since: float
    predicted: float | None
    predicted_at: float


class _Crowd:
    """Counts of requests by priority level and by lane (class of service and tenant)."""

    def __init__(self) -> None:
        self.levels: Counter[int] = Counter()
        self.lanes: Counter[_Lane | None] = Counter()

    def add(self, each: _Waiting, count: int = 1) -> None:
        self.levels[each.level] += count
        self.lanes[each.lane] += count
        if not self.lanes[each.lane]:  # callers may name new tenants without limit, so empty lanes are removed
            del self.lanes[each.lane]

    def before(self, level: int) -> int:
        """Number of requests at this priority level and at more urgent levels."""
        return sum(count for each, count in self.levels.items() if each <= level)


class Intake:
    """The queue of requests that have not been in a step. Its size is limited, which also limits the waiting times.

    A request that finds the queue full is refused at once, with a time to retry; this is better than a long wait for
    all requests (load shedding). The time to retry comes from the forecast; without a forecast, from the rate at which
    requests start. Times are seconds on the engine's clock; without forecasts any clock may be used.

    Classes of service have different limits, so that less urgent classes leave room for urgent classes. The class with
    the lowest priority number may fill the whole queue. The class with the highest number is refused when half of the
    queue is full. The limits of the other classes lie evenly between. Without ``classes``, every request may fill the
    whole queue.
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        classes: Mapping[str, ServiceClass] | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.calibration = Calibration() if calibration is None else calibration
        self.forecast: Forecast | None = None
        """The newest forecast that the engine sent; None before the first."""
        self.heard_at = math.inf
        """Time of the engine's last message. When the engine stops, the forecast is no longer valid."""
        self._longest_step = 0.0
        self.max_requests = max(1, max_requests)
        self.max_tokens = max_tokens
        self.num_tokens = 0
        levels = sorted({each.priority for each in (classes or {}).values()})
        self._levels = {name: levels.index(each.priority) for name, each in (classes or {}).items()}
        self._last_level = max(1, len(levels) - 1)
        self._reserving = {name for name, each in (classes or {}).items() if each.min_seqs}
        self._calibrations = {level: Calibration() for level in {0, *self._levels.values()}}
        """Priority level -> accuracy of its forecasts. The levels are separate, because accuracy for urgent requests
        says nothing about less urgent ones."""
        self._waiting: dict[str, _Waiting] = {}
        self._crowd = _Crowd()
        self._loading: dict[str, float] = {}
        """Id of each request that waits for its KV from files -> time at which it should be there."""
        self._starts: dict[str, float] = {}
        """Id of a waiting request -> time at which it starts according to the forecast."""
        self._unforeseen = _Crowd()
        """Counts of waiting requests that came after the forecast was made."""
        self._lane_ends: dict[_Lane, tuple[float, float]] = {}
        """Lane (class of service, tenant) -> (forecast start of the lane's last request, seconds between two starts of
        the lane)."""
        self._started: deque[float] = deque()
        self._line_since = 0.0
        """Time at which the queue last became non-empty. The rate of starts is measured from then on, because earlier
        starts show only how many requests arrived, not how fast the engine is."""
        self._came: deque[tuple[float, int]] = deque()
        """(time, priority level) of each arrival in the last 30 seconds."""

    def __len__(self) -> int:
        return len(self._waiting)

    def oldest_wait(self, now: float) -> float:
        """Seconds that the oldest request has waited; 0 if the queue is empty."""
        first = next(iter(self._waiting.values()), None)
        return 0.0 if first is None else now - first.since

    def share(self, service_class: str = DEFAULT_CLASS) -> float:
        """Fraction of the queue, 0.5 to 1, at which requests of this class are refused."""
        return 1 - (1 - _LAST_SHARE) * self._levels.get(service_class, 0) / self._last_level

    def check(
        self,
        now: float,
        num_requests: int = 1,
        num_tokens: int = 0,
        service_class: str = DEFAULT_CLASS,
        tenant: str = "",
    ) -> None:
        """Raise QueueFullError if the queue has no room for this many more requests and tokens. An empty queue accepts
        any call."""
        share = self.share(service_class)
        who = "may" if share == 1 else f"may before one of class {service_class} is taken"
        most_requests = max(1, int(self.max_requests * share))
        most_tokens = int(self.max_tokens * share)
        if self._waiting and len(self._waiting) + num_requests > most_requests:
            more = f"; this call has {num_requests}" if num_requests > 1 else ""
            raise QueueFullError(
                f"{len(self._waiting)} requests wait already, and {most_requests} {who}{more}; try again later",
                self.retry_after(now, service_class, tenant),
                "requests",
            )
        if self._waiting and self.num_tokens + num_tokens > most_tokens:
            raise QueueFullError(
                f"requests with {self.num_tokens} prompt tokens wait already, and {most_tokens} tokens {who}; this"
                f" one has {num_tokens}; try again later",
                self.retry_after(now, service_class, tenant),
                "tokens",
            )

    def check_wait(
        self,
        predicted: float | None,
        allowed: Mapping[str, float | None],
        service_class: str = DEFAULT_CLASS,
        spent: float = 0.0,
    ) -> None:
        """Raise QueueFullError if the forecast says that a request would time out in the queue.

        ``allowed`` maps setting -> seconds that the request may wait; ``spent`` seconds have passed already. First the
        forecast is multiplied by a ratio of actual to predicted wait: the ratio that 9 of 10 earlier requests of the
        same priority level exceeded. With too few samples no request is refused.
        """
        shortest = self._calibrations[self._levels.get(service_class, 0)].quantile(_WRONG_REFUSALS)
        if predicted is None or shortest is None or predicted < SHORTEST_WAIT:
            return
        for setting, seconds in allowed.items():
            if seconds is not None and spent + predicted * min(1.0, shortest) > seconds:
                before = f", {spent + predicted:.3g} s after it came" if spent >= SHORTEST_WAIT else ""
                raise QueueFullError(
                    f"the request would start in about {predicted:.3g} s{before}, but its {setting} allows"
                    f" {seconds:.3g} s; try again later, or allow more",
                    spent + predicted - seconds,
                    "forecast",
                )

    def enter(
        self,
        request_id: str,
        num_tokens: int,
        service_class: str = DEFAULT_CLASS,
        now: float = 0.0,
        predicted: float | None = None,
        tenant: str | None = "",
    ) -> None:
        """Add a request. ``predicted`` is its expected wait from ``now`` on, if the forecast shall be judged later.
        ``tenant`` is None for a request whose priority differs from its class's; such a request belongs to no lane."""
        lane = None if tenant is None else (service_class, tenant)
        self._line_since = self._line_since if self._waiting else now
        waiting = _Waiting(num_tokens, service_class, self._levels.get(service_class, 0), lane, now, predicted, now)
        self._came.append((now, waiting.level))
        self._waiting[request_id] = waiting
        self._crowd.add(waiting)
        self._unforeseen.add(waiting)
        self.num_tokens += num_tokens

    def leave(self, request_id: str, now: float, *, started: bool) -> None:
        """Remove a request: with ``started`` its first step began at ``now``, otherwise it left before. Unknown ids are
        ignored."""
        found = self._waiting.pop(request_id, None)
        if found is None:
            return
        self.num_tokens -= found.num_tokens
        self._crowd.add(found, -1)
        if request_id not in self._starts:
            self._unforeseen.add(found, -1)
        if started:
            self._started.append(now)
            self._forget(now)
            if found.predicted is not None:
                for each in (self.calibration, self._calibrations[found.level]):
                    each.add(found.predicted, now - found.predicted_at)

    def clear(self) -> None:
        """Remove all requests and forecasts, because the engine has died."""
        self._waiting.clear()
        self._crowd, self._unforeseen = _Crowd(), _Crowd()
        self._starts.clear()
        self._loading.clear()
        self._lane_ends.clear()
        self._came.clear()
        self.forecast = None
        for each in (self.calibration, *self._calibrations.values()):
            each.clear()
        self.num_tokens = 0

    # -- the forecast ----------------------------------------------------------------------------------------------

    def foreseen(self, forecast: Forecast) -> None:
        """Store the engine's newest forecast. The predicted waits are increased to allow for more urgent requests that
        may arrive later and start first.

        If a request arrived before there was a forecast, its predicted wait is that of the first later forecast.
        """
        made_at = forecast.made_at
        longer = self._stretches(forecast)
        newcomers, strangers = (
            {name: made_at + (start - made_at) * longer.get(name, 1.0) for name, start in starts.items()}
            for starts in (forecast.newcomers, forecast.strangers)
        )
        self.forecast = dataclasses.replace(forecast, newcomers=newcomers, strangers=strangers)
        self._starts, self._unforeseen = {}, _Crowd()
        self._loading = {name.partition("#")[0]: when for name, when in forecast.loading.items()}
        for sequence_id, start in forecast.starts.items():  # a request starts when its first answer starts
            name = sequence_id.partition("#")[0]
            each = self._waiting.get(name)
            if each is None or name in self._starts:
                continue
            self._starts[name] = made_at + (start - made_at) * longer.get(each.service_class, 1.0)
            if each.predicted is None and each.lane is not None:
                wait = max(0.0, self._starts[name] - made_at)
                self._waiting[name] = dataclasses.replace(each, predicted=wait, predicted_at=made_at)
        lanes: dict[_Lane, list[float]] = {}
        for name, each in self._waiting.items():
            if name not in self._starts:
                self._unforeseen.add(each)
            elif each.lane is not None and self._levels:  # without classes the engine has no lanes
                lanes.setdefault(each.lane, []).append(self._starts[name])
        # The forecast has the start of a new request only for the tenant with the most requests, and for a tenant
        # without requests. For other tenants, expected_wait() computes it from the last start in the lane and the time
        # between starts.
        self._lane_ends = {
            lane: (max(all_), max(0.0, max(all_) - made_at) / len(all_))
            for lane, all_ in lanes.items()
            if lane[1] != forecast.tenant
        }

    def _stretches(self, forecast: Forecast) -> dict[str, float]:
        """Class of service -> factor by which the class's waits grow, because more urgent requests will arrive
        meanwhile.

        More urgent requests are assumed to take the same fraction of the starts as in the last 30 seconds (Cobham,
        1954). Requests that wait now are not counted, because the forecast already includes them; so a single burst is
        not taken for a steady rate. Classes with reserved rows do not wait for other classes: their factor is 1.
        """
        self._forget(forecast.made_at)
        came = Counter(level for _, level in self._came)
        came.subtract(self._crowd.levels)
        pace = forecast.seconds_per_start / _WINDOW
        longer = {}
        for name, level in (self._levels or {DEFAULT_CLASS: 0}).items():
            share = pace * sum(max(0, count) for other, count in came.items() if other < level)
            longer[name] = 1.0 if name in self._reserving else 1 / (1 - min(share, _MAX_FUTURE_SHARE))
        return longer

    def expected_wait(
        self, service_class: str, now: float, free_rows: int = 0, tenant: str | None = ""
    ) -> float | None:
        """Forecast of the seconds that a new request of this class and tenant would wait; None if there is no forecast.

        ``free_rows`` is the number of additional requests that may run. ``tenant`` None means a tenant without waiting
        requests.
        """
        lane = None if tenant is None else (service_class, tenant)
        return self._wait(service_class, lane, now, self._unforeseen, free_rows)

    def heard(self, now: float, busy: bool) -> None:
        """Note the time of the engine's message about a step. ``busy`` says that the engine had work since the previous
        message."""
        self._longest_step = max(now - self.heard_at if busy else 0.0, 0.9 * self._longest_step)
        self.heard_at = now

    def is_outdated(self, now: float) -> bool:
        """Whether the engine has sent no message for so long that its forecast is no longer valid."""
        return now - self.heard_at > max(_OUTDATED, 3 * self._longest_step)

    def _wait(self, service_class: str, lane: _Lane | None, now: float, since: _Crowd, free_rows: int) -> float | None:
        """Seconds that a request waits. ``since`` counts the requests that are before it in the queue and that arrived
        after the forecast was made."""
        forecast = self.forecast
        if forecast is None or self.is_outdated(now):
            return None
        if lane in self._lane_ends:  # requests of one lane start in order, however lanes share the rows
            last, gap = self._lane_ends[lane]
            return max(0.0, last + gap * (1 + since.lanes[lane]) - now)
        ahead = since.before(self._levels.get(service_class, 0))
        if ahead >= max(1, free_rows) and not forecast.seconds_per_start:
            return None  # the queue was empty when the forecast was made
        stranger = bool(self._levels) and (lane is None or lane[1] != forecast.tenant)
        return forecast.wait_of(service_class, now, ahead, stranger=stranger)

    def line(self, now: float, free_rows: int = 0) -> list[Place]:
        """All waiting requests in the order of their expected start. Without a forecast: in order of arrival."""
        found: list[tuple[float, str, _Waiting]] = []
        since = _Crowd()
        for name, each in self._waiting.items():
            if name in self._starts:
                wait = None if self.is_outdated(now) else max(0.0, self._starts[name] - now)
            else:
                wait = self._wait(each.service_class, each.lane, now, since, free_rows)
                since.add(each)
            found.append((math.inf if wait is None else wait, name, each))
        found.sort(key=lambda item: item[0])
        return [
            Place(
                name,
                position,
                max(0.0, now - each.since),
                None if seconds == math.inf else seconds,
                None if name not in self._loading else max(0.0, self._loading[name] - now),
            )
            for position, (seconds, name, each) in enumerate(found, start=1)
        ]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def retry_after(self, now: float, service_class: str | None = None, tenant: str = "") -> float:
        """Whole seconds, from 1 to 60, after which a refused client should retry: the time until the requests that wait
        now have started.

        With a class and tenant, only the requests before them count. The time comes from the forecast. Without a
        forecast it comes from the rate of starts: in the last 30 seconds, or since the queue became non-empty,
        whichever is faster.
        """
        wait = self._last_start(now) if service_class is None else self.expected_wait(service_class, now, 0, tenant)
        if wait is not None:
            return _whole(wait)
        self._forget(now)
        ahead = len(self._waiting)
        if service_class in self._levels:
            ahead = self._crowd.before(self._levels[service_class])
        if not ahead:
            return _MIN_RETRY
        if not self._started:
            return _WINDOW
        in_line = [start for start in self._started if start >= self._line_since] or self._started
        return _whole(ahead * min(max(1.0, now - starts[0]) / len(starts) for starts in (self._started, in_line)))

    def _last_start(self, now: float) -> float | None:
        if self.forecast is None or not self.forecast.newcomers:
            return None
        waits = [self.expected_wait(name, now, 0, tenant) for name, tenant in self._lane_ends]
        waits += [self.expected_wait(name, now, 0, None) for name in self.forecast.newcomers]
        return max((wait for wait in waits if wait is not None), default=None)

    def _forget(self, now: float) -> None:
        while self._started and self._started[0] < now - _WINDOW:
            self._started.popleft()
        while self._came and self._came[0][0] < now - _WINDOW:
            self._came.popleft()


@contextlib.contextmanager
def counting_refusals(stats: RequestStats) -> Iterator[None]:
    """Count the QueueFullError of a refused request in the statistics."""
    try:
        yield
    except QueueFullError as full:
        stats.rejected["forecast" if full.kind == "forecast" else f"queue_{full.kind}"] += 1
        raise


def _whole(seconds: float) -> float:
    return min(_MAX_RETRY, max(_MIN_RETRY, float(math.ceil(seconds))))
