"""Decides how many replicas a fleet should have, from forecast waits, missed latency targets, and load."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Final

from chairlift.errors import ConfigError

__all__ = ["Autoscaler", "Demand"]

_WINDOW: Final = 10.0
"""Time window in seconds: the fraction of requests that met their latency targets is computed over the requests that
ended within this window."""
_MIN_ENDED: Final = 10
"""Minimum number of ended requests from which the fraction of requests that met their latency targets is computed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """Demand for replicas of a fleet at one moment: load, forecast wait, and present number of replicas. The autoscaler
    decides from it."""

    num_replicas: int
    """Number of replicas that serve or are starting."""
    starting: int
    """Number of replicas that are starting and do not serve yet."""
    forecast_wait: float
    """Forecast time in seconds until a new request would start."""
    load: float
    """Number of unfinished requests divided by the number of rows of the serving replicas. Above 1, requests wait."""


class Autoscaler:
    """Decides when to add and when to remove a replica.

    - There are always at least ``least`` and at most ``most`` replicas.
    - A replica is added when the forecast wait exceeds ``most_wait`` seconds, or when the fraction of requests that
      meet their latency targets is below ``goodput``.
    - Only one replica starts at a time, because its effect shows only when it serves. If the wait exceeds ten times
      ``most_wait``, a second one starts.
    - A replica is removed when, for ``calm`` seconds without interruption, the other replicas would have used at most
    60 %
      of their rows.

    Times are in seconds on the caller's clock. Raises ConfigError unless 1 <= ``least`` <= ``most``.
    """

    def __init__(
        self, least: int, most: int, *, most_wait: float = 0.5, goodput: float = 0.99, calm: float = 30.0
    ) -> None:
        if not 1 <= least <= most:
            raise ConfigError(
                f"autoscaling needs at least 1 replica and a maximum of at least the minimum, got {least}-{most}"
            )
        self.least, self.most = least, most
        self._most_wait, self._goodput, self._calm = most_wait, goodput, calm
        self._ended: deque[tuple[float, bool]] = deque()
        self._calm_since: float | None = None

    def ended(self, now: float, kept: bool | None) -> None:
        """Record the end of a request, and whether it met its latency targets. None: it had no targets."""
        if kept is not None:
            self._ended.append((now, kept))

    def wanted(self, now: float, demand: Demand) -> int:
        """Number of replicas that the fleet should have now."""
        while self._ended and self._ended[0][0] < now - _WINDOW:
            self._ended.popleft()
        count = demand.num_replicas
        kept = sum(each for _, each in self._ended)
        broken = len(self._ended) >= _MIN_ENDED and kept < self._goodput * len(self._ended)
        waits = demand.forecast_wait > self._most_wait
        at_once = 2 if demand.forecast_wait > 10 * self._most_wait else 1
        if (waits or broken) and demand.starting < at_once:
            self._calm_since = None
            return min(self.most, max(self.least, count + 1))
        spare = count > 1 and demand.load * (count - demand.starting) <= 0.6 * (count - 1)
        if waits or broken or not spare or demand.starting:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        elif now - self._calm_since >= self._calm:
            self._calm_since = now
            return max(self.least, count - 1)
        return min(self.most, max(self.least, count))
