"""The bounded queue in front of the engine, and the time it tells people to come again."""

from __future__ import annotations

import pytest

from chairlift.engine.intake import Intake
from chairlift.errors import QueueFullError


def test_the_queue_is_bounded_by_requests() -> None:
    intake = Intake(2, 1000)
    intake.check(0.0, 2)
    for name in "ab":
        intake.check(0.0)
        intake.enter(name, 1)
    with pytest.raises(QueueFullError, match="2 requests wait already, and 2 may") as full:
        intake.check(0.0)
    assert full.value.kind == "requests"
    intake.leave("a", 0.0, started=True)
    intake.check(0.0)


def test_the_queue_is_bounded_by_prompt_tokens() -> None:
    intake = Intake(10, 100)
    intake.enter("a", 60)
    intake.check(0.0, 1, 40)
    with pytest.raises(QueueFullError, match="60 prompt tokens wait already, and 100 tokens may; this one has 41") as e:
        intake.check(0.0, 1, 41)
    assert e.value.kind == "tokens"


def test_a_prompt_longer_than_the_bound_may_wait_alone() -> None:
    intake = Intake(10, 100)
    intake.check(0.0, 1, 500)


def test_leaving_twice_counts_once() -> None:
    intake = Intake(10, 100)
    intake.enter("a", 60)
    intake.enter("b", 5)
    intake.leave("a", 0.0, started=True)
    intake.leave("a", 0.0, started=False)
    assert (len(intake), intake.num_tokens, "a" in intake, "b" in intake) == (1, 5, False, True)
    intake.clear()
    assert (len(intake), intake.num_tokens) == (0, 0)


@pytest.mark.parametrize(("per_second", "waiting", "seconds"), [(10, 50, 5), (1, 5, 5), (1, 500, 60), (100, 1, 1)])
def test_the_time_to_come_again_is_the_queue_over_its_measured_rate(
    per_second: int, waiting: int, seconds: float
) -> None:
    intake = Intake(1000, 10**6)
    for i in range(20 * per_second + 1):
        intake.enter(f"s{i}", 1)
        intake.leave(f"s{i}", 100 + i / per_second, started=True)
    for i in range(waiting):
        intake.enter(f"w{i}", 1)
    assert intake.retry_after(120.0) == pytest.approx(seconds, abs=1)


def test_a_rate_from_long_ago_says_nothing() -> None:
    intake = Intake(10, 100)
    intake.enter("a", 1)
    intake.leave("a", 0.0, started=True)
    intake.enter("b", 1)
    assert intake.retry_after(1000.0) == 30.0


def test_an_empty_queue_has_room_at_once() -> None:
    assert Intake(10, 100).retry_after(0.0) == 1.0
