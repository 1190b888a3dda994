from __future__ import annotations

import random

import pytest

from chairlift.base.sampling_params import SamplingParams
from chairlift.config import EngineConfig
from chairlift.core.request import Request, Service
from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.core.scheduler.costs import Costs
from chairlift.engine.input_processor import InputProcessor
from chairlift_lab.replay.machines import deploy, shape_from_name
from chairlift_lab.replay.replay import simulated_core
from tests.core.scheduler.driver import Driver, request


def decode(seconds: float) -> tuple[StepFeatures, float, int]:
    return StepFeatures(8, 800), seconds, 0


def prompt(num_tokens: int, seconds: float) -> tuple[StepFeatures, float, int]:
    return StepFeatures(0, 0, num_tokens, num_tokens * (num_tokens + 1) / 2), seconds, 0


def test_a_token_takes_what_steps_took_lately() -> None:
    costs = Costs([64])
    costs.observe(*decode(0.5))
    assert costs.estimate(request("a", 4), 8, 0).per_token == 0.5
    costs.observe(*decode(0.01))
    assert costs.estimate(request("a", 4), 8, 0).per_token == pytest.approx(0.9 * 0.5 + 0.1 * 0.01)
    for _ in range(2000):
        costs.observe(*decode(0.01))
    assert costs.estimate(request("a", 4), 8, 0).per_token == pytest.approx(0.01)


def test_expected_times_include_host_time_and_lower_bounds_do_not() -> None:
    costs, waiting = Costs([64], max_step_tokens=64), request("a", 64)
    for step in ((StepFeatures(1, 64), 0.01, 0), prompt(64, 0.02)):
        costs.observe(*step)
    before = costs.estimate(waiting, 8, 0)
    for features, seconds, _ in (decode(0.01), prompt(64, 0.02)) * 400:
        costs.passed(features, seconds, seconds + 0.005)
    costs.passed(decode(0.0)[0], 60.0, 60.005)  # a machine that stood still is no reason to forget it
    after = costs.estimate(waiting, 8, 0)
    told = (after.to_first - before.to_first, after.per_token - before.per_token)
    assert told == pytest.approx((0.005, 0.005), rel=0.01)
    long = request("b", 200), 8, 0
    assert costs.estimate(*long).to_first - costs.model.prefill_seconds(200, 0) == pytest.approx(4 * 0.005, rel=0.01)
    assert after.to_first_at_least == before.to_first_at_least > 0
    assert after.per_token_alone == before.per_token_alone > 0


def test_a_slow_mask_counts_for_each_token() -> None:
    costs = Costs([1])
    for _ in range(50):
        costs.observe(StepFeatures(4, 400), 0.01, 0.0)
    asked = Request("a", [1] * 10, max_tokens=50)
    plain = costs.estimate(asked, 50, 0)
    asked.mask_seconds = 0.05
    slow = costs.estimate(asked, 50, 0)
    assert slow.per_token - plain.per_token == pytest.approx(0.05)
    assert slow.to_first - plain.to_first == pytest.approx(0.05)
    assert slow.to_first_at_least == plain.to_first_at_least and slow.per_token_alone == plain.per_token_alone
    asked.mask_seconds = 0.004  # shorter than a step, which computes meanwhile
    assert costs.estimate(asked, 50, 0) == plain


def test_a_wait_counts_the_hosts_time_from_when_steps_are_known() -> None:
    """A long first prompt: chunks that sample nothing teach the model nothing, and its first guesses may be far off."""
    costs, (features, seconds, _) = Costs([64]), decode(0.01)
    for _ in range(20):
        costs.passed(prompt(64, 0.0)[0], 0.001, 0.001)
    assert costs.wall_seconds(features) == costs.model.step_seconds(features)
    for _ in range(20):
        costs.observe(features, seconds, 0)
        costs.passed(features, 0.01, 1.5 * 0.01)
    assert costs.wall_seconds(features) == pytest.approx(0.015, rel=0.01)


def test_an_error_of_the_cost_model_is_not_taken_for_host_time() -> None:
    costs, (features, _, _) = Costs([64]), decode(0.0)
    for _ in range(20):
        costs.observe(features, 0.01, 0)
    for _ in range(200):
        costs.passed(features, 0.04, 0.04)
    assert costs.host_seconds == 0 and costs.wall_seconds(features) > 0.03
    assert costs.estimate(request("a", 4), 8, 0).per_token == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("depth", "host", "took"), [(0, 0.0, 0.0154), (0, 0.03, 0.0454), (1, 0.004, 0.0154), (1, 0.03, 0.03)]
)
def test_an_engine_tells_the_hosts_time_from_its_steps(depth: int, host: float, took: float) -> None:
    """One step ahead, what the host does is hidden by the step that runs meanwhile, as far as that is long enough."""
    settings = {"max_num_seqs": 8, "num_kv_blocks": 400, "num_lookahead_steps": depth}
    machine = deploy("ryzen-9950x", shape_from_name("qwen2.5-0.5b"))
    core, limits = simulated_core(machine, EngineConfig.from_flat(settings))
    door = InputProcessor(limits, None, core.kv, seed=0)
    core.add(door.prepare("a", [9] * 20, SamplingParams(max_tokens=1500, ignore_eos=True), 0.0))
    for _ in range(600):
        core.step()
        core.clock.wait_until(core.clock.now() + host)
    assert core.costs.estimate(request("b", 4), 8, 0).per_token == pytest.approx(took, rel=0.01)
    told = core.costs.host_seconds
    for _ in range(20):  # nor is it the host's that nobody asks, however the last one ended
        core.abort("a")
        core.clock.wait_until(core.clock.now() + 60.0)
        core.add(door.prepare("a", [9] * 20, SamplingParams(max_tokens=90, ignore_eos=True), core.clock.now()))
        for _ in range(3):
            core.step()
    assert core.costs.host_seconds <= told


def test_chunks_beside_an_answer_with_a_rate_leave_room_for_the_hosts_time() -> None:
    costs = Costs([64])
    rate = costs.model.step_seconds(StepFeatures(1, 5, 2000, 2000 * 2001 / 2))

    def chunk() -> int:
        driver = Driver(costs=costs, max_num_batched_tokens=4096, max_model_len=8192, num_blocks=4096)
        driver.add(request("a", 4, max_tokens=64, service=Service(seconds_per_token=rate)))
        driver.step()
        driver.add(request("b", 4000))
        return sum(chunk.num_tokens for chunk in driver.step().chunks)

    alone = chunk()
    for features, seconds, _ in (decode(0.9), prompt(64, 0.9)) * 200:
        costs.passed(features, seconds, seconds + rate / 3)
    assert (alone, chunk()) == (pytest.approx(2000, rel=0.01), pytest.approx(1372, rel=0.01))


def test_a_prompt_takes_at_least_what_the_shortest_step_of_fewer_tokens_took() -> None:
    """Sizes are seen by their number of bits: 20 tokens say nothing of 16."""
    costs = Costs([64], max_step_tokens=64)

    def least(num_tokens: int, num_shared: int = 0) -> float:
        return costs.estimate(request("a", num_tokens), 8, num_shared).to_first_at_least

    costs.observe(*prompt(1, 0.125))
    assert [least(1), least(2), least(40)] == [0, 0.125, 0.125]
    costs.observe(*prompt(16, 0.25))
    costs.observe(*prompt(20, 0.1875))
    costs.observe(*prompt(20, 0.5))
    assert [least(16), least(32), least(64)] == [0.125, 0.1875, 0.1875]
    assert [least(64 + 16), least(2 * 64 + 32), least(64 + 16, 64)] == [0.1875 + 0.125, 3 * 0.1875, 0.125]


def test_copies_are_no_proof_of_how_short_a_step_can_be() -> None:
    costs = Costs([64])
    features, seconds, _ = prompt(16, 0.001)
    costs.observe(features, seconds, 3)
    assert costs.estimate(request("a", 32), 8, 0).to_first_at_least == 0


def test_a_copy_takes_what_steps_with_copies_took_longer() -> None:
    costs = Costs([1 << 20])
    features, _, _ = decode(0.0)
    for _ in range(500):
        costs.observe(features, costs.model.step_seconds(features) + 0.25, 10)
    assert costs.swap_seconds([10]) == pytest.approx(2 * 0.25, rel=0.1)


def test_few_copies_beside_a_step_are_not_blamed_for_how_much_steps_differ() -> None:
    """With kept prefixes nearly every step copies a block or two, which takes a hundredth of the step."""
    costs, rng = Costs([1 << 20]), random.Random(1)
    for _ in range(1000):
        features, seconds, _ = decode(0.03 * rng.uniform(0.9, 1.1))
        costs.observe(features, seconds, 1)
    assert costs.swap_seconds([100]) == pytest.approx(2 * 100 * (1 << 20) / 5e9, rel=0.1), "as was thought before"


def test_steps_are_learnt_also_where_each_copies_something() -> None:
    costs = Costs([1 << 10])
    for _ in range(1000):
        features, seconds, _ = prompt(256, 0.7)
        costs.observe(features, seconds, 16)
    assert costs.recompute_seconds(256) == pytest.approx(0.7, rel=0.05)
