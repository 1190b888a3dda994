"""Late binding costs no first tokens: small prompts do not wait at the door, and steps stay full."""

from __future__ import annotations

import random
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.core.request import Request
from chairlift.core.scheduler.cost_model import CostModel, StepFeatures
from chairlift.core.scheduler.policies import policy_from_config
from chairlift.core.scheduler.policy import FCFS, Policy
from chairlift.fleet.door import Door
from chairlift.fleet.routing import Pace, Replica, prefix_keys, router_from_name
from chairlift_lab.replay.fleet import FleetPlan, FleetReport, replay_fleet
from chairlift_lab.replay.machines import Deployment
from chairlift_lab.replay.traced_request import TracedRequest

STEP = 0.026
PACE = Pace(lambda tokens: tokens / 10_000, lambda rows: 0.01, 512)


class FixedSteps(CostModel):
    """Cost model in which every step takes the same time."""

    def step_seconds(self, step: StepFeatures) -> float:
        return STEP

    def prefill_seconds(self, num_tokens: int, *args: Any, **more: Any) -> float:
        return STEP


def chats(seed: int, count: int = 80, seconds: float = 7.7) -> list[TracedRequest]:
    """Chats of one to four turns. Half of them arrive in bursts, and two in five begin with the same 512 tokens."""
    rng, found = random.Random(seed), list[TracedRequest]()
    bursts = [rng.uniform(0, seconds) for _ in range(count // 20)]
    for number in range(count):
        arrival = bursts[number % len(bursts)] if number % 2 else rng.uniform(0, seconds)
        shared = 4 if number % 5 < 2 else 0
        length = 128 * shared
        for turn in range(rng.randrange(1, 5)):
            length += rng.randrange(20, 80) if turn else rng.randrange(200, 700)
            answer = rng.randrange(10, 40)
            beginning = (*range(shared), *(1000 * (number + 1) + at for at in range(shared, length // 128)))
            found.append(
                TracedRequest(
                    arrival=arrival,
                    prompt_tokens=length,
                    output_tokens=answer,
                    prefix_ids=beginning,
                    prefix_block=128,
                    session=f"{number}",
                    turn=turn,
                    ttft_ms=200.0,
                )
            )
            length += answer
            arrival += 0.3 + answer * STEP
    return sorted(found, key=lambda each: each.arrival)


def served(routing: str, seed: int) -> FleetReport:
    config = EngineConfig.from_flat({"max_num_seqs": 16, "max_num_batched_tokens": 256, "num_kv_blocks": 1500})
    machine = Deployment(
        machine="fixed steps",
        model="any",
        cost=FixedSteps(),
        kv_bytes_per_token=8,
        kv_memory_bytes=1500 * 16 * 8,
        max_model_len=8192,
    )
    return replay_fleet(chats(seed), config, machine, FleetPlan(replicas=2, routing=routing, door_delay=0.001))


@pytest.mark.parametrize("seeds", [(2,), pytest.param(tuple(range(8)), marks=pytest.mark.nightly)], ids=str)
def test_goodput_is_not_below_that_of_round_robin(seeds: tuple[int, ...]) -> None:
    """Forecast routing binds requests late. Round robin sends them at once."""
    late, at_once = ([served(routing, seed) for seed in seeds] for routing in ("forecast", "rr"))

    def mean(reports: list[FleetReport], value: str) -> float:
        return sum(getattr(each.served.ttft, value) for each in reports) / len(seeds)

    def goodput(reports: list[FleetReport]) -> float:
        return sum(each.served.goodput or 0.0 for each in reports) / len(seeds)

    assert goodput(late) >= goodput(at_once)
    assert mean(late, "p50") < mean(at_once, "p50") and mean(late, "p99") < 1.1 * mean(at_once, "p99")
    assert sum(each.hit_rate for each in late) > 1.1 * sum(each.hit_rate for each in at_once)


def door_of(count: int, policy: Policy = FCFS) -> Door:
    replicas = [Replica(i, PACE, max_num_seqs=64, cache_tokens=8192, policy_share=0.75) for i in range(count)]
    for replica in replicas:
        replica.accepting = True
    return Door(replicas, router_from_name("forecast"), policy)


def add(door: Door, name: str, tokens: int, *, priority: int = 0) -> None:
    request = Request(name, list(range(tokens)), max_tokens=10, priority=priority)
    door.add(request, [], 0.0)


def sent(door: Door) -> list[str]:
    return [request.request_id for request, _ in door.send(0.0)]


def test_small_requests_pass_long_ones_at_the_door() -> None:
    """Two steps hold 1,024 tokens. A quarter of them, 256 tokens, is room for the smallest requests."""
    door = door_of(1)
    for number in range(4):
        add(door, f"long {number}", 700)
    assert sent(door) == ["long 0", "long 1", "long 2"], "two in order, and one of the equally small"
    add(door, "small", 100)
    assert not sent(door), "the room for small requests is taken"
    door.begun("long 2")
    add(door, "smaller", 90)
    assert sent(door) == ["smaller", "small", "long 3"]
    door.ended("smaller", 1)
    door.lose(door.replicas[0])
    assert not door.replicas[0].unstarted_tokens and not door.replicas[0].small


def test_small_requests_do_not_pass_higher_priorities() -> None:
    door = door_of(1, policy_from_config(EngineConfig.from_flat({"scheduling_policy": "priority"}).scheduler))
    for number in range(5):
        add(door, f"urgent {number}", 700, priority=-1)
    add(door, "small", 10)
    assert sent(door) == ["urgent 0", "urgent 1", "urgent 2"]
    door.begun("urgent 2")
    assert sent(door) == ["urgent 3"]


def test_the_size_of_a_request_is_what_no_cache_has() -> None:
    door = door_of(1)
    keys = prefix_keys(list(range(1024)))
    door.add(Request("first", list(range(1024)), max_tokens=10), keys, 0.0)
    assert sent(door) == ["first"]
    add(door, "middle", 600)
    assert sent(door) == ["middle"]
    add(door, "next", 500)
    door.add(Request("cached", list(range(1040)), max_tokens=10), keys, 0.0)
    assert not sent(door)
    door.begun("middle")
    assert sent(door) == ["cached", "next"], "16 tokens of it are not in the cache"


def test_a_long_prompt_makes_room_while_it_is_computed() -> None:
    door = door_of(1)
    add(door, "long", 5000)
    add(door, "second", 5000)
    add(door, "third", 5000)
    assert sent(door) == ["long", "second"]
    door.progressed("long", 3900)
    assert not sent(door)
    door.progressed("long", 4000)
    assert sent(door) == ["third"], "1,000 tokens are left, less than two steps"
    door.progressed("long", 0)
    assert door.replicas[0].unstarted["long"] == 1000, "a preempted request counts as before"
    door.progressed("unknown", 1)
    door.progressed("second", 4999)
    for name in ("long", "second", "third"):
        door.begun(name)
    door.progressed("long", 5000)
    assert not door.replicas[0].unstarted_tokens and not door.replicas[0].small and door.replicas[0].has_small_room
