"""The door: late binding in the order of the policy, and the choice of a replica."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from chairlift.config import EngineConfig
from chairlift.core.request import Request, Service
from chairlift.core.scheduler.policies import policy_from_config
from chairlift.core.scheduler.policy import FCFS, Policy
from chairlift.errors import ConfigError
from chairlift.fleet.door import Door
from chairlift.fleet.door_forecast import DoorForecast
from chairlift.fleet.routing import (
    PREFIX_BLOCK,
    ROUTINGS,
    MeasuredPace,
    Pace,
    Replica,
    prefix_keys,
    router_from_name,
)

PACE = Pace(lambda tokens: tokens / 10_000, lambda rows: 0.01 + rows * 0.0001, 512)


def fleet(count: int, routing: str = "least", policy: Policy = FCFS, rows: int = 64) -> Door:
    replicas = [Replica(i, PACE, max_num_seqs=rows, cache_tokens=64 * PREFIX_BLOCK) for i in range(count)]
    for replica in replicas:
        replica.accepting = True
    return Door(replicas, router_from_name(routing), policy)


def prompt(name: str, tokens: int, **promise: str | int) -> Request:
    priority = int(promise.pop("priority", 0))
    service = dataclasses.replace(Service(), tenant=str(promise.pop("tenant", "")))
    return Request(name, list(range(tokens)), max_tokens=10, priority=priority, service=service)


def names(sent: Sequence[tuple[Request, Replica]]) -> list[tuple[str, int]]:
    return [(request.request_id, replica.index) for request, replica in sent]


def test_requests_wait_until_a_replica_has_room() -> None:
    door = fleet(1)
    for number in range(5):
        door.add(prompt(f"{number}", 400), [], 0.0)
    assert names(door.send(0.0)) == [("0", 0), ("1", 0), ("2", 0)], "less than two steps of prompts, then one more"
    assert len(door) == 2 and not door.send(0.1)
    door.begun("0")
    assert names(door.send(0.2)) == [("3", 0)]
    door.ended("1", 0)
    assert names(door.send(0.3)) == [("4", 0)] and not len(door)


def test_a_replica_without_a_free_row_has_no_room() -> None:
    door = fleet(1, rows=4)
    for number in range(8):
        door.add(prompt(f"{number}", 1), [], 0.0)
    assert len(door.send(0.0)) == 5, "one more than rows, to take the place of the first that ends"
    for number in range(5):
        door.begun(f"{number}")
    assert not door.send(1.0)
    door.ended("3", 4)
    assert names(door.send(1.0)) == [("5", 0)]


def test_the_queue_is_that_of_the_whole_fleet() -> None:
    """A request of high priority passes all that wait, whatever replica frees a place."""
    scheduler = EngineConfig.from_flat({"scheduling_policy": "priority"}).scheduler
    door = fleet(2, policy=policy_from_config(scheduler))
    for number in range(12):
        door.add(prompt(f"{number}", 512), [], 0.0)
    first = names(door.send(0.0))
    assert len(first) == 4
    door.add(prompt("urgent", 512, priority=-1), [], 0.1)
    door.begun(first[1][0])
    assert names(door.send(0.2)) == [("urgent", first[1][1])]


def test_tenants_share_the_fleet() -> None:
    scheduler = EngineConfig.from_flat({"scheduling_policy": "priority"}).scheduler
    door = fleet(2, policy=policy_from_config(scheduler))
    for number in range(20):
        door.add(prompt(f"many {number}", 512, tenant="many"), [], 0.0)
    started = [name for name, _ in names(door.send(0.0))]
    for number in range(4):
        door.add(prompt(f"few {number}", 512, tenant="few"), [], 0.1)
    for step in range(8):
        door.begun(started[step])
        door.ended(started[step], 1)
        started += [name for name, _ in names(door.send(0.2 + step))]
    assert sum(name.startswith("few") for name in started[4:12]) == 4, started


def test_nothing_is_sent_to_a_replica_that_does_not_accept() -> None:
    for routing in ROUTINGS:
        door = fleet(3, routing)
        door.replicas[0].accepting = door.replicas[2].accepting = False
        for number in range(3):
            door.add(prompt(f"{number}", 10), [], 0.0)
        assert {index for _, index in names(door.send(0.0))} == {1}, routing
        door.replicas[1].accepting = False
        door.add(prompt("waits", 10), [], 0.0)
        assert not door.send(0.0) and len(door) == 1, routing


def test_requests_of_a_lost_replica_return_to_the_queue() -> None:
    door = fleet(2)
    for number in range(4):
        door.add(prompt(f"{number}", 100), [], 0.0)
    at = dict(names(door.send(0.0)))
    lost = next(each for each in door.replicas if each.index == at["0"])
    theirs = [name for name, index in at.items() if index == lost.index]
    door.begun(theirs[0])
    unstarted, started = door.lose(lost)
    assert [each.request_id for each in started] == theirs[:1]
    assert [each.request_id for each in unstarted] == theirs[1:]
    assert lost.num_requests == lost.unstarted_tokens == 0 and not lost.accepting
    for request in unstarted:
        door.add(request, [], 1.0)
    assert {index for _, index in names(door.send(1.0))} == {1 - lost.index}
    door.ended(theirs[0], 3)  # news that comes late


def test_round_robin_goes_round_and_two_choices_take_the_better() -> None:
    door = fleet(3, "rr")
    for number in range(7):
        door.add(prompt(f"{number}", 1), [], 0.0)
    assert [index for _, index in names(door.send(0.0))] == [0, 1, 2, 0, 1, 2, 0]
    door = fleet(8, "p2c")
    for number in range(400):
        door.add(prompt(f"{number}", 1), [], 0.0)
    door.send(0.0)
    counts = [each.num_requests for each in door.replicas]
    assert max(counts) - min(counts) <= 6, "one random choice would spread by some twenty"


@pytest.mark.parametrize("routing", ["prefix", "forecast"])
def test_a_prompt_goes_where_its_beginning_is(routing: str) -> None:
    door = fleet(3, routing)
    shared = prefix_keys(list(range(4 * PREFIX_BLOCK)))
    door.add(prompt("first", 600), shared, 0.0)
    ((_, home),) = names(door.send(0.0))
    door.begun("first")
    door.ended("first", 1)
    door.replicas[home].started.add("busy")  # not the emptiest
    door.add(prompt("second", 600), shared, 1.0)
    door.add(prompt("other", 600), prefix_keys([7] * 600), 1.0)
    second, other = names(door.send(1.0))
    assert second[1] == home and other[1] != home


@pytest.mark.parametrize("routing", ["prefix", "forecast"])
def test_a_popular_beginning_does_not_overload_one_replica(routing: str) -> None:
    door = fleet(4, routing)
    shared = prefix_keys(list(range(4 * PREFIX_BLOCK)))
    for number in range(60):
        door.add(prompt(f"{number}", 4 * PREFIX_BLOCK), shared, 0.0)
        for name, _ in names(door.send(0.0)):
            door.begun(name)
    counts = [each.num_requests for each in door.replicas]
    assert sum(counts) == 60 and max(counts) <= 1.25 * 15 + 3, counts


def test_equal_beginnings_have_equal_routing_keys() -> None:
    text = [i % 97 for i in range(5 * PREFIX_BLOCK + 3)]
    keys, other = prefix_keys(text), prefix_keys([*text[: 3 * PREFIX_BLOCK], -1, *text[3 * PREFIX_BLOCK + 1 :]])
    assert len(keys) == 5 and keys[:3] == other[:3] and not set(keys[3:]) & set(other)
    assert not set(keys) & set(prefix_keys(text, "salt"))
    door = fleet(1)
    index = door.replicas[0].prefixes
    index.add(keys)
    assert index.matched(keys) == 5 and index.matched(other) == 3
    index.add([hash(("new", i)) for i in range(62)])  # room for 64
    assert index.matched(keys) == 2, "ends are dropped before beginnings"


def test_forecasts_follow_the_rate_of_the_whole_fleet() -> None:
    forecast, door = DoorForecast({"default": 0, "later": 5}), fleet(2)
    for number in range(24):
        door.add(prompt(f"{number}", 512, priority=5 if number % 2 else 0, tenant=f"{number % 3}"), [], 0.0)
    first = [name for name, _ in names(door.send(0.0))]
    assert forecast.make(door, 0.0) is None, "no rate is known"
    for number in range(4):
        forecast.started(0.5 * (number + 1))
        door.ended(first[number], 1)
    made = forecast.make(door, 2.0)
    assert made is not None and made.seconds_per_start == pytest.approx(0.5)
    waits = [round(start - 2.0, 6) for start in made.starts.values()]
    assert waits == [0.5 * place for place in range(1, 21)] and made.newcomers["later"] == pytest.approx(2.0 + 0.5 * 21)
    assert 2.0 < made.newcomers["default"] < made.newcomers["later"]
    assert made.strangers["later"] == pytest.approx(2.0 + 0.5 * (3 + 1)) and made.tenant in "012"
    assert forecast.make(door, 2.4) is None, "not more often than every half second"
    assert forecast.make(door, 30.0) is None, "nothing started for long"
    for number in range(24):
        door.ended(f"{number}", 1)
    empty = forecast.make(door, 31.0)
    assert empty is not None and empty.newcomers == {"default": 31.0, "later": 31.0}
    assert forecast.make(door, 31.0) is None


def test_the_speed_of_replicas_is_measured() -> None:
    measured = MeasuredPace()
    pace = measured.pace(512)
    for number in range(300):
        tokens = 1 + number * 37 % 512
        measured.stepped(tokens, 0.004 + tokens * 2e-5)
        measured.stepped(tokens, 1000.0)  # a pause
    assert pace.prefill_seconds(512) == pytest.approx(0.004 + 512 * 2e-5, rel=0.01)
    assert pace.prefill_seconds(1024) == pytest.approx(2 * (0.004 + 512 * 2e-5), rel=0.01)
    assert pace.decode_seconds(100) == pytest.approx(100 * 2e-5, rel=0.01)
    alike = MeasuredPace()
    for _ in range(50):
        alike.stepped(8, 0.002)
    assert alike.pace(512).prefill_seconds(8) == pytest.approx(0.002)


def test_an_unknown_routing_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="routing must be one of rr, p2c, least, prefix, forecast; got 'best'"):
        router_from_name("best")


def test_a_chat_does_not_go_back_to_old_weights() -> None:
    """While two versions serve, a prompt that continues one of the new weights goes there, however long it waits."""
    door = fleet(2)
    door.replicas[1].version = 1
    keys = [(1, 2), (1, 2, 3), (1, 2, 3, 4), (1, 5)]
    for name, each in zip("abcd", keys, strict=True):
        door.add(prompt(name, 400), each, 0.0)
        door.send(0.0)
    assert {name: door.replica_of(name).index for name in "abcd"} == {"a": 0, "b": 1, "c": 1, "d": 0}
    door.replicas[1].accepting = False
    door.add(prompt("e", 400), (1, 2, 3, 4, 5), 0.0)
    assert names(door.send(0.0)) == [("e", 0)], "nobody else is there"
    door.replicas[1].accepting, door.replicas[0].version = True, 1
    assert door.versions_changed() == []
    for name in "abcde":
        door.ended(name, 1)
    door.replicas[1].unstarted["busy"] = 1
    door.add(prompt("f", 400), (1, 2, 3, 4, 5), 0.0)
    assert names(door.send(0.0)) == [("f", 0)], "all versions are one again"


def test_an_answer_continues_only_on_a_replica_with_its_weights() -> None:
    door = fleet(2)
    door.replicas[0].version = 1
    door.replicas[1].accepting = False
    door.add(prompt("half", 40), [], 0.0, 0)
    door.add(prompt("other", 40), [], 0.0)
    assert names(door.send(0.0)) == [("other", 0)]
    assert door.versions_changed() == []
    door.replicas[1].accepting = True
    assert names(door.send(0.0)) == [("half", 1)]
    door.add(prompt("late", 40), [], 0.0, 0)
    door.replicas[1].version = 1
    assert not door.send(0.0) and door.versions_changed() == ["late"], "no replica has these weights any more"
    door.ended("late", 0)
    assert not len(door) and door.versions_changed() == []
