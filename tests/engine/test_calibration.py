"""The figures about forecasts are those of the latest forecasts that came true or failed."""

from __future__ import annotations

import random
from typing import cast

import pytest

from chairlift.base.sampling_params import SamplingParams
from chairlift.config import EngineConfig
from chairlift.core.scheduler.policy import FirstComeFirstServed
from chairlift.engine.calibration import SHORTEST_WAIT, Calibration
from chairlift.engine.clock import VirtualClock
from chairlift.engine.forecaster import Forecaster
from chairlift.engine.input_processor import InputProcessor
from chairlift.engine.intake import Intake
from chairlift.metrics.stats import FORECAST_RATIOS, LATENCY_BUCKETS, Histogram
from chairlift_lab.replay.machines import deploy, shape_from_name
from chairlift_lab.replay.replay import simulated_core
from tests.tiers import one_in


def test_figures_are_those_of_the_newest_waits() -> None:
    calibration, rng = Calibration(capacity=100), random.Random(1)
    waits = [(rng.uniform(0.1, 20), rng.uniform(0.05, 30)) for _ in range(350)]
    for predicted, actual in waits:
        calibration.add(predicted, actual)
    newest = waits[-100:]
    ratios = sorted(actual / predicted for predicted, actual in newest)
    assert len(calibration) == 100
    assert [calibration.quantile(share) for share in (0.0, 0.1, 0.5, 0.9, 1.0)] == [
        ratios[index] for index in (0, 10, 50, 90, 99)
    ]
    for ratio in FORECAST_RATIOS:
        assert calibration.within(ratio) == sum(each <= ratio for each in ratios) / 100
    assert calibration.mean_error() == pytest.approx(sum(abs(a - p) for p, a in newest) / 100)


def test_too_few_waits_say_nothing() -> None:
    calibration = Calibration()
    for _ in range(19):
        calibration.add(1.0, 1.0)
    assert [calibration.quantile(0.5), calibration.within(1.0), calibration.mean_error()] == [None] * 3
    calibration.add(1.0, 1.0)
    assert [calibration.quantile(0.5), calibration.within(1.0), calibration.mean_error()] == [1.0, 1.0, 0.0]
    calibration.clear()
    assert (len(calibration), calibration.quantile(0.5)) == (0, None)


def test_forecasts_of_very_short_waits_are_not_judged() -> None:
    errors = Histogram(LATENCY_BUCKETS)
    calibration = Calibration(errors)
    calibration.add(0.0, 5.0)
    calibration.add(SHORTEST_WAIT / 2, 5.0)
    assert len(calibration) == sum(errors.counts) == 0
    calibration.add(SHORTEST_WAIT, 2.0)
    assert (len(calibration), sum(errors.counts), errors.total) == (1, 1, pytest.approx(1.95))


@pytest.mark.full
@pytest.mark.parametrize("host", [0.0, 0.04])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_on_a_steady_stream_forecasts_are_right(policy: str, depth: int, host: float) -> None:
    """The engine on a virtual clock, prompts of all lengths, and always so many in the queue. Between steps the host
    takes a while, and every 20th time five times as long."""
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_kv_blocks": 500, "scheduling_policy": policy}
    config = EngineConfig.from_flat({**settings, "num_lookahead_steps": depth})
    core, limits = simulated_core(deploy("ryzen-9950x", shape_from_name("qwen2.5-0.5b")), config)
    door, rng = InputProcessor(limits, None, core.kv, seed=0), random.Random(2)
    intake = Intake(1000, 10**6, limits.service_classes)
    priorities = {name: each.priority for name, each in (limits.service_classes or {}).items()} or {"default": 0}
    forecaster = Forecaster(core.scheduler, core.costs, core.answer_lengths, priorities, depth)
    for index in range(400):
        while core.scheduler.has_unfinished and len(intake) >= 24:
            outputs = core.step()
            cast(VirtualClock, core.clock).advance(host * (5 if core.scheduler.step % 20 == 0 else 1))
            for name, _, when in outputs.joined if outputs is not None else ():
                intake.leave(name, when, started=True)
            if (made := forecaster.advance(core.clock.now())) is not None:
                intake.foreseen(made)
        now = core.clock.now()
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        core.add(door.prepare(str(index), [index + 10] * rng.randint(5, 60), params, now))
        intake.enter(str(index), 1, now=now, predicted=intake.expected_wait("default", now))
    calibration = intake.calibration
    assert len(calibration) > 200
    median, nine_of_ten = calibration.quantile(0.5), calibration.quantile(0.1)
    assert median == pytest.approx(1.0, abs=0.1)
    assert nine_of_ten is not None and nine_of_ten > 0.7
    assert (calibration.within(1.25) or 0.0) > 0.9


@pytest.mark.full
@pytest.mark.parametrize("depth", one_in(2, [1, 0]))
def test_with_classes_and_more_work_than_fits_forecasts_are_right(depth: int) -> None:
    """Requests come at random, a quarter of them urgent, twice as many as can be served. Answers have very different
    lengths, which only their requests tell."""
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "num_kv_blocks": 500, "scheduling_policy": "priority"}
    settings["num_lookahead_steps"] = depth
    machine = deploy("ryzen-9950x", shape_from_name("qwen2.5-0.5b"))
    core, limits = simulated_core(machine, EngineConfig.from_flat(settings))
    door, rng = InputProcessor(limits, None, core.kv, seed=0), random.Random(1)
    intake = Intake(10**6, 10**9, limits.service_classes)
    priorities = {name: each.priority for name, each in (limits.service_classes or {}).items()}
    forecaster = Forecaster(core.scheduler, core.costs, core.answer_lengths, priorities, depth)
    arrival = 0.0
    for index in range(1800):  # at the end rates are those of the last half minute
        arrival += rng.expovariate(17)
        while core.has_work and core.clock.now() < arrival:
            outputs = core.step()
            for name, _, when in outputs.joined if outputs is not None else ():
                intake.leave(name, when, started=True)
            if (made := forecaster.advance(core.clock.now())) is not None:
                intake.foreseen(made)
        tier, now = rng.choice(["priority", "default", "default", "default"]), max(arrival, core.clock.now())
        params = SamplingParams(max_tokens=rng.choice([5, 10, 20, 30, 80]), ignore_eos=True, service_tier=tier)
        core.add(door.prepare(str(index), [index + 10] * rng.randint(5, 60), params, now))
        intake.enter(str(index), 1, tier, now, intake.expected_wait(tier, now))
    assert len(intake.calibration) >= 100  # the urgent start too soon to be judged
    median = intake.calibration.quantile(0.5)
    assert median is not None and 0.75 < median < 1.4


class Stumbling(FirstComeFirstServed):
    """Cannot be copied the first time."""

    name = "stumbling"
    num_forks = 0

    def fork(self) -> FirstComeFirstServed:
        Stumbling.num_forks += 1
        if Stumbling.num_forks == 1:
            raise RuntimeError("not now")
        return FirstComeFirstServed()


def test_a_forecast_that_failed_is_tried_again_in_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"max_num_seqs": 1, "num_kv_blocks": 50, "scheduling_policy": f"{__name__}:Stumbling"}
    core, limits = simulated_core(
        deploy("ryzen-9950x", shape_from_name("qwen2.5-0.5b")), EngineConfig.from_flat(settings)
    )
    door = InputProcessor(limits, None, core.kv, seed=0)
    for name in "ab":
        core.add(door.prepare(name, [5, 6], SamplingParams(max_tokens=3), 0.0))
    core.step()
    forecaster = Forecaster(core.scheduler, core.costs, core.answer_lengths, {"default": 0})
    assert [forecaster.advance(now) for now in (0.0, 1.0, 59.0)] == [None] * 3
    assert Stumbling.num_forks == 1 and "could not be forecast, with policy 'stumbling'" in caplog.text
    made = forecaster.advance(60.0)
    assert made is not None and made.starts.keys() == {"b"}
