"""Governors: what they may do, what they do, and that nothing happens unseen."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.config import EngineConfig
from chairlift.core.request import Request
from chairlift.core.scheduler.batch import Batch
from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.core.scheduler.costs import Costs
from chairlift.core.scheduler.governor import (
    Bounds,
    Governor,
    Observation,
    Proposal,
    RuleGovernor,
    Settings,
    Targets,
    expected_growth,
    rows_in_time,
    rows_that_fit,
    tokens_for_throughput,
    tokens_in_time,
)
from chairlift.core.scheduler.governor_loop import GovernorLoop, Window
from chairlift.core.scheduler.guard_rails import GuardRails
from chairlift.engine.core import EngineCore
from chairlift.errors import ConfigError
from chairlift.metrics.prometheus import render
from chairlift.metrics.stats import EngineStats, RequestStats
from chairlift_lab.replay.machines import deploy, shape_from_name
from chairlift_lab.replay.replay import ServedTrace, serve_trace, simulated_core
from chairlift_lab.sim.simulator import Violation, run_world
from chairlift_lab.sim.world import make_world
from chairlift_lab.workload.arrivals import parse_arrivals
from chairlift_lab.workload.trace import draw_trace
from tests.core.scheduler.driver import Driver, request

CONFIGURED = Settings(64, 2048, 0.01)
BOUNDS = Bounds(Settings(2, 64, 0.01), Settings(64, 2048, 0.4))
NO_TARGETS = Targets()


def observation(**fields: Any) -> Observation:
    usual: dict[str, Any] = dict.fromkeys((field.name for field in dataclasses.fields(Observation)), 0)
    usual |= {"settings": CONFIGURED, "seconds": 1.0, "running": 10, "capacity_tokens": 8000, "kv_use": 0.5}
    usual |= {"answer_length": 300.0, "prompt_length": 100.0, "context_length": 250.0, "step_p50": 0.05}
    return Observation(**(usual | fields))


any_settings = st.builds(Settings, st.integers(-5, 10**6), st.integers(-5, 10**7), st.floats(-1, 2))
shares = st.floats(0, 1)
lengths = st.floats(0, 1e5)
observations = st.builds(
    Observation,
    settings=any_settings.map(BOUNDS.clamp),
    seconds=st.floats(0.01, 100),
    running=st.integers(0, 64),
    waiting=st.integers(0, 1000),
    oldest_wait=lengths,
    kv_use=shares,
    capacity_tokens=st.integers(16, 10**7),
    preemption_rate=st.floats(0, 10),
    finished=st.integers(0, 1000),
    preempted=st.integers(0, 64),
    prompt_length=lengths,
    answer_length=lengths,
    context_length=lengths,
    prefill_share=shares,
    tokens_per_second=lengths,
    step_p50=st.floats(0, 10),
    step_p99=st.floats(0, 10),
    ttft=st.floats(0, 1e3),
    tpot=st.floats(0, 10),
)
targets = st.builds(Targets, ttft=st.sampled_from([0.1, 5.0, math.inf]), tpot=st.sampled_from([1e-4, 0.03, math.inf]))


def rules(aims: Targets = NO_TARGETS) -> RuleGovernor:
    return RuleGovernor(BOUNDS, aims, Costs([1 << 16]))


class Scripted:
    """Wants what it is told to want."""

    name = "scripted"

    def __init__(self, *wants: Settings) -> None:
        self.wants = list(wants)

    def decide(self, now: float, seen: Observation) -> Proposal | None:
        return Proposal(self.wants.pop(0), "as told") if self.wants else None


# --- guard rails -----------------------------------------------------------------------------------------------------


def assert_allowed(before: Settings, after: Settings) -> None:
    assert BOUNDS.least.running <= after.running <= BOUNDS.most.running
    assert max(BOUNDS.least.tokens, after.running) <= after.tokens <= BOUNDS.most.tokens
    assert BOUNDS.least.watermark <= after.watermark <= BOUNDS.most.watermark
    for name in ("running", "tokens"):
        old, new = getattr(before, name), getattr(after, name)
        assert old // 2 <= new <= old + max(1, old // 8) or new == after.running  # the budget makes way for rows
    assert abs(after.watermark - before.watermark) <= 0.04 + 1e-9


@given(st.lists(any_settings, max_size=60), st.floats(0.1, 5))
def test_rails_hold_whatever_is_wanted(wants: list[Settings], interval: float) -> None:
    rails, at, turned = GuardRails(CONFIGURED, BOUNDS), CONFIGURED, -math.inf
    direction = 0
    for tick, wanted in enumerate(wants):
        now = tick * interval
        after = rails.limit(now, at, wanted)
        assert_allowed(at, after)
        if after.running != at.running:
            turn = 1 if after.running > at.running else -1
            assert turn == direction or now - turned >= 4.0 - 1e-9 or direction == 0
            direction, turned = turn, now
        rails.moved(now, at, after)
        at = after


def check_rails(chosen: Governor, again: Governor, seen: list[Observation]) -> None:
    """``chosen`` and ``again``, which are equal, stay within the guard rails whatever they see."""
    rails, at = GuardRails(CONFIGURED, BOUNDS), CONFIGURED
    for tick, each in enumerate(seen):
        each = dataclasses.replace(each, settings=at)
        proposal = chosen.decide(float(tick), each)
        assert proposal == again.decide(float(tick), each)  # no chance, no clock
        assert proposal is not None and proposal.why
        after = rails.limit(float(tick), at, proposal.settings)
        assert_allowed(at, after)
        rails.moved(float(tick), at, after)
        at = after


@settings(max_examples=60)
@given(targets, st.lists(observations, min_size=1, max_size=12))
def test_rules_stay_within_the_rails_whatever_they_see(aims: Targets, seen: list[Observation]) -> None:
    check_rails(rules(aims), rules(aims), seen)


def test_small_changes_are_left_alone() -> None:
    rails = GuardRails(CONFIGURED, BOUNDS)
    at = Settings(60, 2000, 0.1)
    assert rails.limit(0.0, at, Settings(58, 1950, 0.115)) == at
    assert rails.limit(0.0, at, Settings(50, 1500, 0.13)) == Settings(50, 1500, 0.13)


@pytest.mark.parametrize(
    ("after", "share", "rate", "falls_back"),
    [(50.0, 0.3, 0.0, True), (70.0, 0.3, 0.0, False), (50.0, 0.6, 0.0, False), (50.0, 0.3, 0.06, False)],
    ids=["slower", "a little slower", "other work", "the price of fewer preemptions"],
)
def test_harm_brings_the_configured_settings_back(after: float, share: float, rate: float, falls_back: bool) -> None:
    rails, low = GuardRails(CONFIGURED, BOUNDS), Settings(32, 2048, 0.01)
    saw = observation(waiting=5, tokens_per_second=100.0, prefill_share=0.3)
    now = 0.0
    for _ in range(16):
        now += 1.0
        assert not rails.harmed(now, saw)
    rails.moved(now, CONFIGURED, low)
    saw = observation(
        waiting=5, tokens_per_second=after, prefill_share=share, preemption_rate=rate, settings=low, running=8
    )
    found = []
    for _ in range(16):
        now += 1.0
        found.append(rails.harmed(now, saw))
    assert bool(found[-1]) == falls_back and not any(found[:-1])
    assert rails.held(now + 29) == falls_back and not rails.held(now + 31)
    if falls_back:
        assert found[-1].startswith("50 tokens/s after 100 before")


def test_an_idle_engine_is_not_harm() -> None:
    rails = GuardRails(CONFIGURED, BOUNDS)
    for now in range(100):
        speed = 100.0 if now < 50 else 1.0
        assert not rails.harmed(float(now), observation(waiting=0, tokens_per_second=speed))


# --- forecasts and rules ---------------------------------------------------------------------------------------------


def test_rows_and_growth_are_forecast_from_the_observation() -> None:
    assert rows_that_fit(observation()) == 20
    young = observation(context_length=20.0)  # much shorter than they will be
    assert expected_growth(young) > expected_growth(observation()) > expected_growth(observation(running=0))
    # 10 (300 e^(20 / 300 - 1) - 20) + 4.5 * 300 of 8,000
    assert expected_growth(young) == pytest.approx((10 * (300 * math.exp(20 / 300 - 1) - 20) + 1350) / 8000)


def test_rows_and_tokens_in_time_are_the_most_that_keep_it() -> None:
    costs = Costs([1 << 16])  # 1 ms per token, 20 ms at least
    model, seen = costs.model, observation()
    rows = rows_in_time(seen, costs, 0.04, 64)
    assert model.step_seconds(StepFeatures(rows, rows * 250)) <= 0.04
    assert model.step_seconds(StepFeatures(rows + 1, (rows + 1) * 250)) > 0.04
    assert rows_in_time(seen, costs, 1e-6, 64) == 1 and rows_in_time(seen, costs, 1e6, 64) == 64
    assert 10 < tokens_in_time(seen, costs, 0.1, 2048) < tokens_in_time(seen, costs, 0.3, 2048) < 2048


def test_rules_lower_when_requests_are_preempted_and_raise_when_memory_is_idle() -> None:
    def wanted(count: int, **fields: Any) -> int:
        chosen = rules()
        for _ in range(count):
            proposal = chosen.decide(0.0, observation(finished=20, **fields))
        return proposal.settings.running

    assert wanted(1) == 20  # what fits
    assert wanted(5, preempted=2, preemption_rate=0.03) < 20
    assert wanted(5, preempted=2, preemption_rate=0.01) == 20  # as few as that are healthy
    assert wanted(3, preempted=2, preemption_rate=0.06) < wanted(3, preempted=2, preemption_rate=0.03)
    assert wanted(5, waiting=9) > 20
    assert wanted(5, waiting=9, kv_use=0.99) == wanted(5, waiting=9, preemption_rate=0.015) == 20
    assert wanted(5, waiting=0) == 20


def test_rules_keep_the_target_time_per_token() -> None:
    aims, seen = Targets(tpot=0.04), observation(capacity_tokens=10**6, prompt_length=3000.0, answer_length=20.0)
    proposal, free = rules(aims).decide(0.0, seen), rules().decide(0.0, seen)
    assert proposal is not None and free is not None
    assert proposal.settings.running < free.settings.running == 64
    assert proposal.settings.tokens < free.settings.tokens < 2048
    assert "keep the pace" in proposal.why


def test_budget_for_throughput_covers_the_ridge_and_what_must_follow() -> None:
    costs = Costs([1 << 16])  # 20 tokens take as long as the weights
    ridge = tokens_for_throughput(observation(prompt_length=1.0), costs, 256)
    assert 20 <= ridge < 64
    follow = observation(prompt_length=600.0, answer_length=60.0)  # 10 rows: one ends every 6 steps
    assert tokens_for_throughput(follow, costs, 256) == 10 + 125
    assert tokens_for_throughput(follow, costs, 100) == 100


# --- the scheduler's side --------------------------------------------------------------------------------------------


def test_a_lower_limit_preempts_nobody_and_holds_as_requests_leave() -> None:
    driver = Driver()
    driver.add(*(request(f"r{name}", 3, max_tokens=4 + 2 * index) for index, name in enumerate("abcdef")))
    driver.step()
    scheduler = driver.scheduler
    assert len(scheduler.running) == 6
    scheduler.batch.running_limit, scheduler.batch.token_budget = 2, 2
    driver.add(request("rz", 3))
    while "rz" not in scheduler.running:
        assert scheduler.has_unfinished and scheduler.num_preemptions == 0
        before = len(scheduler.running)
        driver.step()
        assert len(scheduler.running) <= max(2, before)
        if "rz" in scheduler.running:
            assert len(scheduler.running) <= 2
    driver.run()
    assert len(driver.finished) == 7


def test_a_lower_budget_shortens_chunks() -> None:
    driver = Driver(max_num_batched_tokens=64)
    driver.scheduler.batch.token_budget = 8
    driver.add(request("ra", 30))
    assert [driver.step().num_tokens for _ in range(4)] == [8, 8, 8, 6]


def run_seeds() -> int:
    """How often settings moved in sixty worlds."""
    return sum(run_world(make_world(seed)).num_limits for seed in range(60))


@pytest.mark.nightly
def test_invariants_hold_in_worlds_whose_settings_move() -> None:
    assert run_seeds() > 100


@pytest.mark.planted
def test_worlds_notice_a_limit_that_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Batch, "free_rows", property(lambda self: len(self.free_slots)))
    with pytest.raises(Violation, match="requests run, but"):
        run_seeds()


# --- in the engine ---------------------------------------------------------------------------------------------------


def served(
    name: str, seed: int = 3, arrivals: str = "poisson:10", count: int = 120, **config: Any
) -> tuple[ServedTrace, EngineCore]:
    flat = {"max_num_seqs": 64, "num_kv_blocks": 300, "governor": name}
    core, limits = simulated_core(deploy("l4", shape_from_name("llama-3-8b")), EngineConfig.from_flat(flat | config))
    trace = draw_trace("chat", parse_arrivals(arrivals), count, seed)
    return serve_trace(core, trace, limits), core


def test_rules_prevent_preemptions_and_leave_a_record(caplog: pytest.LogCaptureFixture) -> None:
    off, without = served("off")
    with caplog.at_level(logging.INFO, logger="chairlift.governor"):
        governed, core = served("rules")
    assert off.preemption_rate > 0.05 > governed.preemption_rate
    assert governed.output_tokens_per_second > 0.85 * off.output_tokens_per_second
    assert without.governor is None and core.governor is not None
    decisions = list(core.governor.decisions)
    assert [str(decision) for decision in decisions] == [entry.getMessage() for entry in caplog.records]
    assert decisions[0].before == Settings(64, 2048, 0.01)
    for one, next_one in itertools.pairwise(decisions):
        assert one.after == next_one.before != next_one.after and one.why
        assert one.seen.settings == one.before and one.now < next_one.now
    stats, last = core.stats(), decisions[-1].after
    assert (stats.running_limit, stats.token_budget, stats.watermark) == dataclasses.astuple(last)
    assert stats.num_governor_decisions == len(decisions) > 0


def check_one_seed_gives_one_run(name: str) -> None:
    (one, first), (other, second) = served(name), served(name)
    assert one == other
    assert first.governor is not None and second.governor is not None
    assert list(first.governor.decisions) == list(second.governor.decisions)


def test_one_seed_gives_one_run() -> None:
    check_one_seed_gives_one_run("rules")


def test_the_record_is_bounded() -> None:
    scheduler = Driver().scheduler
    wants = [Settings(2 + index % 2, 64, 0.01) for index in range(50)]
    chosen: Governor = Scripted(*wants)
    loop = GovernorLoop(chosen, scheduler, BOUNDS, now=0.0, interval=10.0, capacity=5)
    driver_window(loop)
    for tick in range(1, 60):
        driver_window(loop)
        loop.govern(10.0 * tick)
    assert loop.num_decisions > 20 and len(loop.decisions) == 5
    assert not chosen.wants


def driver_window(loop: GovernorLoop) -> None:
    """A step landed, so there is something to decide on."""
    driver = Driver()
    driver.add(request("ra", 3))
    out = driver.scheduler.schedule(0.0)
    loop.window.saw(out, driver.scheduler.update(out, [7], 0.0), 0.05, 0.0)


def test_a_governor_is_told_what_happened_since_it_was_last_asked() -> None:
    driver = Driver(num_blocks=9, max_num_seqs=1)
    window = Window(driver.scheduler, 0.0)

    def run(*requests: Request, now: float) -> Observation:
        driver.add(*requests)
        while driver.scheduler.has_unfinished:
            out = driver.scheduler.schedule(now)
            window.saw(out, driver.scheduler.update(out, [7] * (out.num_decodes + len(out.chunks)), now), 0.5, now)
        return window.close(now, CONFIGURED)

    first = run(request("ra", 5, max_tokens=3), now=4.0)
    assert (first.seconds, first.finished, first.preempted, first.kv_use) == (4.0, 1, 0, 0.25)
    assert (first.ttft, first.tpot, first.step_p50, first.step_p99) == (4.0, 0.5, 0.5, 0.5)
    assert (first.tokens_per_second, first.prefill_share) == (0.75, 5 / 8)
    assert (first.prompt_length, first.answer_length) == ((64 + 5) / 2, (4 * 160 + 3) / 5)  # with what is usual
    assert (run(now=5.0).kv_use, run(now=6.0).tokens_per_second) == (0.0, 0.0)
    for turn in range(40):
        later = run(*(request(f"r{turn}-{name}", 5, max_tokens=3) for name in "0123456789"), now=7.0 + turn)
    assert later.prompt_length == pytest.approx(5, abs=0.5) and later.answer_length == pytest.approx(3, abs=0.5)


def test_a_governor_is_told_of_requests_preempted_and_doubts_the_first_few() -> None:
    driver = Driver(num_blocks=7)
    window = Window(driver.scheduler, 0.0)
    driver.add(*(request(name, 8, max_tokens=10) for name in "ab"))
    while driver.scheduler.has_unfinished:
        out = driver.scheduler.schedule(0.0)
        samples = out.num_decodes + sum(chunk.samples for chunk in out.chunks)
        window.saw(out, driver.scheduler.update(out, [7] * samples, 0.0), 0.5, float(out.step))
    seen = window.close(1.0, CONFIGURED)
    assert (seen.finished, seen.preempted, seen.preemption_rate) == (2, 1, 1 / 22)
    assert seen.ttft == 1.0 and seen.prefill_share > 0.5  # what is computed again is no answer, nor a first token


def test_settings_stay_while_the_engine_has_no_steps() -> None:
    loop = GovernorLoop(Scripted(Settings(2, 64, 0.01)), Driver().scheduler, BOUNDS, now=0.0)
    for now in range(10):
        loop.govern(float(now))
    assert [decision.why for decision in loop.decisions] == ["nothing is known yet"]


def test_the_governor_starts_with_the_rows_that_usually_fit() -> None:
    scheduler = Driver(max_num_seqs=64, max_num_batched_tokens=2048, num_blocks=225, watermark=0.01).scheduler
    loop = GovernorLoop(Scripted(CONFIGURED), scheduler, BOUNDS, now=0.0)
    start = loop.settings
    assert start.running == scheduler.kv.capacity_tokens // 224 < 64
    assert start.tokens == 2048 and start.watermark == 0.4  # little memory: one answer's growth is most of it
    assert (scheduler.batch.running_limit, scheduler.batch.watermark) == (start.running, 0.4)
    driver_window(loop)
    loop.govern(1.0)
    assert loop.settings.running > start.running and loop.settings.watermark < 0.4


@pytest.mark.parametrize(("window", "fit"), [(None, 4), (300, 4), (16, 10)])
def test_a_sliding_window_saves_memory_only_behind_it(window: int | None, fit: int) -> None:
    """A request takes 224 of 896 positions, or the 84 of a window and a step."""
    scheduler = Driver(max_num_seqs=64, num_blocks=225, windows=(window,)).scheduler
    assert GovernorLoop(Scripted(CONFIGURED), scheduler, BOUNDS, now=0.0).settings.running == fit


def check_first_burst(name: str) -> None:
    at_once = {"arrivals": "all", "num_kv_blocks": 100, "count": 32}
    (off, _), (governed, _) = served("off", **at_once), served(name, **at_once)
    assert off.preemption_rate > 0.15 and governed.preemption_rate < 0.04
    assert governed.output_tokens_per_second > 0.65 * off.output_tokens_per_second


def test_a_first_burst_is_not_let_in_to_be_preempted() -> None:
    check_first_burst("rules")


def test_metrics_show_the_settings_of_the_moment() -> None:
    stats = RequestStats()
    stats.step(EngineStats(running_limit=12, token_budget=512, watermark=0.25, num_governor_decisions=3))
    text = render(stats, None, model_name="m", prefix="vllm", up=True, num_waiting=0, now=0.0).decode()
    for name, value in (("running_limit", 12.0), ("token_budget", 512.0), ("admission_watermark", 0.25)):
        assert f'chairlift:{name}{{engine="0",model_name="m"}} {value}' in text
    assert 'chairlift:governor_decisions_total{engine="0",model_name="m"} 3.0' in text


def test_reserved_rows_stay_within_reach() -> None:
    classes = json.dumps({"chat": {"min_seqs": 5}})
    _, core = served("rules", scheduling_policy="priority", service_classes=classes)
    assert core.governor is not None
    assert core.governor.rails.bounds.least.running == 6


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="governor must be off, rules or module:Class; got 'on'"):
        EngineConfig.from_flat({"governor": "on"})
    with pytest.raises(ConfigError, match=r"governor shadow was removed; write rules .* or off"):
        EngineConfig.from_flat({"governor": "shadow"})
    with pytest.raises(ConfigError, match=r"governor_tpot_ms must be a number from 0\.001 to .*, got 0"):
        EngineConfig.from_flat({"governor_tpot_ms": 0})
    EngineConfig.from_flat({"governor_ttft_ms": 500, "governor_tpot_ms": 0.5})


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("nowhere:Governor", "cannot be imported: ModuleNotFoundError"),
        ("chairlift.core.scheduler.governor:Bounds", "cannot be made: TypeError"),
        ("tests.core.scheduler.test_governor:Scripted", "has no decide"),
    ],
)
def test_a_custom_governor_that_cannot_be_used_is_refused(
    monkeypatch: pytest.MonkeyPatch, path: str, problem: str
) -> None:
    monkeypatch.delattr(Scripted, "decide")
    with pytest.raises(ConfigError, match=rf"governor '{path}' {problem}"):
        served(path)
