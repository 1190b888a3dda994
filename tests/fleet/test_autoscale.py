"""How many replicas a fleet wants."""

from __future__ import annotations

import pytest

from chairlift.errors import ConfigError
from chairlift.fleet.autoscale import Autoscaler, Demand


def demand(count: int, *, wait: float = 0.0, load: float = 0.9, starting: int = 0) -> Demand:
    return Demand(count, starting, wait, load)


def wanted(scaler: Autoscaler, now: float, demand: Demand) -> int:
    decision = scaler.decide(now, demand)
    assert bool(decision.reason) == (decision.wanted != demand.num_replicas), "each change has a reason"
    return decision.wanted


def test_waits_add_replicas_one_after_another() -> None:
    scaler = Autoscaler(1, 3, most_wait=0.5)
    assert wanted(scaler, 0.0, demand(1, wait=0.4)) == 1
    assert wanted(scaler, 1.0, demand(1, wait=0.6)) == 2
    assert wanted(scaler, 2.0, demand(2, wait=0.6, starting=1)) == 2, "the one that starts may suffice"
    assert wanted(scaler, 3.0, demand(2, wait=6.0, starting=1)) == 3, "it cannot"
    assert wanted(scaler, 4.0, demand(3, wait=60.0)) == 3, "no more than the most"


def test_broken_promises_add_one_too() -> None:
    scaler = Autoscaler(1, 3, goodput=0.9)
    for number in range(20):
        scaler.ended(number * 0.1, None)
        scaler.ended(number * 0.1, number % 5 > 0)
    assert wanted(scaler, 2.0, demand(1)) == 2
    assert wanted(scaler, 20.0, demand(2)) == 2, "long ago"


def test_a_calm_time_removes_one_replica() -> None:
    scaler = Autoscaler(1, 4, calm=10.0)
    assert wanted(scaler, 0.0, demand(3, load=0.3)) == 3
    assert wanted(scaler, 6.0, demand(3, load=0.7)) == 3, "two could not serve it"
    assert wanted(scaler, 7.0, demand(3, load=0.3)) == 3
    assert wanted(scaler, 16.9, demand(3, load=0.3)) == 3
    assert wanted(scaler, 17.0, demand(3, load=0.3)) == 2
    assert wanted(scaler, 18.0, demand(2, load=0.2)) == 2, "a calm time for each"
    assert wanted(scaler, 27.0, demand(2, load=0.2)) == 1
    assert wanted(scaler, 90.0, demand(1, load=0.0)) == 1


def test_the_number_of_replicas_stays_within_its_bounds() -> None:
    assert wanted(Autoscaler(2, 4), 0.0, demand(1)) == 2
    with pytest.raises(ConfigError, match="got 3-2"):
        Autoscaler(3, 2)
