"""The forecast is the scheduler itself, run ahead: where it knows everything, it is right to the last digit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from chairlift.base.sampling_params import SamplingParams
from chairlift.config import CacheGroup, EngineConfig
from chairlift.core.scheduler.answer_lengths import AnswerLengths
from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.core.scheduler.forecast import Forecast, foresee
from chairlift.engine.clock import VirtualClock
from chairlift.engine.core import EngineCore
from chairlift.engine.input_processor import InputProcessor, ModelLimits
from chairlift_lab.replay.machines import Deployment, deploy, shape_from_name
from chairlift_lab.replay.replay import SimExecutor, simulated_core


def last(items: Iterator[Forecast | None]) -> Forecast:
    made = [item for item in items if item is not None]
    assert len(made) == 1
    return made[0]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(12))
def test_forecast_starts_are_exact_for_known_lengths_without_arrivals(policy: str, seed: int, depth: int) -> None:
    rng = random.Random(seed)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "scheduling_policy": policy, "ageing_seconds": 0.5}
    if depth:  # where what was swapped comes back later than the copy, which swaps nothing, has it
        settings |= {"num_lookahead_steps": depth, "preemption_mode": "recompute"}
    check_exact(simulated_core(*deployed(settings | {"num_kv_blocks": 200})), rng, depth, longest=150)


@pytest.mark.parametrize("preemption", ["none", "recompute"])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("seed", range(12))
def test_starts_are_exact_where_memory_is_short(preemption: str, window: int | None, seed: int) -> None:
    """And where a sliding window has given blocks back, or nobody may be made to give way."""
    rng = random.Random(seed)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "preemption_mode": preemption}
    deployment, config = deployed(settings)
    clock, group = VirtualClock(), CacheGroup(28, window)
    executor = SimExecutor(deployment.cost, clock, group=group, block_size=16, bytes_per_token=1)
    core = EngineCore(executor, config.scheduler, max_model_len=420, cache=config.cache, clock=clock)
    check_exact((core, ModelLimits(1000, 420, ())), rng, 0, longest=380)


@pytest.mark.parametrize("batching", ["static", "dynamic"])
@pytest.mark.parametrize("num_kv_blocks", [36, 200])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_starts_are_exact_behind_a_batch(batching: str, num_kv_blocks: int, depth: int, seed: int) -> None:
    """And where some of it have ended, and are held."""
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "batching": batching, "num_kv_blocks": num_kv_blocks}
    made = simulated_core(*deployed(settings | {"num_lookahead_steps": depth}))
    check_exact(made, random.Random(seed), depth, longest=100)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_start_behind_answers_with_slow_masks_waits_for_one_mask_after_the_other(depth: int) -> None:
    core, limits = simulated_core(*deployed({"max_num_seqs": 2, "num_kv_blocks": 200, "num_lookahead_steps": depth}))
    door = InputProcessor(limits, None, core.kv, seed=0)
    for name in "abc":
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        core.add(door.prepare(name, [ord(name)] * 8, params, core.clock.now()))
    while len(core.scheduler.running) < 2 or core.num_in_flight:
        core.step()
        core.land()
    lengths, now = AnswerLengths(), core.clock.now()

    def start() -> float:
        made = foresee(core.scheduler, core.costs.wall_seconds, lengths, now, {"default": 0}, depth=depth)
        return last(made).starts["c"] - now

    quick, left = start(), 20 - core.scheduler.running["a"].num_output_tokens
    for request in core.scheduler.running.values():
        request.mask_seconds = 0.5
    slow = start()
    assert 2 * 0.5 * (left - 2) <= slow - quick <= 2 * 0.5 * left
    core.scheduler.check_invariants()


def test_prompts_that_are_cached_are_not_expected_to_be_computed() -> None:
    """One long prompt has run. Then many requests wait that continue it."""
    settings = {"max_num_seqs": 2, "num_kv_blocks": 400, "max_num_batched_tokens": 256, "enable_prefix_caching": True}
    core, limits = simulated_core(*deployed(settings))
    door = InputProcessor(limits, None, core.kv, seed=0)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    common = [7] * 1500
    core.add(door.prepare("first", common, params, core.clock.now()))
    while core.has_work:
        core.step()
    for index in range(20):
        core.add(door.prepare(str(index), [*common, index], params, core.clock.now()))
    now = core.clock.now()
    made = last(foresee(core.scheduler, core.costs.wall_seconds, AnswerLengths(), now, {}, max_steps=5000))
    started: dict[str, float] = {}
    while core.has_work:
        outputs = core.step()
        for name, _, when in outputs.joined if outputs is not None else ():
            started.setdefault(name, when)
    assert made.starts["19"] - now == pytest.approx(started["19"] - now, rel=0.25)


def deployed(settings: dict[str, Any]) -> tuple[Deployment, EngineConfig]:
    config = EngineConfig.from_flat({"enable_prefix_caching": False, **settings})
    return deploy("ryzen-9950x", shape_from_name("qwen2.5-0.5b")), config


def check_exact(made: tuple[EngineCore, ModelLimits], rng: random.Random, depth: int, *, longest: int) -> None:
    core, limits = made
    policy = core.config.scheduling_policy
    door = InputProcessor(limits, None, core.kv, seed=0)
    for index in range(24):
        asked = {"priority": rng.choice([0, 0, -5, 5])} if policy == "priority" else {}
        params = SamplingParams(max_tokens=rng.randint(2, 30), ignore_eos=True, **asked)
        prompt = [index + 10] * rng.randint(1, longest)
        core.add(door.prepare(str(index), prompt, params, core.clock.now(), tenant=rng.choice(["a", "b"])))
    for _ in range(rng.randint(0, 40)):
        core.step()
    # The engine learns what steps cost while it runs; what was foreseen was foreseen with what was known.
    core.costs.observe = lambda *args: None  # type: ignore[method-assign]
    core.executor._cost = core.costs.model  # type: ignore[attr-defined]
    for _ in range(depth):  # so that those in flight have begun with that
        core.step()
    here = core.scheduler.running.values()
    # A batch that has ended leaves steps behind that nobody wants, and the copy does not have.
    while depth and not any(request.admitted_at_step <= min(core.scheduler._flights) for request in here):
        core.step()
    forecast = last(
        foresee(
            core.scheduler,
            core.costs.model.step_seconds,
            AnswerLengths(),
            core.clock.now(),
            {},
            depth=depth,
            max_steps=5000,
        )
    )
    waiting = {request.request_id for request in core.scheduler.waiting if not request.num_preemptions}
    assert waiting and waiting <= forecast.starts.keys()
    started: dict[str, float] = {}
    while core.has_work:
        outputs = core.step()
        for name, _, when in outputs.joined if outputs is not None else ():
            started.setdefault(name, when)  # again where it gave way
    assert {name: started[name] for name in waiting} == pytest.approx({name: forecast.starts[name] for name in waiting})


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    "settings", [{}, {"scheduling_policy": "priority"}, {"batching": "static"}, {"batching": "dynamic"}], ids=str
)
def test_a_forecast_can_be_made_between_any_two_steps(depth: int, settings: dict[str, str]) -> None:
    """Also where steps are in flight, whose tokens the copy does not know."""
    rng = random.Random(depth)
    config = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_kv_blocks": 60, "num_lookahead_steps": depth}
    core, limits = simulated_core(
        deploy("ryzen-9950x", shape_from_name("qwen2.5-0.5b")), EngineConfig.from_flat(config | settings)
    )
    door = InputProcessor(limits, None, core.kv, seed=0)
    for index in range(40):
        params = SamplingParams(max_tokens=rng.randint(1, 7), ignore_eos=True)
        core.add(door.prepare(str(index), [index + 10] * rng.choice([3, 40, 90]), params, 0.0))
    in_flight = 0
    while core.has_work:
        core.step()
        in_flight += core.num_in_flight > 0
        waiting = {request.request_id for request in core.scheduler.waiting if not request.num_preemptions}
        now = core.clock.now()
        forecast = last(
            foresee(core.scheduler, core.costs.model.step_seconds, AnswerLengths(), now, {"default": 0}, depth=depth)
        )
        assert waiting <= forecast.starts.keys()
    assert bool(in_flight) == bool(depth)


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_beyond_the_horizon_start_in_order_by_extrapolation(depth: int) -> None:
    config = EngineConfig.from_flat(
        {"max_num_seqs": 2, "max_num_batched_tokens": 64, "num_kv_blocks": 200, "num_lookahead_steps": depth}
    )
    core, limits = simulated_core(deploy("ryzen-9950x", shape_from_name("qwen2.5-0.5b")), config)
    door = InputProcessor(limits, None, core.kv, seed=0)
    for index in range(40):
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        core.add(door.prepare(str(index), [index + 10] * 20, params, 0.0))
    core.step()
    known = core.scheduler, core.costs.model.step_seconds, AnswerLengths(), 0.0, {"default": 0}
    near = last(foresee(*known, depth=depth, max_steps=66))
    far = last(foresee(*known, depth=depth, max_steps=9999))
    assert list(near.starts) == list(far.starts) == [str(index) for index in range(2, 40)]
    assert near.starts["39"] == pytest.approx(far.starts["39"], rel=0.3)
    assert near.newcomers["default"] >= near.starts["39"]
    assert far.wait_of("default", 0.0, 3) == pytest.approx(far.newcomers["default"] + 3 * far.seconds_per_start)


@pytest.mark.parametrize("depth", [0, 1])
def test_making_a_forecast_changes_no_step(depth: int) -> None:
    def digest(look: bool) -> list[tuple[int, ...]]:
        settings = {"max_num_seqs": 3, "max_num_batched_tokens": 32, "scheduling_policy": "priority"}
        config = EngineConfig.from_flat({**settings, "num_kv_blocks": 30, "num_lookahead_steps": depth})
        core, limits = simulated_core(deploy("ryzen-9950x", shape_from_name("qwen2.5-0.5b")), config)
        door = InputProcessor(limits, None, core.kv, seed=0)
        rng = random.Random(3)
        for index in range(12):
            params = SamplingParams(max_tokens=20, ignore_eos=True, priority=rng.choice([0, 1]))
            core.add(door.prepare(str(index), [index + 10] * 20, params, 0.0, tenant=rng.choice("ab")))
        seen = []
        while core.has_work:
            core.step()
            if look:
                now = core.clock.now()
                last(
                    foresee(
                        core.scheduler, core.costs.model.step_seconds, AnswerLengths(), now, {"default": 0}, depth=depth
                    )
                )
        for record in core.step_log:
            seen.append((record.step, record.num_tokens, record.num_waiting, len(record.preempted)))
        return seen

    assert digest(False) == digest(True)


def test_a_newcomer_waits_behind_the_requests_of_its_tenant() -> None:
    """One tenant has all rows: another of it waits, somebody else does not."""
    config = EngineConfig.from_flat({"max_num_seqs": 4, "scheduling_policy": "priority", "num_kv_blocks": 900})
    core, limits = simulated_core(deploy("ryzen-9950x", shape_from_name("qwen2.5-0.5b")), config)
    door = InputProcessor(limits, None, core.kv, seed=0)
    for index in range(4):
        params = SamplingParams(max_tokens=800, ignore_eos=True)
        core.add(door.prepare(str(index), [index + 10] * 20, params, 0.0, tenant="a"))
    for _ in range(500):
        core.step()
    now = core.clock.now()
    ahead = last(
        foresee(core.scheduler, core.costs.model.step_seconds, AnswerLengths(), now, {"default": 0}, max_steps=999)
    )
    assert (ahead.tenant, ahead.wait_of("default", now, stranger=True)) == ("a", pytest.approx(0.0, abs=0.1))
    core.add(door.prepare("new", [9] * 20, SamplingParams(max_tokens=2, ignore_eos=True), now, tenant="a"))
    started: dict[str, float] = {}
    while "new" not in started:
        outputs = core.step()
        started |= {name: when for name, _, when in (outputs.joined if outputs is not None else ())}
    assert ahead.wait_of("default", now) == pytest.approx(started["new"] - now, rel=0.1)
    assert started["new"] - now > 1.0


@pytest.mark.parametrize("seed", range(6))
def test_a_hypothetical_request_takes_no_row_from_another(seed: int) -> None:
    """A newcomer of a better class would displace somebody, and then another tenant would have the row."""
    rng = random.Random(seed)
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "scheduling_policy": "priority", "num_kv_blocks": 400}
    config = EngineConfig.from_flat(settings | {"enable_prefix_caching": False})
    core, limits = simulated_core(deploy("ryzen-9950x", shape_from_name("qwen2.5-0.5b")), config)
    door = InputProcessor(limits, None, core.kv, seed=0)
    for index in range(16):
        params = SamplingParams(max_tokens=rng.randint(50, 100), ignore_eos=True)
        prompt = [index + 10] * rng.randint(1, 60)
        core.add(door.prepare(str(index), prompt, params, core.clock.now(), tenant=rng.choice("abc")))
    for _ in range(20):
        core.step()
    known = core.scheduler, core.costs.model.step_seconds, AnswerLengths(), core.clock.now()
    alone = last(foresee(*known, {}, max_steps=5000))
    asked = last(foresee(*known, {"priority": -10, "default": 0, "flex": 10}, max_steps=5000))
    assert set(asked.starts) == set(alone.starts)
    step = core.costs.model.step_seconds(StepFeatures(4, 400))
    assert min(asked.starts.values()) > min(alone.starts.values()) - step  # not before a row becomes free
    now = core.clock.now()
    assert asked.wait_of("priority", now) < 2 * step < asked.wait_of("default", now) < asked.wait_of("flex", now)
