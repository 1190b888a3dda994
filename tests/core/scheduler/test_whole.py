"""Prompts that may not be cut: each is computed in one step, in the policy's order, and none starves.

Changes that must make these fail: a chunk that ends before its prompt does; a step with more tokens than it may have; a
request that gets a row before the step in which it is computed; a long prompt that shorter ones pass again and again.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from chairlift.core.request import Request, Service
from chairlift.core.rows.whole import WholeRows
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.core.scheduler.policy import FCFS, Policy
from chairlift.core.scheduler.precedence import Precedence
from tests.core.scheduler.driver import Driver

BUDGET = 64


def text(name: str, length: int, **settings: Any) -> Request:
    return Request(name, [5] * length, max_tokens=1, **settings)


def texts_only(policy: Policy = FCFS, **settings: Any) -> Driver:
    """A scheduler for a model that keeps nothing between two steps."""
    return Driver(windows=(), policy=policy, max_num_batched_tokens=BUDGET, kinds=[WholeRows()], **settings)


def steps_of(outs: list[SchedulerOutput]) -> dict[str, int]:
    """Request id -> number of the step that computed it."""
    return {name: number for number, out in enumerate(outs) for name in out.chunk_ids}


@pytest.mark.parametrize("seed", range(30))
def test_every_prompt_is_computed_whole_within_the_budget(seed: int) -> None:
    rng = random.Random(seed)
    policy = Precedence({}, max_running=8) if seed % 2 else FCFS
    driver = texts_only(policy, max_num_seqs=rng.choice((1, 3, 8)), policy_share=rng.choice((0.5, 0.75, 1.0)))
    sizes, outs = dict[str, int](), list[SchedulerOutput]()
    for number in range(60):
        name = str(number)
        sizes[name] = rng.choice((1, 2, 7, 20, 63, 64, 65, 200))
        priority = rng.choice((0, 0, 1)) if seed % 2 else 0
        driver.add(text(name, sizes[name], priority=priority, service=Service(tenant=rng.choice("ab"))))
        if rng.random() < 0.5:
            driver.now += 1.0
            outs.append(driver.step())
        if rng.random() < 0.1:
            driver.scheduler.abort(rng.choice(list(sizes)))
    outs += driver.run()
    for out in outs:
        for name, chunk in zip(out.chunk_ids, out.chunks, strict=True):
            assert (chunk.start, chunk.num_tokens, chunk.samples) == (0, sizes[name], 1)
        assert out.num_tokens <= BUDGET or len(out.chunks) == 1
        assert not out.preempted and {row.request_id for row in out.joined} == set(out.chunk_ids)
    done = Counter(name for out in outs for name in out.chunk_ids)
    assert set(done.values()) == {1} and len(done) > 40


def test_a_prompt_longer_than_any_step_has_one_of_its_own_and_is_not_passed_again_and_again() -> None:
    driver = texts_only()
    driver.add(*(text(f"before{number}", 20) for number in range(3)), text("long", 500))
    outs = []
    for number in range(12):  # short ones come all the time
        driver.add(*(text(f"after{number}.{each}", 20) for each in range(3)))
        outs.append(driver.step())
    alone = next(out for out in outs if "long" in out.chunk_ids)
    assert alone.chunk_ids == ["long"] and outs.index(alone) == 1


def test_the_rest_of_a_step_goes_to_the_smallest() -> None:
    """A short text does not wait for all longer texts of the same tenant."""
    driver = texts_only()
    driver.add(*(text(f"document{number}", 30) for number in range(20)), text("query", 4))
    assert driver.step().chunk_ids == ["document0", "document1", "query"]


def test_a_flood_of_one_tenant_does_not_starve_another() -> None:
    driver = texts_only(Precedence({}, max_running=8), max_num_seqs=4)
    driver.add(*(text(f"flood{number}", 16, service=Service(tenant="flood")) for number in range(100)))
    driver.step()
    driver.add(*(text(f"other{number}", 16, service=Service(tenant="other")) for number in range(4)))
    steps = steps_of([driver.step() for _ in range(4)])
    assert {name for name in steps if name.startswith("other")} == {f"other{number}" for number in range(4)}
    assert steps["other1"] <= 1 and len(steps) == 16  # half of each step, and no row is idle


def test_priorities_and_deadlines_decide_the_order_of_texts() -> None:
    driver = texts_only(Precedence({}, max_running=8), max_num_seqs=2, policy_share=1.0)
    driver.add(*(text(f"plain{number}", 16) for number in range(10)))
    driver.step()
    driver.add(text("urgent", 16, priority=-1), text("due", 16, service=Service(finish_by=0.5)))
    assert set(driver.step().chunk_ids) == {"urgent", "due"}


def test_a_late_text_is_dropped_before_it_is_computed() -> None:
    driver = texts_only(Precedence({}, max_running=8), max_num_seqs=1, drop_late=True)
    driver.add(
        text("first", 16, service=Service(finish_by=0.5)), text("late", 16, priority=1, service=Service(finish_by=1.0))
    )
    assert driver.step().chunk_ids == ["first"]
    driver.now = 2.0
    assert not driver.step().num_tokens
    assert [each.request_id for each in driver.scheduler.dropped] == ["late"]
