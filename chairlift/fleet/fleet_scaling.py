"""Autoscaling of a server's fleet: its limits, its state for the metrics, and the record of its decisions."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

from chairlift.fleet.autoscale import Autoscaler, demand_of
from chairlift.fleet.door import Door
from chairlift.fleet.door_forecast import DoorForecast
from chairlift.fleet.routing import Replica
from chairlift.metrics.stats import AutoscalingStats

__all__ = ["FleetScaling", "ScaleLimits"]

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScaleLimits:
    """Settings of autoscaling. The fields have the names and meanings of the arguments of
    :class:`~chairlift.fleet.autoscale.Autoscaler`."""

    least: int
    most: int
    most_wait: float = 0.5
    goodput: float = 0.99
    calm: float = 60.0


class FleetScaling:
    """Asks the autoscaler how many replicas a fleet should have, logs its decisions, and keeps their state.

    ``now`` is the fleet's clock. Raises ConfigError for limits that mean nothing.
    """

    def __init__(self, limits: ScaleLimits, now: Callable[[], float]) -> None:
        self.limits = limits
        self._now = now
        self._scaler = Autoscaler(
            limits.least, limits.most, most_wait=limits.most_wait, goodput=limits.goodput, calm=limits.calm
        )
        self._start_seconds = 0.0
        self._ended = self._kept = 0
        self._stats = AutoscalingStats(
            min_replicas=limits.least, max_replicas=limits.most, wanted_replicas=limits.least
        )

    def decide(
        self,
        door: Door,
        forecast: DoorForecast,
        *,
        serving: Sequence[Replica],
        starting: int,
        rows: int,
        targets: tuple[int, int],
        steady: bool,
    ) -> int:
        """Number of replicas that the fleet should have now.

        ``targets`` is (number of ended requests with latency targets, number of those that met them) since the server
        started. The other arguments are those of :func:`~chairlift.fleet.autoscale.demand_of`.
        """
        now = self._now()
        ended, kept = targets
        for number in range(ended - self._ended):
            self._scaler.ended(now, number < kept - self._kept)
        self._ended = ended
        self._kept = kept
        demand = demand_of(
            door,
            forecast,
            now,
            serving=serving,
            starting=starting,
            rows=rows,
            start_seconds=self._start_seconds,
            steady=steady,
        )
        decision = self._scaler.decide(now, demand)
        stats = self._stats
        stats.wanted_replicas = decision.wanted
        stats.starting_replicas = starting
        stats.forecast_wait_seconds = demand.forecast_wait
        stats.load = demand.load
        if decision.wanted != demand.num_replicas:
            grows = decision.wanted > demand.num_replicas
            stats.num_added += grows
            stats.num_removed += not grows
            stats.last_change = f"from {demand.num_replicas} to {decision.wanted} replicas: {decision.reason}"
            stats.last_change_at = time.time()
            _log.info("autoscaling from %d to %d replicas: %s", demand.num_replicas, decision.wanted, decision.reason)
        return decision.wanted

    def started(self, seconds: float) -> None:
        """Record the time in seconds that a replica needed until it served."""
        self._start_seconds = self._stats.start_seconds = seconds

    def failed(self, index: int, why: str) -> None:
        """Record that an additional replica could not start."""
        pause = self._scaler.failed(self._now()) - self._now()
        _log.error(
            "replica %d, which autoscaling added, cannot start: %s; next try in %.0f s or later", index, why, pause
        )

    def shown(self) -> AutoscalingStats:
        """State of autoscaling. A copy."""
        return dataclasses.replace(self._stats)
