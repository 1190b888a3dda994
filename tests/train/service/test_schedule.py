"""The training scheduler in simulated worlds: results as alone, shares by weight, and bounded waits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from chairlift.errors import InvariantError
from chairlift_train.service.schedule.prices import WorkPrices
from chairlift_train.service.schedule.scheduler import NoRoomError, TrainingScheduler
from chairlift_train.service.schedule.work import TrainingCall, TrainingPack, TrainingStep
from tests.train.service.schedule_worlds import (
    BUDGET,
    LONGEST,
    UNFAIR,
    WRONG_RESULTS,
    Client,
    World,
    busy_world,
    make_world,
)

SEEDS = 100


def check_results(seed: int) -> None:
    world = make_world(seed)
    world.run()
    world.check_end()


def check_shares(seed: int) -> None:
    """Tenants with work get seconds in proportion to their weights, up to a few data."""
    rng = random.Random(seed)
    weights = {f"t{index}": rng.choice((1.0, 2.0, 4.0)) for index in range(rng.randint(2, 5))}
    world = busy_world(rng, weights, noise=rng.choice((1.0, 1.3)))
    world.run(until=10.0)
    shares = [world.spent.get(tenant, 0.0) / weight for tenant, weight in weights.items()]
    assert max(shares) - min(shares) < 1.0, f"seconds per weight: {shares}"
    check_return_of_an_idle_tenant(seed)


def check_return_of_an_idle_tenant(seed: int) -> None:
    """A tenant that was idle for long gets its share from now on, not what it did not use."""
    world = busy_world(random.Random(seed), {"busy": 1.0, "late": 1.0})
    late = world.clients["m1"]
    world._arrivals = sorted((5.0 if name == "m1" else when, k, name, call) for when, k, name, call in world._arrivals)
    world.run(until=5.0)
    before = world.spent["busy"]
    world.run(until=8.0)
    assert abs(world.spent.get(late.tenant, 0.0) - (world.spent["busy"] - before)) < 0.6


def check_all(check: Callable[[int], None], num_seeds: int) -> None:
    for seed in range(num_seeds):
        check(seed)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_each_client_ends_with_what_it_has_alone(seed: int) -> None:
    check_results(seed)


@pytest.mark.parametrize("seed", range(12))
def test_tenants_share_by_weight(seed: int) -> None:
    check_shares(seed)


@pytest.mark.planted("test_each_client_ends_with_what_it_has_alone")
@pytest.mark.parametrize("plant", WRONG_RESULTS, ids=lambda plant: plant.__name__)
def test_planted_bugs_change_results(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch.setattr)
    with pytest.raises((AssertionError, InvariantError)):
        check_all(check_results, SEEDS)


@pytest.mark.planted("test_tenants_share_by_weight")
@pytest.mark.parametrize("plant", UNFAIR, ids=lambda plant: plant.__name__)
def test_planted_bugs_change_shares(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch.setattr)
    with pytest.raises(AssertionError):
        check_all(check_shares, 12)


@pytest.mark.parametrize("seed", range(40))
def test_a_short_call_joins_the_next_pack(seed: int) -> None:
    """A call that needs at most its share of a pack ends with the first pack that begins after its arrival."""
    rng = random.Random(seed)
    others = rng.randint(1, 6)
    world = busy_world(rng, {f"t{index}": 1.0 for index in range(others)})
    most = BUDGET // (others + 1) - LONGEST // 2
    size = max(1, min(most, rng.randint(1, 8)))
    call = TrainingCall("short", 1, "pass", (size,))
    when = rng.uniform(1.0, 4.0)
    world.clients["short"] = Client("short", "short", [call], [when])
    world.scheduler.admit("short", "short", 1)
    world._calls["short", 1] = call
    world._arrivals.append((when, 0, "short", call))
    world._arrivals.sort()
    world.run(until=when + 1.5)
    begins = [start for start, work in world.log if isinstance(work, TrainingPack) and start >= when]
    joined = next(start for start, work in world.log if any(part.model_id == "short" for part in parts_of(work)))
    assert joined == begins[0]
    running = max(work.seconds for _, work in world.log)
    assert world.ended_at["short", 1] - when <= 2 * running + 1e-9


def parts_of(work: TrainingPack | TrainingStep) -> tuple[Any, ...]:
    return work.parts if isinstance(work, TrainingPack) else ()


def scheduler(**settings: Any) -> TrainingScheduler:
    return TrainingScheduler(token_budget=100, memory=1000, **settings)


def test_calls_of_many_clients_share_a_pack() -> None:
    train = scheduler()
    for name in "abc":
        train.admit(name, name, 10)
        train.add(TrainingCall(name, 1, "pass", (20, 5)))
    pack = train.next()
    assert isinstance(pack, TrainingPack)
    assert {part.model_id for part in pack.parts} == set("abc")
    assert pack.num_tokens == 75
    assert sorted(train.done(pack, 1.0)) == [("a", 1), ("b", 1), ("c", 1)]
    assert train.next() is None and not train.has_work


def test_a_step_waits_for_the_calls_before_it_and_holds_up_those_behind() -> None:
    train = scheduler()
    train.admit("a", "t", 10)
    train.add(TrainingCall("a", 1, "pass", (80, 80)))
    train.add(TrainingCall("a", 2, "optim_step"))
    train.add(TrainingCall("a", 3, "pass", (10,)))
    order = []
    while (work := train.next()) is not None:
        order.append(work.call.kind if isinstance(work, TrainingStep) else [part.seq_id for part in work.parts])
        train.done(work, 0.1)
    assert order == [[1], [1], "optim_step", [3]]


def test_a_sequence_longer_than_the_budget_has_a_pack_of_its_own() -> None:
    train = scheduler()
    for name in "ab":
        train.admit(name, name, 10)
    train.add(TrainingCall("a", 1, "pass", (500,)))
    train.add(TrainingCall("b", 1, "pass", (10,)))
    sizes = []
    while (work := train.next()) is not None:
        sizes.append(work.num_tokens if isinstance(work, TrainingPack) else 0)
        train.done(work, 0.1)
    assert sizes == [500, 10]


def test_a_model_that_does_not_fit_is_refused_with_both_numbers() -> None:
    train = scheduler()
    train.admit("a", "t", 600)
    with pytest.raises(NoRoomError, match="needs 500 bytes, and 400 of 1,000 are free"):
        train.admit("b", "t", 500)
    train.remove("a")
    train.admit("b", "t", 500)
    assert train.model_ids == ["b"] and train.num_bytes == 500


def test_a_model_that_leaves_takes_its_calls_along() -> None:
    train = scheduler()
    for name in "ab":
        train.admit(name, name, 10)
        train.add(TrainingCall(name, 1, "pass", (20, 20, 20)))
    pack = train.next()
    assert isinstance(pack, TrainingPack)
    assert train.remove("a") == [1]
    assert train.done(pack, 0.5) == []
    pack = train.next()
    assert isinstance(pack, TrainingPack) and {part.model_id for part in pack.parts} == {"b"}
    assert train.done(pack, 0.5) == [("b", 1)]


def test_a_call_that_failed_in_a_part_has_no_further_parts() -> None:
    train = scheduler()
    train.admit("a", "t", 10)
    train.add(TrainingCall("a", 1, "pass", (80, 80)))
    train.add(TrainingCall("a", 2, "optim_step"))
    pack = train.next()
    assert isinstance(pack, TrainingPack)
    train.cancel("a", 1)
    assert train.done(pack, 0.1) == []
    step = train.next()
    assert isinstance(step, TrainingStep)
    assert train.done(step, 0.1) == [("a", 2)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (TrainingCall("a", 1, "optim_step"), "call 1 of a came after call 1"),
        (TrainingCall("a", 2, "pass"), "pass with 0 data"),
        (TrainingCall("a", 2, "save", (1,)), "save with 1 data"),
    ],
)
def test_calls_that_make_no_sense_are_bugs(call: TrainingCall, message: str) -> None:
    train = scheduler()
    train.admit("a", "t", 10)
    train.add(TrainingCall("a", 1, "pass", (1,)))
    with pytest.raises(InvariantError, match=message):
        train.add(call)


def test_two_pieces_of_work_never_run_at_once() -> None:
    train = scheduler()
    train.admit("a", "t", 10)
    train.add(TrainingCall("a", 1, "pass", (1,)))
    pack = train.next()
    assert pack is not None
    with pytest.raises(InvariantError, match="while other work runs"):
        train.next()


def test_predictions_follow_measurements() -> None:
    prices = WorkPrices()
    before = prices.sequence(100, False)
    for _ in range(100):
        prices.measured(prices.start() + prices.sequence(100, False), 3 * (0.02 + before))
    assert prices.sequence(100, False) == pytest.approx(3 * before, rel=0.02)
    assert prices.sequence(100, True) < prices.sequence(100, False)
    prices.measured(1.0, 1e9)  # the machine slept
    assert prices.sequence(100, False) < 4.2 * before


def test_a_world_runs_the_same_way_twice() -> None:
    def history(world: World) -> list[tuple[float, Any]]:
        world.run()
        return world.log

    assert history(make_world(7)) == history(make_world(7))
