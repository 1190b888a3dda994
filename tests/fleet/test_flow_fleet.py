"""The flow model of large fleets: its error against the exact simulation, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift_lab.cli.sim_fleet import error_lines
from chairlift_lab.replay.fleet import FleetPlan, FleetReport, replay_fleet
from chairlift_lab.replay.flow_fleet import FlowError, flow_error, replay_flow
from tests.fleet.test_fleet import H100, SMALL, traffic


def both(
    trace: list[Any], settings: dict[str, Any] | None = None, users: int | None = None, **plan: Any
) -> tuple[FleetReport, FleetReport]:
    """Reports of the exact simulation and of the flow model."""
    config = EngineConfig.from_flat(settings or {})
    exact, flow = (
        model(trace, config, H100, FleetPlan(**plan), max_concurrency=users) for model in (replay_fleet, replay_flow)
    )
    assert flow.as_flow and not exact.as_flow
    assert flow.served.requests == exact.served.requests and flow.served.output_tokens == exact.served.output_tokens
    return exact, flow


@pytest.mark.parametrize(
    ("kind", "rate", "settings", "limit"),
    [
        ("assistant", 60, {}, 0.01),  # prompts with a common beginning
        ("chat", 120, {}, 0.01),
        ("assistant", 60, SMALL, 0.15),  # the KV cache is full of what prompts share
        ("chat", 300, {"max_num_seqs": 16}, 0.1),  # rows are full, and requests wait at the door
        ("agents", 30, {}, 0.2),  # long prompts in several chunks
    ],
)
def test_the_flow_model_is_near_the_exact_simulation(
    kind: str, rate: float, settings: dict[str, Any], limit: float
) -> None:
    exact, flow = both(traffic(250, rate, kind), settings, replicas=2)
    ratios = FlowError(1, exact, flow).ratios()
    assert set(ratios) == {"tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"}
    assert {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > limit} == {}
    assert flow.hit_rate == pytest.approx(exact.hit_rate, abs=0.03)
    # The replica of the last long answer differs, and while it runs, the other replica is idle.
    assert flow.served.utilisation == pytest.approx(exact.served.utilisation, abs=0.07)


def test_closed_loops_and_cancelled_requests_are_near_the_exact_simulation() -> None:
    trace = [dataclasses.replace(each, cancel_ms=300.0) if i % 7 == 0 else each for i, each in enumerate(traffic(150))]
    config, plan = EngineConfig.from_flat({}), FleetPlan(replicas=3)
    reports = [model(trace, config, H100, plan, max_concurrency=12).served for model in (replay_fleet, replay_flow)]
    assert reports[0].cancelled > 10 and abs(reports[1].cancelled - reports[0].cancelled) <= 1
    assert reports[1].requests + reports[1].cancelled == 150
    assert reports[1].seconds == pytest.approx(reports[0].seconds, rel=0.05)


def test_a_large_fleet_is_simulated_with_its_error() -> None:
    trace, config, plan = traffic(400, 400), EngineConfig.from_flat({}), FleetPlan(replicas=40)
    report = replay_flow(trace, config, H100, plan)
    assert report == replay_flow(trace, config, H100, plan)
    assert sum(report.requests_by_replica) == 400 and len(report.requests_by_replica) == 40
    error = flow_error(trace, config, H100, plan)
    assert (error.parts, error.exact.replicas, error.flow.replicas) == (4, 10, 10)
    assert error.exact.served.requests == 100 and all(abs(ratio - 1) < 0.05 for ratio in error.ratios().values())
    (line,) = error_lines([error])
    assert line.startswith("error of the flow model (~), on 1/4 of the traffic on 10 replicas, forecast: tokens/s ")
    wrong = FlowError(4, error.exact, dataclasses.replace(error.flow, served=report.served))
    assert error_lines([wrong]) != [line]
    with pytest.raises(ConfigError, match=r"is measured on 1/8 of the traffic.*simulate at least 800 requests"):
        flow_error(trace, config, H100, FleetPlan(replicas=100))


@pytest.mark.parametrize(
    ("plan", "settings", "what"),
    [
        ({"failures": ((3, 1.0),)}, {}, "failures"),
        ({"rollout_at": 1.0}, {}, "a rollout"),
        ({"least": 2}, {}, "autoscaling"),
        ({"door_delay": 0.1}, {}, "a delay of the door"),
        ({}, {"batching": "static"}, "static batches"),
    ],
)
def test_features_outside_the_flow_model_are_refused(plan: dict[str, Any], settings: dict[str, Any], what: str) -> None:
    config = EngineConfig.from_flat(settings)
    with pytest.raises(ConfigError, match=f"20 replicas are simulated as flows of requests, without {what}"):
        replay_flow(traffic(5), config, H100, FleetPlan(replicas=20, **plan))
    with pytest.raises(ConfigError, match="at most 16 replicas are simulated token by token, got 20"):
        replay_fleet(traffic(5), config, H100, FleetPlan(replicas=20))
