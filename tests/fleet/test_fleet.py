"""A simulated fleet: one replica is the plain simulation, and nothing is lost whatever happens to replicas."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift.fleet.routing import ROUTINGS
from chairlift_lab.replay.fleet import FleetPlan, FleetReport, replay_fleet
from chairlift_lab.replay.machines import deploy, shape_from_name
from chairlift_lab.replay.replay import replay
from chairlift_lab.replay.traced_request import TracedRequest
from chairlift_lab.workload.arrivals import parse_arrivals
from chairlift_lab.workload.trace import draw_trace

H100 = deploy("h100-sxm", shape_from_name("llama-3-8b"))
SMALL = {"num_kv_blocks": 400, "max_num_seqs": 16, "max_num_batched_tokens": 512}


def traffic(count: int, rate: float = 60, kind: str = "assistant") -> list[TracedRequest]:
    return draw_trace(kind, parse_arrivals(f"poisson:{rate}"), count, 3)


def fleet(trace: list[TracedRequest], settings: dict[str, Any] | None = None, **plan: Any) -> FleetReport:
    config = EngineConfig.from_flat(settings or {})
    return replay_fleet(trace, config, H100, FleetPlan(**plan))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("settings", [{}, SMALL], ids=["ample", "tight"])
def test_one_replica_is_the_plain_simulation(settings: dict[str, Any], routing: str) -> None:
    trace = [dataclasses.replace(each, cancel_ms=400.0) if i % 7 == 0 else each for i, each in enumerate(traffic(80))]
    plain = replay(trace, EngineConfig.from_flat(settings), H100).served
    behind = fleet(trace, settings, replicas=1, routing=routing).served
    if routing in ("rr", "p2c"):
        assert behind == plain
    # Requests that wait at the door are unseen by the engine, so it may put them together otherwise.
    assert (behind.requests, behind.output_tokens, behind.cancelled) == (
        plain.requests,
        plain.output_tokens,
        plain.cancelled,
    )
    assert behind.seconds == pytest.approx(plain.seconds, rel=0.1)


def test_equal_arguments_give_equal_reports() -> None:
    plan: dict[str, Any] = {"replicas": 3, "failures": ((1, 0.5),), "start_seconds": 0.5, "door_delay": 0.01}
    assert fleet(traffic(100), **plan) == fleet(traffic(100), **plan)


def test_a_second_replica_halves_the_time_of_a_backlog() -> None:
    trace = [dataclasses.replace(each, arrival=0.0, output_tokens=40) for each in traffic(300)]
    one, two = (fleet(trace, SMALL, replicas=count).served for count in (1, 2))
    assert 1.8 < one.seconds / two.seconds < 2.2


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_requests_of_dead_replicas_end_or_go_on(routing: str, resume: bool) -> None:
    trace = traffic(150)
    failures = ((0, 0.4), (1, 0.9), (0, 1.6), (2, 1.7))
    report = fleet(
        trace, SMALL, replicas=3, routing=routing, failures=failures, start_seconds=0.6, resume=resume, door_delay=0.005
    )
    served = report.served
    assert served.requests + report.broken == len(trace) and sum(report.requests_by_replica) == 150 + report.moved
    if resume:
        assert not report.broken and report.moved
        assert served.output_tokens == sum(each.output_tokens for each in trace)
    else:
        assert report.broken


def test_all_replicas_dead_at_once_is_a_pause() -> None:
    trace = traffic(60)
    failures = ((0, 0.3), (1, 0.3))
    report = fleet(trace, replicas=2, failures=failures, start_seconds=2.0, resume=True)
    assert report.served.requests == 60 and 1.5 < report.served.queue.p99 < 2.5


def test_a_rollout_breaks_no_request() -> None:
    trace = traffic(200)
    calm, rolled = fleet(trace, replicas=3), fleet(trace, replicas=3, rollout_at=0.5, start_seconds=0.5)
    assert rolled.served.requests == 200 and not rolled.broken and not rolled.moved
    assert rolled.hit_rate <= calm.hit_rate


def test_the_number_of_replicas_follows_the_traffic() -> None:
    """A calm time, a burst that needs several replicas, a calm time."""
    calm, burst = traffic(20, rate=1), traffic(160, rate=40)
    last = [dataclasses.replace(each, arrival=each.arrival + 30.0) for each in calm]
    trace = [*calm, *(dataclasses.replace(each, arrival=each.arrival + 20.0) for each in burst), *last]
    trace = [dataclasses.replace(each, ttft_ms=2000.0, session="", turn=0) for each in trace]
    trace.sort(key=lambda each: each.arrival)
    settings = {"max_num_seqs": 4, "num_kv_blocks": 2000}
    one = fleet(trace, settings, replicas=1)
    scaled = fleet(trace, settings, replicas=4, least=1, start_seconds=1.0, calm_seconds=5.0)
    assert scaled.served.requests == len(trace) and not scaled.broken and not scaled.moved
    assert scaled.peak_replicas >= 3 and 1 < scaled.mean_replicas < 3
    assert 1.5 * (one.served.goodput or 0.0) < (scaled.served.goodput or 0.0)
    deaths = {"failures": ((0, 10.0), (1, 22.0), (3, 40.0)), "resume": True}
    assert fleet(trace, settings, replicas=4, least=1, start_seconds=1.0, **deaths).served.requests == len(trace)


@pytest.mark.full
def test_prefix_routing_keeps_sessions_together() -> None:
    """Beginnings that fit into no single cache, but into those of all replicas together."""
    trace = [
        TracedRequest(arrival=i * 0.01, prompt_tokens=2_048 + 100, output_tokens=8, prefix_ids=(i * i % 23,) * 4)
        for i in range(480)
    ]
    settings = {"num_kv_blocks": 1_200, "max_num_seqs": 16}  # nine beginnings
    hits = {routing: fleet(trace, settings, replicas=4, routing=routing).hit_rate for routing in ROUTINGS}
    assert min(hits["prefix"], hits["forecast"]) > max(hits["rr"], hits["p2c"]) + 0.2, hits


def test_a_closed_loop_of_users_keeps_sessions_in_order() -> None:
    trace = [
        TracedRequest(arrival=0.0, prompt_tokens=100 + turn, output_tokens=20, session=f"{user}", turn=turn)
        for user in range(6)
        for turn in range(5)
    ]
    report = replay_fleet(trace, EngineConfig.from_flat({}), H100, FleetPlan(replicas=2), max_concurrency=4)
    assert report.served.requests == 30


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"replicas": 0}, "replicas must be from 1 to 1024, got 0"),
        ({"replicas": 2, "routing": "best"}, "routing must be one of"),
        ({"replicas": 2, "failures": ((2, 1.0),)}, "a replica below 2: 2@1.0"),
        ({"replicas": 2, "least": 3}, "a maximum of at least the minimum, got 3-2"),
        ({"replicas": 2, "least": 1, "rollout_at": 1.0}, "both stop replicas"),
        ({"replicas": 2, "door_delay": -1.0}, "door_delay must be 0 or more seconds"),
    ],
)
def test_impossible_plans_are_refused(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FleetPlan(**plan)
