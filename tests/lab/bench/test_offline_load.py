"""Traffic on an engine in this process, on a virtual clock: every time is known to the last digit."""

from __future__ import annotations

import itertools
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from chairlift.config import EngineConfig
from chairlift.core.scheduler.cost_model import CostModel, Roofline
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.engine.clock import VirtualClock
from chairlift.engine.core import EngineCore
from chairlift.engine.input_processor import ModelLimits
from chairlift_lab.bench.offline import run_here
from chairlift_lab.bench.report import text
from chairlift_lab.bench.serve_report import run_blocks, serve_record
from chairlift_lab.bench.serve_result import figures_of
from chairlift_lab.bench.serve_run import Load, PromptDialect, ServeRun, Target, fit
from chairlift_lab.replay.machines import Deployment
from chairlift_lab.replay.replay import simulated_core
from chairlift_lab.workload.arrivals import parse_arrivals
from chairlift_lab.workload.trace import TracedRequest, draw_trace

STEP = Roofline(
    weight_seconds=0.02,
    token_seconds=0.001,
    prompt_share=0.7,
    context_seconds=1e-6,
    pair_seconds=1e-7,
    step_seconds=0.001,
)
FLAT = Roofline(weight_seconds=0.1, token_seconds=1e-9, context_seconds=1e-15, pair_seconds=1e-15, step_seconds=1e-12)
"""A step takes 0.1 s, whatever is in it."""


def one(arrival: float, prompt: int = 10, output: int = 3, **fields: Any) -> TracedRequest:
    return TracedRequest(arrival=arrival, prompt_tokens=prompt, output_tokens=output, **fields)


def engine(cost: Roofline = FLAT, **settings: Any) -> tuple[EngineCore, ModelLimits]:
    deployment = Deployment(
        machine="m",
        model="x",
        cost=CostModel(cost),
        kv_bytes_per_token=1000,
        kv_memory_bytes=10**9,
        max_model_len=4096,
    )
    return simulated_core(deployment, EngineConfig.from_flat(settings), VirtualClock(100.0))


def measured(
    core: EngineCore, limits: ModelLimits, requests: list[TracedRequest], most: int | None = None, **how: Any
) -> ServeRun:
    target = Target(model="m", owner="chairlift", dialect=PromptDialect(chat=False, vocab_size=99, ignore_eos=True))
    return run_here(core, limits, target, Load(requests=requests, max_concurrency=most), **how)


def test_requests_that_come_during_a_step_start_at_the_next() -> None:
    run = measured(*engine(), [one(0.0, output=3), one(0.25, output=2)])
    first, second = run.outcomes
    assert [when - run.begin for when in first.times] == pytest.approx([0.1, 0.2, 0.3])
    assert [when - run.begin for when in second.times] == pytest.approx([0.4, 0.5])
    assert (first.ttft, first.tpot, first.e2el) == pytest.approx((0.1, 0.1, 0.3))
    assert (second.ttft, second.headers - second.start) == pytest.approx((0.15, 0.05))  # the wait counts
    assert run.seconds == pytest.approx(0.5)
    figures = figures_of(run, {"ttft": 120.0, "tpot": 101.0})
    assert (figures.completed, figures.good, figures.goodput) == (2, 1, pytest.approx(2.0))
    assert figures.max_concurrent_requests == 2
    assert (figures.lateness, figures.cpu_share, figures.shorter) == (None, None, 0)
    assert not list(figures.doubts(run))
    assert not [line for line in text(*run_blocks(run, figures, {})) if line.startswith("client")]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 4},
        {"max_num_seqs": 8, "num_kv_blocks": 60, "max_num_batched_tokens": 64, "num_lookahead_steps": 0},
        {"batching": "dynamic", "max_num_seqs": 4},
    ],
)
def test_figures_are_those_of_an_independent_tally_of_the_steps(settings: dict[str, Any]) -> None:
    """Tokens of each request by step, from the step log, added up without the code that is tested."""
    core, limits = engine(STEP, **settings)
    requests, _ = fit(draw_trace("chat", parse_arrivals("poisson:5"), 40, 3), core.kv.capacity_tokens)
    steps: list[tuple[float, float, list[str], list[str]]] = []

    def landed(record: Any) -> None:
        sampled = [name for name, _ in record.decodes] + [name for name, chunk in record.chunks if chunk.samples]
        began = sampled + [name for name, _ in record.chunks]
        steps.append((record.start, record.end, sampled, began))
        preempted.update(record.preempted)

    preempted: set[str] = set()
    core.events.subscribe("the test", SimpleNamespace(landed=landed))
    run = measured(core, limits, requests)
    tokens: dict[int, list[float]] = defaultdict(list)
    started: dict[int, float] = {}
    for start, end, sampled, began in steps:
        if start < run.begin:  # the warm-up
            continue
        for name in began:
            started.setdefault(int(name), start)
        for name in sampled:
            if len(tokens[int(name)]) < requests[int(name)].output_tokens:
                tokens[int(name)].append(end)
    due = {index: run.begin + request.arrival for index, request in enumerate(requests)}
    assert {index: len(times) for index, times in tokens.items()} == {
        index: request.output_tokens for index, request in enumerate(requests)
    }
    whole = max(times[-1] for times in tokens.values()) - run.begin
    ms = {
        "ttft": [1000 * (tokens[index][0] - due[index]) for index in due],
        "tpot": [1000 * (t[-1] - t[0]) / (len(t) - 1) for t in tokens.values() if len(t) > 1],
        "itl": [1000 * (b - a) for t in tokens.values() for a, b in itertools.pairwise(t)],
        "e2el": [1000 * (tokens[index][-1] - due[index]) for index in due],
    }
    slo = {name: float(np.percentile(ms[name], 70)) + 1e-3 for name in ("ttft", "e2el")}
    kept = [ms["ttft"][index] <= slo["ttft"] and ms["e2el"][index] <= slo["e2el"] for index in due]
    assert 0 < sum(kept) < len(requests)
    record = serve_record(run, figures_of(run, slo), {"request_rate": 5.0, "burstiness": 1.0})
    own = record["chairlift"]
    waits = [1000 * (started[index] - due[index]) for index in due]
    for place, name, values in [(record, *each) for each in ms.items()] + [(own, "queueing", waits)]:
        assert place[f"mean_{name}_ms"] == pytest.approx(np.mean(values)), name
        assert [place[f"p{q}_{name}_ms"] for q in (50, 90, 99)] == pytest.approx(np.percentile(values, [50, 90, 99]))
    count = sum(request.output_tokens for request in requests)
    assert (record["completed"], record["failed"], record["total_output_tokens"]) == (40, 0, count)
    assert record["duration"] == pytest.approx(whole)
    assert record["output_throughput"] == pytest.approx(count / whole)
    assert record["request_goodput"] == pytest.approx(sum(kept) / whole)
    assert own["preemption_rate"] == pytest.approx(len(preempted) / 40)
    assert bool(preempted) == ("num_kv_blocks" in settings)


def test_a_static_batch_delivers_whole_answers_when_it_has_ended() -> None:
    run = measured(*engine(batching="static", max_num_seqs=4), [one(0.0, output=2), one(0.0, output=5)])
    assert [outcome.ttft for outcome in run.outcomes] == pytest.approx([0.5, 0.5])
    assert [outcome.itls for outcome in run.outcomes] == [[], []]
    figures = figures_of(run, {})
    assert figures.output_tokens == 7
    assert list(figures.doubts(run)) == ["2 of 2 answers came whole: they have no TPOT and no ITL"]
    assert figures.times["tpot"] is figures.times["itl"] is None


def test_closed_loops_sessions_and_cancelled_requests_are_measured() -> None:
    requests = [one(0.0, output=40, cancel_ms=250.0), one(0.0, output=4, session="a"), one(0.0, session="a", turn=1)]
    run = measured(*engine(), requests, most=1)
    assert [outcome.status for outcome in run.outcomes] == ["cancelled", "completed", "completed"]
    assert [outcome.start - run.begin for outcome in run.outcomes] == pytest.approx([0.0, 0.3, 0.7])
    figures = figures_of(run, {})
    assert (figures.cancelled, figures.failed, figures.output_tokens) == (1, 0, 7)
    assert any(doubt.startswith("closed loop: at most 1") for doubt in figures.doubts(run))


def test_refused_and_failed_requests_are_counted_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    core, limits = engine(num_lookahead_steps=0)
    requests = [one(0.0, output=9), one(0.0, prompt=5000), one(2.0, output=2)]
    fail_at(core, 0.25, RuntimeError("the device is gone"))
    told: list[tuple[int, str]] = []
    run = measured(core, limits, requests, progress=lambda running, outcome: told.append((running, outcome.status)))
    assert [(outcome.status, outcome.kind) for outcome in run.outcomes] == [
        ("failed", "failed"),
        ("failed", "refused"),
        ("completed", ""),
    ]
    assert "RuntimeError" in run.outcomes[0].message
    assert "4096" in run.outcomes[1].message
    figures = figures_of(run, {"ttft": 1e6})
    assert (figures.completed, figures.failed, figures.good, figures.output_tokens) == (1, 2, 1, 2)
    assert {kind: count for kind, count, _ in figures.errors} == {"failed": 1, "refused": 1}
    assert sorted(told) == [(0, "completed"), (0, "failed"), (1, "failed")]


def test_a_request_that_missed_its_deadline_counts_as_failed() -> None:
    core, limits = engine(max_num_seqs=1, scheduling_policy="priority", late_requests="drop")
    run = measured(core, limits, [one(0.0, output=20), one(0.0, output=20, deadline_ms=300.0)])
    assert sorted(outcome.status for outcome in run.outcomes) == ["completed", "failed"]
    assert figures_of(run, {}).errors == [("too late", 1, "it could not be answered by its deadline")]


def test_ctrl_c_keeps_what_has_come() -> None:
    core, limits = engine(num_lookahead_steps=0)
    fail_at(core, 0.45, KeyboardInterrupt())
    run = measured(core, limits, [one(0.0, output=2), one(0.0, output=9), one(9.0)])
    assert run.interrupted
    assert [outcome.status for outcome in run.outcomes] == ["completed", "unfinished"]
    figures = figures_of(run, {})
    assert (figures.completed, figures.unfinished, figures.output_tokens) == (1, 1, 2)
    assert any(doubt.startswith("stopped early: 1 ") for doubt in figures.doubts(run))


def fail_at(core: EngineCore, seconds: float, error: BaseException) -> None:
    """The step that begins so many seconds after the warm-up, or the next one, fails; only that one."""
    executor, warm_up = core.executor, 8 * 0.1
    when, failed = core.clock.now() + warm_up + seconds, False

    class Failing:
        """The same executor until then."""

        def __getattr__(self, name: str) -> Any:
            return getattr(executor, name)

        def execute(self, out: SchedulerOutput) -> Any:
            nonlocal failed
            if not failed and core.clock.now() >= when:
                failed = True
                raise error
            return executor.execute(out)

    core.executor = Failing()  # type: ignore[assignment]


def test_an_outcome_is_made_of_its_own_request() -> None:
    """Requests with prefixes: what the cache held is told per request."""
    shared = {"prefix_ids": (7,), "prefix_block": 512}
    run = measured(*engine(), [one(0.0, prompt=512, **shared), one(1.0, prompt=512, **shared), one(2.0, prompt=64)])
    cached = [outcome.cached_tokens for outcome in run.outcomes]
    assert cached[0] == cached[2] == 0 < (cached[1] or 0)
    assert figures_of(run, {}).cached_tokens == cached[1]
