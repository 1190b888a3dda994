"""Search for the smallest fleet: it is the smallest, and a divided traffic asks for as many replicas."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from chairlift.config import EngineConfig
from chairlift.errors import ConfigError
from chairlift_lab.replay.fleet import FleetPlan, replay_fleet
from chairlift_lab.replay.fleet_size import FleetSize, part_of, smallest_fleet
from chairlift_lab.replay.traced_request import TracedRequest
from chairlift_lab.workload.arrivals import parse_arrivals
from chairlift_lab.workload.trace import draw_trace
from tests.fleet.test_fleet import H100

FEW_ROWS = EngineConfig.from_flat({"max_num_seqs": 4, "num_kv_blocks": 1000})


def traffic(count: int, rate: float, **promises: Any) -> list[TracedRequest]:
    """Requests that belong to no session, so that a part of them is a thinner stream of the same kind."""
    drawn = draw_trace("chat", parse_arrivals(f"poisson:{rate}"), count, 3)
    promises = promises or {"ttft_ms": 400.0}
    alone: dict[str, Any] = {"session": "", "turn": 0, "prefix_ids": (), "prompt_tokens": 200, "output_tokens": 30}
    return [dataclasses.replace(each, **alone, **promises) for each in drawn]


def size(trace: list[TracedRequest], **more: Any) -> FleetSize:
    return smallest_fleet(trace, FEW_ROWS, H100, target=0.95, start_seconds=1.0, **more)


def test_no_smaller_fleet_keeps_the_promises() -> None:
    trace = traffic(150, 60)
    found = size(trace)
    assert found.chosen is not None and found.parts == 1 and found.halved is None
    assert found.replicas == found.chosen.replicas > 1
    for replicas in range(1, found.chosen.replicas + 1):
        report = replay_fleet(trace, FEW_ROWS, H100, FleetPlan(replicas=replicas, start_seconds=1.0))
        assert ((report.served.goodput or 0.0) >= 0.95) == (replicas == found.chosen.replicas), replicas
    assert found.failing is not None and found.failing.replicas == found.replicas + 1 and found.failing.moved
    assert (found.failing.served.goodput or 0.0) > 0.8


@pytest.mark.nightly
def test_a_divided_traffic_asks_for_as_many_replicas() -> None:
    trace = traffic(600, 60)
    whole, divided = size(trace), size(trace, most=2)
    assert whole.replicas is not None and divided.replicas is not None
    assert divided.parts > 1 and divided.parts * 2 >= whole.replicas
    assert whole.replicas <= divided.replicas <= whole.replicas + divided.parts, "a part's replicas are whole numbers"
    assert divided.halved is not None and divided.division_error is not None and divided.division_error < 0.1


@pytest.mark.nightly
def test_targets_that_no_fleet_meets_choose_none() -> None:
    found = size(traffic(450, 4, ttft_ms=0.5), most=2)
    assert found.chosen is None and found.replicas is None and found.parts > 1
    with pytest.raises(ConfigError, match="too short to be divided into 2 parts; simulate at least 600"):
        size(traffic(150, 500), most=1)
    with pytest.raises(ConfigError, match="has no latency targets"):
        size([dataclasses.replace(each, ttft_ms=None) for each in traffic(20, 5)])


def test_parts_hold_whole_sessions() -> None:
    trace = draw_trace("assistant", parse_arrivals("poisson:60"), 400, 3)
    trace = [dataclasses.replace(each, session=f"chat {i // 4}" * (i % 3 > 0)) for i, each in enumerate(trace)]
    part = part_of(trace, 4)
    names = {each.session for each in part} - {""}
    assert [each for each in part if each.session] == [each for each in trace if each.session in names]
    for among in (lambda each: each.session, lambda each: not each.session):
        assert 0.15 < sum(map(bool, map(among, part))) / sum(map(bool, map(among, trace))) < 0.35
    assert part_of(trace, 1) == trace
