"""Determines by simulation how many replicas some traffic needs to meet its latency targets ("promises").

Up to 16 replicas are simulated token by token. If they are not enough, only a part of the traffic is simulated: every
k-th session, with unchanged times. The result is k times the number of replicas for the part. To estimate the error of
this division, the part is divided once more and simulated again.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, Final

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift_lab.replay.fleet import FleetPlan, FleetReport, replay_fleet
from chairlift_lab.replay.machines import Deployment
from chairlift_lab.replay.traced_request import TracedRequest

__all__ = ["FleetSize", "part_of", "smallest_fleet"]

_MOST: Final = 16
_LEAST_REQUESTS: Final = 100
"""Minimum number of requests in a part that is simulated."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FleetSize:
    """Result of the search for the smallest fleet."""

    parts: int
    """Number of parts into which the traffic was divided. The reports are about one part."""
    rate: float | None
    """Requests per second of the whole traffic. None for a closed loop of users, or if all requests arrive at once."""
    tried: tuple[FleetReport, ...]
    """Reports of all simulated fleets, ordered by size."""
    chosen: FleetReport | None
    """Report of the smallest fleet that meets the target. None if more replicas do not help."""
    failing: FleetReport | None
    """Report of a fleet with one more replica than ``chosen``, in which a replica dies in the middle of the traffic."""
    halved: tuple[FleetReport, FleetReport] | None
    """(report of a part on an even number of replicas, report of half of this part on half of the replicas). The
    difference of the two reports shows the error of dividing the traffic. None if the traffic was not divided."""

    @property
    def replicas(self) -> int | None:
        """Number of replicas that the whole traffic needs, without a spare replica."""
        return None if self.chosen is None else self.parts * self.chosen.replicas

    @property
    def division_error(self) -> float | None:
        """Error of dividing the traffic, from 0 to 1: how much the fraction of requests that meet their targets differs
        between a part and half of this part."""
        if self.halved is None:
            return None
        whole, half = (each.served.goodput or 0.0 for each in self.halved)
        return abs(whole - half)


def smallest_fleet(
    trace: Sequence[TracedRequest],
    config: EngineConfig,
    deployment: Deployment,
    *,
    target: float,
    routing: str = "forecast",
    start_seconds: float = 60.0,
    max_concurrency: int | None = None,
    most: int = _MOST,
) -> FleetSize:
    """Search for the smallest fleet in which at least the fraction ``target`` of the requests meets its latency
    targets.

    ``start_seconds`` is the time that a replica needs to start again after a failure. If ``most`` replicas are not
    enough, the traffic is divided. Raises ConfigError for a trace without latency targets, and for a trace with too few
    requests to be divided.
    """
    if not any(limit is not None for each in trace for limit in (each.ttft_ms, each.tpot_ms, each.deadline_ms)):
        raise ConfigError("the traffic has no latency targets; set them with --slo ttft:500,tpot:80")

    span = trace[-1].arrival - trace[0].arrival
    rate = (len(trace) - 1) / span if span > 0 and max_concurrency is None else None
    common = {"routing": routing, "start_seconds": start_seconds}
    parts = 1
    best = -1.0
    while True:
        search = _Search(part_of(trace, parts), parts, config, deployment, target, max_concurrency, common)
        low, high = 0, 1
        while not search.kept(high) and high < most:
            low, high = high, min(most, 2 * high)
        if search.kept(high):
            break
        goodput = search.tried[high].served.goodput or 0.0
        if goodput <= best:  # a smaller part did not help, so the targets cannot be met with any number of replicas
            return FleetSize(parts=parts, rate=rate, tried=search.by_size(), chosen=None, failing=None, halved=None)
        best = goodput
        parts = 2 * parts
        if len(part_of(trace, 2 * parts)) < _LEAST_REQUESTS:
            raise ConfigError(
                f"{most} replicas are too few, and the traffic of {len(trace)} requests is too short to be divided into"
                f" {parts} parts; simulate at least {3 * parts * _LEAST_REQUESTS} requests (--num-prompts), or relax"
                " the promises"
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if search.kept(middle) else (middle, high)
    failing = None
    if high < most:
        failing = search.simulate(high + 1, failures=((0, search.part[-1].arrival / 2),), resume=True)
    halved = None
    if parts > 1:
        even = high + high % 2
        search.kept(even)
        half = _Search(part_of(trace, 2 * parts), 2 * parts, config, deployment, target, max_concurrency, common)
        halved = search.tried[even], half.simulate(even // 2)
    return FleetSize(
        parts=parts,
        rate=rate,
        tried=search.by_size(),
        chosen=search.tried[high],
        failing=failing,
        halved=halved,
    )


@dataclasses.dataclass(slots=True)
class _Search:
    """Simulates one part of the traffic on fleets of different sizes."""

    part: list[TracedRequest]
    parts: int
    config: EngineConfig
    deployment: Deployment
    target: float
    max_concurrency: int | None
    common: dict[str, Any]
    """Name -> value of the fields that all simulated FleetPlans have in common."""
    tried: dict[int, FleetReport] = dataclasses.field(default_factory=dict)

    def simulate(self, replicas: int, **more: Any) -> FleetReport:
        users = None if self.max_concurrency is None else max(1, self.max_concurrency // self.parts)
        plan = FleetPlan(replicas=replicas, **self.common, **more)
        return replay_fleet(self.part, self.config, self.deployment, plan, max_concurrency=users)

    def kept(self, replicas: int) -> bool:
        """Whether a fleet of this size meets the target."""
        if replicas not in self.tried:
            self.tried[replicas] = self.simulate(replicas)
        return (self.tried[replicas].served.goodput or 0.0) >= self.target

    def by_size(self) -> tuple[FleetReport, ...]:
        return tuple(report for _, report in sorted(self.tried.items()))


def part_of(trace: Sequence[TracedRequest], parts: int) -> list[TracedRequest]:
    """One of ``parts`` parts of a trace. All requests of a session are in the same part, and times do not change."""
    return [
        request
        for number, request in enumerate(trace)
        if (zlib.crc32(request.session.encode()) if request.session else number) % parts == 0
    ]
