"""Decides how many replicas a fleet should have, from forecast waits, the share of kept promises, and load."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Final

from chairlift.errors import ConfigError

__all__ = ["Autoscaler", "Demand"]

_WINDOW: Final = 10.0
"""Seconds over which promises are counted."""
_LEAST_ENDED: Final = 10
"""With fewer ended requests than this the share of kept promises says nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Demand:
    """State of a fleet at one moment."""

    num_replicas: int
    """Replicas that serve or start."""
    starting: int
    """Replicas that are starting and do not serve yet."""
    forecast_wait: float
    """Seconds until a new request starts."""
    load: float
    """Requests in the replicas divided by the rows of those that serve; above 1 when requests wait."""


class Autoscaler:
    """Adds a replica when requests wait or promises are broken, and takes one away after a calm time.

    The number stays from ``least`` to ``most``. ``most_wait`` is the forecast wait in seconds above which a replica is
    added, ``goodput`` the share of promises that must be kept. A replica is taken away when the others would have at
    most 60 % of their rows in use, without interruption for ``calm`` seconds. Only one replica starts at a time,
    because its effect is not seen before it serves; a wait above ten times ``most_wait`` adds a second one. Times are
    seconds on the caller's clock. Raises ConfigError.
    """

    def __init__(
        self, least: int, most: int, *, most_wait: float = 0.5, goodput: float = 0.99, calm: float = 30.0
    ) -> None:
        if not 1 <= least <= most:
            raise ConfigError(f"autoscaling goes from 1 or more replicas to at least as many, got {least}-{most}")
        self.least, self.most = least, most
        self._most_wait, self._goodput, self._calm = most_wait, goodput, calm
        self._ended: deque[tuple[float, bool]] = deque()
        self._calm_since: float | None = None

    def ended(self, now: float, kept: bool | None) -> None:
        """Note the end of a request, and whether its promises were kept; None: it had none."""
        if kept is not None:
            self._ended.append((now, kept))

    def wanted(self, now: float, demand: Demand) -> int:
        """Number of replicas that the fleet should have now."""
        while self._ended and self._ended[0][0] < now - _WINDOW:
            self._ended.popleft()
        count = demand.num_replicas
        kept = sum(each for _, each in self._ended)
        broken = len(self._ended) >= _LEAST_ENDED and kept < self._goodput * len(self._ended)
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
