"""Random simulated fleets with autoscaling keep the rules, and planted bugs break them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.fleet.autoscale import Autoscaler, Demand, ScalingDecision
from chairlift_lab.replay import fleet
from chairlift_lab.replay.fleet import replay_fleet
from tests.fleet.scaling_worlds import check_world, draw_world
from tests.fleet.test_fleet import H100
from tests.tiers import one_in

SEEDS = range(-2, 4)


@pytest.mark.parametrize("seeds", [SEEDS, pytest.param(range(4, 40), marks=pytest.mark.nightly)], ids=str)
def test_random_fleets_keep_the_rules_of_scaling(seeds: range) -> None:
    changes = [check_world(seed) for seed in seeds]
    assert sum(grown for grown, _ in changes) >= len(seeds) and any(shrunk for _, shrunk in changes)


@pytest.mark.parametrize("seed", [3, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(4, 20))])
def test_one_seed_gives_one_execution(seed: int) -> None:
    world = draw_world(seed)
    config = EngineConfig.from_flat(world.settings)
    assert replay_fleet(world.trace, config, H100, world.plan) == replay_fleet(world.trace, config, H100, world.plan)


def _stop_at_once(self: Any, replica: Any) -> None:
    replica.view.accepting, replica.leaving = False, True
    self._stop(replica)


def _lose_requests(self: Any, replica: Any) -> None:
    replica.view.accepting = False
    replica.restart()
    replica.view.lost()
    self.door.remove_replica(replica.view)
    replica.switch_off(self.now)


def _accept_at_once(self: Any, replica: Any) -> None:
    replica.view.accepting = True


def _starting_is_ready(*args: Any, **more: Any) -> Demand:
    demand = _demand_of(*args, **more)
    return dataclasses.replace(demand, starting=0)


def _without_limit(self: Autoscaler, now: float, demand: Demand) -> ScalingDecision:
    decision = _decide(self, now, demand)
    if demand.forecast_wait > 0.5 and not demand.starting:
        return ScalingDecision(demand.num_replicas + 1, "more")
    return decision


def _down_to_none(self: Autoscaler, now: float, demand: Demand) -> ScalingDecision:
    decision = _decide(self, now, demand)
    return ScalingDecision(demand.num_replicas - 1, "idle") if not demand.load and not demand.starting else decision


def _remove_the_last(serving: Any) -> Any:
    return max(serving, key=lambda each: each.num_requests)


_demand_of, _decide = fleet.demand_of, Autoscaler.decide

BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a replica is stopped with running requests": lambda p: p.setattr(fleet._Fleet, "_shrink", _stop_at_once),
    "a removed replica loses its requests": lambda p: p.setattr(fleet._Fleet, "_shrink", _lose_requests),
    "a starting replica gets requests": lambda p: p.setattr(fleet._Fleet, "_begin", _accept_at_once),
    "a starting replica counts as ready": lambda p: p.setattr(fleet, "demand_of", _starting_is_ready),
    "it flaps": lambda p: p.setattr(Autoscaler, "_calm_time", lambda self, demand: 0.0),
    "the maximum is ignored": lambda p: p.setattr(Autoscaler, "decide", _without_limit),
    "the minimum is ignored": lambda p: p.setattr(Autoscaler, "decide", _down_to_none),
    "it never grows": lambda p: p.setattr(
        Autoscaler, "_short", lambda self, now, d, kept: ScalingDecision(d.num_replicas, "")
    ),
    "a removed replica stays in the queue's list": lambda p: p.setattr(fleet.Door, "remove_replica", lambda *_: None),
    "a new replica is not in the queue's list": lambda p: p.setattr(fleet.Door, "add_replica", lambda *_: None),
}


@pytest.mark.full
@pytest.mark.planted("test_random_fleets_keep_the_rules_of_scaling")
@pytest.mark.parametrize("name", one_in(3, BUGS))
def test_planted_bugs_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[name](monkeypatch)
    found = 0
    for seed in SEEDS:
        try:
            check_world(seed)
        except (AssertionError, ValueError):
            found += 1
            break
    assert found, name
