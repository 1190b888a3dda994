"""How a step's prompt budget is divided between the first in line and the smallest."""

from __future__ import annotations

import pytest

from chairlift.base.service_class import ServiceClass
from chairlift.core.request import Service
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.core.scheduler.precedence import Precedence
from chairlift.core.scheduler.prefill_mode import prefill_mode_from_name
from chairlift.core.scheduler.prompt_share import PromptShare
from chairlift.errors import ConfigError
from tests.core.scheduler.driver import BLOCK, Driver, request

MODES = ("mixed", "prefill_first", "decode_first", "separate", "auto")


def given(out: SchedulerOutput) -> dict[str, int]:
    """Prompt tokens of each request in a step."""
    return {name: chunk.num_tokens for name, chunk in zip(out.chunk_ids, out.chunks, strict=True)}


def busy(**settings: object) -> Driver:
    """Six prompts of 200 tokens, then one of 8; 64 tokens a step."""
    driver = Driver(num_blocks=600, max_model_len=256, max_num_batched_tokens=64, **settings)
    driver.add(*[request(f"long {number}", 200) for number in range(6)], request("short", 8))
    return driver


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_short_prompt_behind_long_ones_is_served_in_its_first_step(mode: str, policy: str) -> None:
    settings: dict[str, object] = {"prefill_mode": prefill_mode_from_name(mode)}
    if policy == "priority":
        settings["policy"] = Precedence({}, max_running=8)
    driver = busy(**settings)
    assert given(driver.step()) == {"long 0": 56, "short": 8}
    assert driver.results[0].sampled[-1].request_id == "short"  # type: ignore[union-attr]


def test_a_share_of_one_gives_all_tokens_in_policy_order() -> None:
    driver = busy(policy_share=1.0)
    assert given(driver.step()) == {"long 0": 64}


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_closed_batches_compute_prompts_in_order(batching: str) -> None:
    assert given(busy(batching=batching).step()) == {"long 0": 64}


def test_fractions_of_a_token_are_carried_over() -> None:
    share = PromptShare(0.75)
    assert [share.split(1, 0) for _ in range(8)] == [1, 0, 1, 1, 1, 0, 1, 1]
    for budget in (1, 2, 3, 5, 7):
        share = PromptShare(0.3)
        parts = [share.split(budget, 0) for _ in range(100)]
        assert abs(sum(parts) - 0.3 * 100 * budget) <= 1 and max(parts) <= budget


def test_reserved_tokens_do_not_go_by_size() -> None:
    assert PromptShare(0.5).split(10, 10) == 10
    assert PromptShare(0.5).split(10, 4) == 7
    assert PromptShare(0.5).split(10, 20) == 10


@pytest.mark.parametrize("fraction", [0.0, 0.2, 1.1, float("nan")])
def test_a_fraction_outside_its_limits_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match=r"policy_share must be from 0\.25 to 1"):
        PromptShare(fraction)


def test_a_lower_priority_does_not_share_with_a_higher_one() -> None:
    driver = Driver(policy=Precedence({}, max_running=8), num_blocks=300, max_model_len=256)
    driver.add(request("a", 200, priority=0), request("b", 8, priority=1), request("c", 8, priority=0))
    assert given(driver.step()) == {"a": 56, "c": 8}


def test_a_deadline_goes_before_size() -> None:
    driver = Driver(policy=Precedence({}, max_running=8), num_blocks=300, max_model_len=256)
    driver.add(request("a", 200, service=Service(first_token_by=5.0)), request("b", 8))
    assert given(driver.step()) == {"a": 64}


def test_the_size_of_a_prompt_is_fixed_when_it_joins() -> None:
    """A prompt that is nearly done does not overtake one that was smaller from the beginning."""
    driver = Driver(num_blocks=300, max_model_len=256, max_num_batched_tokens=16)
    driver.add(request("a", 100), request("b", 90))
    for _ in range(7):
        out = driver.step()
    assert given(out) == {"a": 12, "b": 4} and driver.scheduler.running["a"].num_computed_tokens == 84
    driver.add(request("c", 80))
    assert given(driver.step()) == {"a": 12, "c": 4}  # a and b have fewer left than c, but were larger


def test_a_cached_beginning_does_not_count() -> None:
    driver = Driver(num_blocks=300, max_model_len=256, max_num_batched_tokens=64, caching=True)
    known = list(range(160))
    driver.add(request("a", known, max_tokens=1))
    driver.run()
    driver.add(request("b", 200), request("c", 40), request("d", [*known, 1, 2, 3]))
    assert given(driver.step()) == {"b": 48, "d": 3, "c": 13}


def full(rows: int = 32, **settings: object) -> Driver:
    """All rows but the reserved one are taken, by answers that go on."""
    driver = Driver(num_blocks=2000, max_model_len=256, max_num_seqs=rows, max_num_batched_tokens=256, **settings)
    driver.add(*[request(f"r{number}", 8, max_tokens=200) for number in range(rows - 1)])
    for _ in range(3):
        driver.step()
    return driver


def test_a_row_is_reserved_for_short_requests() -> None:
    driver = full()
    driver.add(request("long", 100))
    assert [row.request_id for row in driver.step().joined] == []
    assert driver.scheduler.waiting
    driver.add(request("short", 5), request("next", 5))
    out = driver.step()
    assert [row.request_id for row in out.joined] == ["short"] and out.held_up_by == "slots"
    assert set(driver.scheduler.batch.reserve) == {"short"}
    driver.scheduler.abort("r3")
    assert [row.request_id for row in driver.step().joined] == ["long"]  # an open row is for the first in line
    driver.scheduler.abort("short")
    assert [row.request_id for row in driver.step().joined] == ["next"]


def test_blocks_are_reserved_for_short_requests() -> None:
    driver = Driver(num_blocks=641, max_model_len=2200, max_num_seqs=32, max_num_batched_tokens=64)
    driver.add(request("a", 2000, max_tokens=100))
    driver.step()
    left = driver.kv.pools[0].num_free
    driver.add(request("b", left * BLOCK, max_tokens=100))  # would take all that is free
    assert [row.request_id for row in driver.step().joined] == []
    driver.add(request("c", 8, max_tokens=2))
    assert [row.request_id for row in driver.step().joined] == ["c"]
    assert driver.scheduler.waiting.oldest_arrival == 0.0 and next(iter(driver.scheduler.waiting)).times_passed == 0


def test_tokens_reserved_for_a_class_are_not_taken_by_requests_before_it() -> None:
    """ "first" is before the waiting request, "middle" and "reserving" are after it."""
    policy = Precedence({"batch": ServiceClass(min_step_tokens=8)}, max_running=3)
    driver = Driver(policy=policy, num_blocks=600, max_model_len=512, max_num_seqs=3, max_preemptions=0)
    for name, priority, service in (("reserving", 0, "batch"), ("middle", -3, "default"), ("first", -5, "default")):
        driver.add(request(name, 400, priority=priority, service=Service(service)))
        driver.step()
    driver.add(request("waiting", 100, priority=-4))
    for _ in range(3):
        assert given(driver.step()) == {"first": 56, "reserving": 8}


def test_a_preempted_request_at_the_head_of_the_line_holds_up_no_earlier_one() -> None:
    """It is first in the line, but not first in policy order. A small prompt between the two gets no tokens of the part
    in policy order before the earlier one."""
    driver = Driver(num_blocks=300, max_model_len=256, max_num_batched_tokens=16, policy_share=0.5)
    driver.add(request("first", 8, max_tokens=1), request("second", 60), request("small", 30), request("late", 2))
    assert given(driver.step()) == {"first": 8, "late": 2, "small": 6}
    driver.scheduler.preempt("late")
    assert given(driver.step())["second"] >= 4
