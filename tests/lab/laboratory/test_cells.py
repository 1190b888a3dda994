from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from chairlift_lab.laboratory.cell import LabMachine, LabTrace, RateTask, fitting_scale
from chairlift_lab.laboratory.figures import MeasuredWindow, figures_of, service_index, window_of
from chairlift_lab.laboratory.knots import bundled_knots
from chairlift_lab.laboratory.targets import LabTargets, alone_times, targets_of
from chairlift_lab.replay.machines import Deployment, deploy, shape_from_name
from chairlift_lab.replay.replay import serve_trace, simulated_core
from chairlift_lab.replay.served import RequestTiming
from chairlift_lab.replay.traced_request import TracedRequest

DEPLOYMENT: Deployment = deploy("l4", shape_from_name("llama-3-8b"))
BUDGET = 2048


def timing(arrival: float, started: float, times: list[float], **fields: Any) -> RequestTiming:
    request = TracedRequest(arrival=arrival, prompt_tokens=100, output_tokens=max(1, len(times)), **fields)
    left = times[-1] if times else -1.0
    return RequestTiming(request, 0, started=started, times=times, left=left, ended=bool(times))


def test_times_alone_are_those_of_a_replay_with_one_request_at_a_time() -> None:
    request = TracedRequest(arrival=0.0, prompt_tokens=5000, output_tokens=50)
    task = RateTask(
        trace=LabTrace(name="t"), machine=LabMachine(name="m", deployment=DEPLOYMENT), scale=1.0, count=1, settings={}
    )
    core, limits = simulated_core(DEPLOYMENT, task.config({}))
    timings: list[RequestTiming] = []
    serve_trace(core, [request], limits, timings)
    alone = alone_times(request, DEPLOYMENT.cost, BUDGET)
    assert alone.ttft == pytest.approx(timings[0].first, rel=0.01)
    assert alone.tpot == pytest.approx(timings[0].tpot, rel=0.01)
    assert alone.whole == pytest.approx(timings[0].last, rel=0.01)


def test_targets_are_medians_alone_times_five_and_ten() -> None:
    trace = [TracedRequest(arrival=0.0, prompt_tokens=tokens, output_tokens=9) for tokens in (10, 400, 9000)]
    targets = targets_of(trace, DEPLOYMENT.cost, BUDGET)
    middle = alone_times(trace[1], DEPLOYMENT.cost, BUDGET)
    assert targets == LabTargets(middle.ttft, middle.tpot)
    assert targets.met(5 * middle.ttft, 5 * middle.tpot, 5)
    assert not targets.met(5.1 * middle.ttft, 0.0, 5)
    assert targets.met(5.1 * middle.ttft, 0.0, 10)


def test_figures_by_hand() -> None:
    # Idle medians of 1 s and 1 s. Three requests within the window of 10 s; the one before and the one after do not
    # count, but the tokens of all within the window do.
    timings = [
        timing(0.0, 0.0, [1.0, 11.0]),
        timing(10.0, 10.5, [12.0, 13.0, 14.0]),
        timing(12.0, 13.0, [18.0, 19.0]),
        timing(20.0, 29.0, [30.0]),
        timing(25.0, 25.0, [26.0]),
    ]
    figures = figures_of(
        timings,
        MeasuredWindow(10.0, 20.0),
        LabTargets(1.0, 1.0),
        DEPLOYMENT.cost,
        BUDGET,
        preemptions=4,
        wasted_tokens=7,
    )
    assert figures.requests == 3
    assert figures.goodput_strict == pytest.approx(1 / 10)  # TTFT 2, 6 and 10 s
    assert figures.goodput_loose == pytest.approx(3 / 10)
    assert figures.requests_per_second == pytest.approx(3 / 10)  # ended at 11, 14 and 19 s
    assert figures.output_tokens_per_second == pytest.approx(6 / 10)
    assert (figures.ttft_p50, figures.tpot_p50) == (6.0, 1.0)
    assert figures.worst_wait == 9.0
    assert (figures.preemptions, figures.wasted_tokens) == (4, 7)


def test_a_dropped_request_misses_its_targets_and_its_tokens_are_wasted() -> None:
    dropped = dataclasses.replace(timing(11.0, 11.0, [12.0, 13.0]), ended=False, dropped=True)
    figures = figures_of(
        [timing(10.0, 10.0, [10.5]), dropped],
        MeasuredWindow(10.0, 20.0),
        LabTargets(1.0, 1.0),
        DEPLOYMENT.cost,
        BUDGET,
        preemptions=0,
        wasted_tokens=0,
    )
    assert (figures.requests, figures.goodput_strict, figures.wasted_tokens) == (2, pytest.approx(0.1), 2)


def test_the_index_of_service_counts_only_tenants_that_wait_together() -> None:
    # Both wait from 0 to 100. Tenant a gets 100 prompt tokens and 50 answer tokens, weight 2: 200. Tenant b gets 100
    # in the same time. (200 + 100)^2 / (2 * (200^2 + 100^2)) = 0.9.
    both = [
        timing(0.0, 100.0, [], tenant="a"),
        timing(0.0, 100.0, [], tenant="b"),
        timing(0.0, 0.0, [50.2] * 50, tenant="a"),
        dataclasses.replace(timing(0.0, 0.0, [50.2], tenant="b"), cached_tokens=2),
    ]
    assert service_index(both, 0.0, 100.0) == pytest.approx(0.9)
    assert service_index(both[1:], 0.0, 100.0) is None


def test_the_window_leaves_out_the_warm_up_and_the_last_tenth() -> None:
    waits = [0.0] * 10 + [5.0] * 90
    timings = [timing(float(index), index + wait, [index + wait + 1]) for index, wait in enumerate(waits)]
    assert window_of(timings) == MeasuredWindow(10.0, 89.0)
    assert window_of(timings, begin=-5.0) == MeasuredWindow(15.0, 94.0)


def test_lengths_are_scaled_to_the_model_and_common_beginnings_stay_common() -> None:
    machine = LabMachine(name="m", deployment=dataclasses.replace(DEPLOYMENT, max_model_len=512))
    trace = LabTrace(name="agent", knots=bundled_knots()["tracelab-agent"])
    drawn = trace.draw(200, 1.0, 0)
    scale = fitting_scale(drawn, machine)
    assert 0 < scale < 0.01
    task = RateTask(trace=trace, machine=machine, scale=scale, count=200, settings={})
    requests = task.requests(1.0, 0)
    assert max(each.prompt_tokens + each.output_tokens for each in requests) <= 512
    assert sum(each.prompt_tokens + each.output_tokens == 512 for each in requests) <= 10
    assert len({each.prefix_ids[:1] for each in requests}) == 1
    assert fitting_scale([TracedRequest(arrival=0.0, prompt_tokens=9, output_tokens=9)], machine) == 1.0
