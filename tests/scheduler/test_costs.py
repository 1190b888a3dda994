from __future__ import annotations

import random

import pytest

from chairlift.request import Service
from chairlift.scheduler.cost_model import StepFeatures
from chairlift.scheduler.costs import Costs
from tests.scheduler.driver import Driver, request


def decode(seconds: float) -> tuple[StepFeatures, float, int]:
    return StepFeatures(8, 800), seconds, 0


def prompt(num_tokens: int, seconds: float) -> tuple[StepFeatures, float, int]:
    return StepFeatures(0, 0, num_tokens, num_tokens * (num_tokens + 1) / 2), seconds, 0


def test_a_token_takes_what_steps_took_lately() -> None:
    costs = Costs([64])
    costs.observe(*decode(0.5))
    assert costs.outlook(request("a", 4), 8, 0).per_token == 0.5
    costs.observe(*decode(0.01))
    assert costs.outlook(request("a", 4), 8, 0).per_token == pytest.approx(0.9 * 0.5 + 0.1 * 0.01)
    for _ in range(2000):
        costs.observe(*decode(0.01))
    assert costs.outlook(request("a", 4), 8, 0).per_token == pytest.approx(0.01)


def test_what_is_expected_has_the_hosts_time_between_steps_and_what_is_certain_has_not() -> None:
    costs, waiting = Costs([64], max_step_tokens=64), request("a", 64)
    for step in ((StepFeatures(1, 64), 0.01, 0), prompt(64, 0.02)):
        costs.observe(*step)
    before = costs.outlook(waiting, 8, 0)
    for features, _, _ in (decode(0.0), prompt(64, 0.0)) * 200:
        costs.passed(features, 1.5 * costs.model.step_seconds(features))
    after = costs.outlook(waiting, 8, 0)
    assert (after.to_first, after.per_token) == pytest.approx((1.5 * before.to_first, 1.5 * before.per_token))
    assert after.to_first_at_least == before.to_first_at_least > 0
    assert after.per_token_alone == before.per_token_alone > 0


def test_steps_before_anything_was_learnt_say_nothing_of_the_hosts_time() -> None:
    """A long first prompt: chunks that sample nothing teach the model nothing, and its first guesses may be far off."""
    costs = Costs([64])
    for _ in range(20):
        costs.passed(prompt(64, 0.0)[0], 0.001)
    assert costs.pace == 1.0
    features, seconds, _ = decode(0.01)
    for _ in range(20):
        costs.observe(features, seconds, 0)
        costs.passed(features, 1.5 * costs.model.step_seconds(features))
    assert costs.pace == pytest.approx(1.5)


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
    costs.model.num_observed = 1
    for features, _, _ in (decode(0.0), prompt(64, 0.0)) * 200:
        costs.passed(features, 1.5 * costs.model.step_seconds(features))
    assert (alone, chunk()) == (pytest.approx(2000, rel=0.01), pytest.approx(1372, rel=0.01))


def test_a_prompt_takes_at_least_what_the_shortest_step_of_fewer_tokens_took() -> None:
    """Sizes are seen by their number of bits: 20 tokens say nothing of 16."""
    costs = Costs([64], max_step_tokens=64)

    def least(num_tokens: int, num_shared: int = 0) -> float:
        return costs.outlook(request("a", num_tokens), 8, num_shared).to_first_at_least

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
    assert costs.outlook(request("a", 32), 8, 0).to_first_at_least == 0


def test_a_copy_takes_what_steps_with_copies_took_longer() -> None:
    costs = Costs([1 << 20])
    features, _, _ = decode(0.0)
    for _ in range(500):
        costs.observe(features, costs.model.step_seconds(features) + 0.25, 10)
    assert costs.swap_seconds(10) == pytest.approx(2 * 0.25, rel=0.1)


def test_few_copies_beside_a_step_are_not_blamed_for_how_much_steps_differ() -> None:
    """With kept prefixes nearly every step copies a block or two, which takes a hundredth of the step."""
    costs, rng = Costs([1 << 20]), random.Random(1)
    for _ in range(1000):
        features, seconds, _ = decode(0.03 * rng.uniform(0.9, 1.1))
        costs.observe(features, seconds, 1)
    assert costs.swap_seconds(100) == pytest.approx(2 * 100 * (1 << 20) / 5e9, rel=0.1), "as was thought before"


def test_steps_are_learnt_also_where_each_copies_something() -> None:
    costs = Costs([1 << 10])
    for _ in range(1000):
        features, seconds, _ = prompt(256, 0.7)
        costs.observe(features, seconds, 16)
    assert costs.recompute_seconds(256) == pytest.approx(0.7, rel=0.05)
