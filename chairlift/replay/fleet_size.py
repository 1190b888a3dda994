"""How many replicas a traffic needs so that promises are kept.

Up to 16 replicas are simulated token by token. A larger traffic is divided: every k-th session with the times it has,
on a fleet of its own. The answer is k times that of a part. The error of this division is measured on the part itself,
which is divided once more.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence
from typing import Any, Final

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.replay.fleet import FleetPlan, FleetReport, replay_fleet
from chairlift.replay.machines import Deployment
from chairlift.replay.traced_request import TracedRequest

__all__ = ["FleetSize", "part_of", "smallest_fleet"]

_MOST: Final = 16
_LEAST_REQUESTS: Final = 100
"""Fewest requests in a part that is simulated."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FleetSize:
    """Smallest fleet for a traffic."""

    parts: int
    """Number of parts into which the traffic was divided. The reports are about one of them."""
    rate: float | None
    """Requests of the whole traffic that come per second; None for users who wait for their answers."""
    tried: tuple[FleetReport, ...]
    """Fleets that were simulated, by size."""
    chosen: FleetReport | None
    """The smallest that keeps the target; None if more replicas do not help."""
    failing: FleetReport | None
    """One replica more than ``chosen``, of which one dies in the middle of the traffic."""
    halved: tuple[FleetReport, FleetReport] | None
    """The error of dividing, if the traffic was divided: a part on an even number of replicas, and half of that part on
    half of them."""

    @property
    def replicas(self) -> int | None:
        """Replicas for the whole traffic, without a spare."""
        return None if self.chosen is None else self.parts * self.chosen.replicas

    @property
    def division_error(self) -> float | None:
        """Difference between a part and its half in the share of requests with kept promises, 0 to 1."""
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
    """Search for the smallest fleet that keeps the promises of the share ``target`` of the requests.

    ``start_seconds`` is the time in which a replica that died is back. A fleet has at most ``most`` replicas before the
    traffic is divided. Raises ConfigError for a trace without promises, or with too few requests to be divided.
    """
    if not any(limit is not None for each in trace for limit in (each.ttft_ms, each.tpot_ms, each.deadline_ms)):
        raise ConfigError("the traffic has no promises to keep; give some with --slo ttft:500,tpot:80")

    span = trace[-1].arrival - trace[0].arrival
    rate = (len(trace) - 1) / span if span > 0 and max_concurrency is None else None
    common = {"routing": routing, "start_seconds": start_seconds}
    parts, best = 1, -1.0
    while True:
        search = _Search(part_of(trace, parts), parts, config, deployment, target, max_concurrency, common)
        low, high = 0, 1
        while not search.kept(high) and high < most:
            low, high = high, min(most, 2 * high)
        if search.kept(high):
            break
        goodput = search.tried[high].served.goodput or 0.0
        if goodput <= best:  # a part is no easier for as many replicas: the promises are too narrow
            return FleetSize(parts=parts, rate=rate, tried=search.by_size(), chosen=None, failing=None, halved=None)
        best, parts = goodput, 2 * parts
        if len(part_of(trace, 2 * parts)) < _LEAST_REQUESTS:
            raise ConfigError(
                f"{most} replicas are too few, and the traffic of {len(trace)} requests is too short to be divided into"
                f" {parts} parts; simulate at least {3 * parts * _LEAST_REQUESTS} requests (--num-prompts), or promise"
                " less"
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
    """Fleets that serve one part of the traffic."""

    part: list[TracedRequest]
    parts: int
    config: EngineConfig
    deployment: Deployment
    target: float
    max_concurrency: int | None
    common: dict[str, Any]
    """Fields of every FleetPlan."""
    tried: dict[int, FleetReport] = dataclasses.field(default_factory=dict)

    def simulate(self, replicas: int, **more: Any) -> FleetReport:
        users = None if self.max_concurrency is None else max(1, self.max_concurrency // self.parts)
        plan = FleetPlan(replicas=replicas, **self.common, **more)
        return replay_fleet(self.part, self.config, self.deployment, plan, max_concurrency=users)

    def kept(self, replicas: int) -> bool:
        """Whether so many replicas keep the target."""
        if replicas not in self.tried:
            self.tried[replicas] = self.simulate(replicas)
        return (self.tried[replicas].served.goodput or 0.0) >= self.target

    def by_size(self) -> tuple[FleetReport, ...]:
        return tuple(report for _, report in sorted(self.tried.items()))


def part_of(trace: Sequence[TracedRequest], parts: int) -> list[TracedRequest]:
    """One of ``parts`` parts of a trace, in which every session is whole and every time as it was."""
    return [
        request
        for number, request in enumerate(trace)
        if (zlib.crc32(request.session.encode()) if request.session else number) % parts == 0
    ]
