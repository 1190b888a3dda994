"""Random worlds of a simulated fleet with autoscaling, and the rules that each of them must keep."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from chairlift.config import EngineConfig
from chairlift.fleet.autoscale import SCALE_SECONDS, Autoscaler, Demand, ScalingDecision
from chairlift.fleet.routing import ROUTINGS
from chairlift_lab.replay import fleet
from chairlift_lab.replay.fleet import FleetPlan
from chairlift_lab.replay.traced_request import TracedRequest
from tests.fleet.test_fleet import H100

__all__ = ["Watched", "check_world", "draw_world"]


@dataclasses.dataclass(frozen=True)
class World:
    plan: FleetPlan
    settings: dict[str, Any]
    trace: list[TracedRequest]


def _burst(count: int, output_tokens: int) -> list[TracedRequest]:
    return [
        TracedRequest(arrival=number * 0.02, prompt_tokens=100, output_tokens=output_tokens) for number in range(count)
    ]


def draw_world(seed: int) -> World:
    """Bursts and calm times, with or without latency targets, for a fleet with random limits, start times and
    failures. Two seeds below 0 have fixed worlds: -1 drains a replica that still has long requests, and in -2
    replicas start slowly while requests wait."""
    settings: dict[str, Any] = {"num_kv_blocks": 2000, "max_num_batched_tokens": 512}
    if seed == -1:
        slow = [TracedRequest(arrival=1 + number, prompt_tokens=50, output_tokens=2000) for number in range(60)]
        plan = FleetPlan(replicas=2, least=1, calm_seconds=2.0, start_seconds=0.5)
        busy = [dataclasses.replace(each, arrival=each.arrival + 45) for each in _burst(200, 60)]
        return World(
            plan,
            settings | {"max_num_seqs": 64},
            sorted([*_burst(200, 300), *slow, *busy], key=lambda each: each.arrival),
        )
    if seed == -2:
        plan = FleetPlan(replicas=4, least=1, start_seconds=25.0)
        return World(plan, settings | {"max_num_seqs": 2}, _burst(300, 100))
    rng = random.Random(seed)
    least, most = rng.choice(((1, 2), (1, 3), (1, 4), (2, 4)))
    now, trace = 0.0, []
    targets: dict[str, Any] = rng.choice(({}, {"ttft_ms": 400.0}))
    for phase in range(rng.randrange(2, 5)):
        rate = 0.5 if phase % 2 else rng.choice((20.0, 50.0))
        for _ in range(rng.randrange(6, 24) if phase % 2 else rng.randrange(40, 120)):
            now += rng.expovariate(rate)
            beginnings = (rng.randrange(6),) if rng.random() < 0.3 else ()
            most_tokens = rng.choice((120, 120, 1500)) if phase % 2 else 120
            lengths = {"prompt_tokens": rng.randrange(20, 900), "output_tokens": rng.randrange(1, most_tokens)}
            trace.append(TracedRequest(arrival=now, prefix_ids=beginnings, **lengths, **targets))
    failures = tuple((rng.randrange(most), rng.uniform(0.1, now)) for _ in range(rng.choice((0, 0, 1, 3))))
    plan = FleetPlan(
        replicas=most,
        least=least,
        routing=rng.choice(list(ROUTINGS)),
        start_seconds=rng.choice((0.0, 0.7, 3.0, 25.0)),
        calm_seconds=rng.choice((2.0, 5.0, 12.0)),
        door_delay=rng.choice((0.0, 0.01)),
        failures=failures,
        resume=True,
    )
    return World(
        plan, {"max_num_seqs": rng.choice((2, 4, 6)), "num_kv_blocks": 600, "max_num_batched_tokens": 512}, trace
    )


class _WatchedScaler(Autoscaler):
    """Autoscaler whose decisions are checked when they are made."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.calm = more["calm"]
        self.removed: list[float] = []
        self.short_for = 0

    def decide(self, now: float, demand: Demand) -> ScalingDecision:
        decision, count = super().decide(now, demand), demand.num_replicas
        assert self.least <= decision.wanted <= self.most and abs(decision.wanted - count) <= 1
        assert bool(decision.reason) == (decision.wanted != count)
        waits = demand.forecast_wait > 0.5
        if decision.wanted > count:
            assert demand.starting < (2 if demand.forecast_wait > 5.0 else 1), "its effect must show first"
            self.removed.append(-1.0)
        if decision.wanted < count:
            assert not waits and not demand.starting and demand.load * count <= 0.6 * (count - 1)
            since = self.removed[-1] if self.removed else -1.0
            assert since < 0 or now - since >= self.calm, f"removals at {since} and {now}"
            if len(self.removed) > 1 and since < 0 and self.removed[-2] >= 0 and now - self.removed[-2] < self.calm:
                raise AssertionError("removed, added and removed within a calm time")
            self.removed.append(now)
        self.short_for = self.short_for + 1 if waits and not demand.starting and count < self.most else 0
        assert self.short_for <= demand.start_seconds * 0.1 / SCALE_SECONDS + 1 or decision.wanted > count
        return decision


class Watched(fleet._Fleet):
    """Simulated fleet that checks each change of its replicas."""

    def __init__(self, plan: FleetPlan, *args: Any) -> None:
        super().__init__(plan, *args)
        self.scaler = _WatchedScaler(plan.least or 1, plan.replicas, calm=plan.calm_seconds)
        self.begun: dict[int, float] = {}
        self.running: dict[int, set[str]] = {each.view.index: set() for each in self.replicas}
        self.grown = self.shrunk = 0

    def _grow(self) -> None:
        self.grown += 1
        starting = [each for each in self.replicas if each.on_since is not None and not each.view.accepting]
        assert sum(not each.leaving for each in starting) < 2, "their effect must show first"
        super()._grow()

    def _begin(self, replica: fleet._Simulated) -> None:
        self.begun[replica.view.index] = self.now
        super()._begin(replica)

    def _shrink(self, replica: fleet._Simulated) -> None:
        self.shrunk += 1
        assert replica.view.accepting, "a replica that is starting or away is not removed"
        super()._shrink(replica)

    def _stop(self, replica: fleet._Simulated) -> None:
        assert not replica.core.has_work, f"replica {replica.view.index} stops with requests"
        super()._stop(replica)

    def _send(self) -> None:
        before = [each.num_sent for each in self.replicas]
        super()._send()
        for replica, sent in zip(self.replicas, before, strict=True):
            if replica.num_sent > sent:
                ready = self.begun.get(replica.view.index, -self.plan.start_seconds) + self.plan.start_seconds
                assert replica.on_since is not None and not replica.leaving and self.now >= ready

    def _scale(self) -> None:
        super()._scale()
        assert self.now < 1000, f"requests never end: {list(self._prepared)[:3]}"
        on = [each for each in self.replicas if each.on_since is not None]
        assert len([each for each in on if not each.leaving]) >= (self.plan.least or 1)
        assert len(on) <= self.plan.replicas
        assert {view.index for view in self.door.replicas} == {each.view.index for each in on}


def check_world(seed: int) -> tuple[int, int]:
    """Run a world. Returns the numbers of added and removed replicas. Raises AssertionError for a broken rule."""
    world = draw_world(seed)
    config = EngineConfig.from_flat(world.settings)
    watched = Watched(world.plan, config, H100, world.trace, None)
    watched.run()
    total = watched.collector.served(watched.refused, 0)
    assert total.requests == len(world.trace) and not watched.broken and not watched._prepared
    assert total.output_tokens == sum(each.output_tokens for each in world.trace)
    assert not any(each.core.has_work for each in watched.replicas)
    return watched.grown, watched.shrunk
