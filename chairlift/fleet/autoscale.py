"""Decides how many replicas a fleet should have, from forecast waits, missed latency targets, and load.

The simulated fleet (:mod:`chairlift_lab.replay.fleet`) and the server's fleet (:mod:`chairlift.fleet.fleet_scaling`)
use the same decisions. The callers start, drain and stop replicas.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Final

from chairlift.errors import ConfigError
from chairlift.fleet.door import Door
from chairlift.fleet.door_forecast import DoorForecast
from chairlift.fleet.routing import Replica

__all__ = ["SCALE_SECONDS", "Autoscaler", "Demand", "ScalingDecision", "demand_of", "replica_to_remove"]

SCALE_SECONDS: Final = 1.0
"""Time in seconds between two decisions about the number of replicas."""
_WINDOW: Final = 10.0
"""Time window in seconds: the fraction of requests that met their latency targets is computed over the requests that
ended within this window."""
_MIN_ENDED: Final = 10
"""Minimum number of ended requests from which the fraction of requests that met their latency targets is computed."""
_LONG_WAIT: Final = 10.0
"""A forecast wait of this multiple of the maximum wait starts a second replica while the first one is starting."""
_BURST: Final = 0.1
"""Demand that lasts for a shorter fraction of the start time of a replica starts no replica: the demand would have
ended long before the replica serves. Whole decisions are counted, so start times below 10 s have no such delay."""
_MAX_PATIENCE: Final = 8
_FIRST_PAUSE: Final = 10.0
_LONGEST_PAUSE: Final = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """Demand for replicas of a fleet at one moment: load, forecast wait, and present number of replicas. The autoscaler
    decides from it."""

    num_replicas: int
    """Number of replicas that serve or are starting. Replicas that are being removed are not counted."""
    starting: int
    """Number of replicas that are starting and do not serve yet."""
    forecast_wait: float
    """Forecast time in seconds until a new request would start."""
    load: float
    """Number of unfinished requests divided by the number of rows of the serving replicas. Above 1, requests wait."""
    start_seconds: float = 0.0
    """Time in seconds that a replica needs from its start until it serves. 0 if it is unknown."""
    steady: bool = True
    """Whether a replica may be removed. False while the replicas are restarted or updated one after another."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScalingDecision:
    """Number of replicas that the fleet should have, and the reason."""

    wanted: int
    reason: str
    """Text with the values that led to a change. Empty if the number of replicas does not change."""


class Autoscaler:
    """Decides when to add and when to remove a replica.

    - There are always at least ``least`` and at most ``most`` replicas.
    - A replica is added when the forecast wait exceeds ``most_wait`` seconds, or when the fraction of requests that
      meet their latency targets is below ``goodput``. With replicas that start slowly, this must last for a tenth of
      their start time.
    - Only one replica starts at a time, because its effect shows only when it serves. If the wait exceeds ten times
      ``most_wait``, a second one starts. Requests that ended before a new replica served are not judged again.
    - A replica is removed when, for ``calm`` seconds without interruption, the other replicas would have used at most
      60 % of their rows. The time is at least twice the start time of a replica. If a replica is needed again within
      this time after a removal, the next calm time is twice as long, up to eight times ``calm``.
    - When a replica cannot start, no other one is added for 10 s, and twice as long after each further failure, up to
      10 minutes.

    Times are in seconds on the caller's clock. Raises ConfigError unless 1 <= ``least`` <= ``most``.
    """

    def __init__(
        self, least: int, most: int, *, most_wait: float = 0.5, goodput: float = 0.99, calm: float = 30.0
    ) -> None:
        if not 1 <= least <= most:
            raise ConfigError(
                f"autoscaling needs at least 1 replica and a maximum of at least the minimum, got {least}-{most}"
            )
        self.least = least
        self.most = most
        self._most_wait = most_wait
        self._goodput = goodput
        self._calm = calm
        self._ended: deque[tuple[float, bool]] = deque()
        self._calm_since: float | None = None
        self._short_since: float | None = None
        """Time since which the replicas have not been enough, without interruption."""
        self._starting = 0
        self._removed_at: float | None = None
        self._patience = 1
        """Multiple of the calm time before the next removal."""
        self._not_before = 0.0
        self._pause = _FIRST_PAUSE

    def ended(self, now: float, kept: bool | None) -> None:
        """Record the end of a request, and whether it met its latency targets. None: it had no targets."""
        if kept is not None:
            self._ended.append((now, kept))

    def failed(self, now: float) -> float:
        """Record that a replica could not start. Returns the time until which no other replica is added."""
        self._not_before = now + self._pause
        self._pause = min(_LONGEST_PAUSE, 2 * self._pause)
        return self._not_before

    def decide(self, now: float, demand: Demand) -> ScalingDecision:
        """Decide how many replicas the fleet should have now. To be called once per :data:`SCALE_SECONDS`."""
        if demand.starting < self._starting:  # a new replica serves: earlier misses say nothing about the larger fleet
            self._ended.clear()
            self._pause = _FIRST_PAUSE
        self._starting = demand.starting
        while self._ended and self._ended[0][0] < now - _WINDOW:
            self._ended.popleft()
        count = demand.num_replicas
        if count < self.least:
            return ScalingDecision(self.least, f"at least {self.least} replicas are required, and there are {count}")
        kept = sum(each for _, each in self._ended)
        broken = len(self._ended) >= _MIN_ENDED and kept < self._goodput * len(self._ended)
        waits = demand.forecast_wait > self._most_wait
        if waits or broken:
            self._calm_since = None
            return self._short(now, demand, f"{kept} of {len(self._ended)}" if broken else "")
        self._short_since = None
        return self._spare(now, demand)

    def _short(self, now: float, demand: Demand, kept: str) -> ScalingDecision:
        """Decide while requests wait too long or miss their targets."""
        if self._short_since is None:
            self._short_since = now
        lasts = now - self._short_since >= _BURST * demand.start_seconds // SCALE_SECONDS * SCALE_SECONDS
        at_once = 2 if demand.forecast_wait > _LONG_WAIT * self._most_wait else 1
        count = demand.num_replicas
        if not lasts or demand.starting >= at_once or count >= self.most or now < self._not_before:
            return ScalingDecision(min(self.most, count), "")
        if self._removed_at is not None and now - self._removed_at < self._calm_time(demand):
            self._patience = min(_MAX_PATIENCE, 2 * self._patience)
        self._removed_at = None
        reason = f"forecast wait {demand.forecast_wait:.2f} s, the maximum is {self._most_wait:g} s"
        if kept:
            reason = f"{kept} requests met their latency targets, {self._goodput:.0%} is required; {reason}"
        return ScalingDecision(count + 1, f"{reason}; load {demand.load:.2f}; {demand.starting} starting")

    def _spare(self, now: float, demand: Demand) -> ScalingDecision:
        """Decide while the replicas are enough."""
        count = demand.num_replicas
        calm = self._calm_time(demand)
        if count > self.most:
            return ScalingDecision(self.most, f"at most {self.most} replicas are allowed, and there are {count}")
        busy = demand.load * count > 0.6 * (count - 1)
        if busy or demand.starting or not demand.steady or count <= self.least:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        elif now - self._calm_since >= calm:
            if self._removed_at is not None and now - self._removed_at >= 2 * calm:
                self._patience = 1
            self._calm_since = now
            self._removed_at = now
            reason = f"load {demand.load:.2f}, so {count - 1} would use at most 60 % of their rows, for {calm:.0f} s"
            return ScalingDecision(count - 1, f"{reason}; forecast wait {demand.forecast_wait:.2f} s")
        return ScalingDecision(count, "")

    def _calm_time(self, demand: Demand) -> float:
        return max(self._calm * self._patience, 2 * demand.start_seconds)


def demand_of(
    door: Door,
    forecast: DoorForecast,
    now: float,
    *,
    serving: Sequence[Replica],
    starting: int,
    rows: int,
    start_seconds: float,
    steady: bool = True,
) -> Demand:
    """Demand for replicas at the time ``now``.

    ``serving`` are the replicas that accept requests, ``rows`` is the number of rows of each, and ``starting`` the
    number of replicas that start. The forecast wait is that of a new request behind all waiting requests.
    """
    wait = 0.0
    if len(door):
        made = forecast.last
        starts = max(made.newcomers.values(), default=now) if made is not None else now
        wait = max(0.0, starts - now)
        first = next(door.line(now), None)
        if not wait and first is not None:  # the rate is unknown or the forecast was wrong: use the wait so far
            wait = max(0.0, now - first.arrival_time)
    inside = sum(each.num_requests for each in serving) + len(door)
    load = inside / (rows * len(serving)) if serving else 1.0
    return Demand(len(serving) + starting, starting, wait, load, start_seconds, steady)


def replica_to_remove(serving: Sequence[Replica]) -> Replica:
    """The replica that is drained when the fleet becomes smaller: the one with the fewest requests."""
    return min(serving, key=lambda each: (each.num_requests, -each.index))
