"""The bounded queue in front of the engine, and the time it tells people to come again."""

from __future__ import annotations

import dataclasses

import pytest

from chairlift.base.service_class import parse_service_classes
from chairlift.core.scheduler.forecast import Forecast
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


def test_the_age_of_the_queue_is_that_of_its_oldest() -> None:
    intake = Intake(10, 100)
    assert intake.oldest_wait(100.0) == 0.0
    for name, now in (("a", 100.0), ("b", 103.0), ("c", 104.0)):
        intake.enter(name, 1, now=now)
    assert intake.oldest_wait(105.0) == 5.0
    intake.leave("b", 105.0, started=True)
    assert intake.oldest_wait(106.0) == 6.0
    intake.leave("a", 106.0, started=False)
    assert intake.oldest_wait(106.5) == 2.5
    intake.clear()
    assert intake.oldest_wait(107.0) == 0.0


def test_tenants_who_have_left_are_forgotten() -> None:
    """Without keys a tenant is whatever a client says: a server that never had a queue kept every name it heard."""
    intake = Intake(10, 100)
    for number in range(1000):
        intake.enter("a", 1, now=1.0, tenant=f"user {number}")
        intake.leave("a", 1.0, started=True)
    assert not intake._crowd.lanes and not intake._unforeseen.lanes


def test_a_prompt_longer_than_the_bound_may_wait_alone() -> None:
    intake = Intake(10, 100)
    intake.check(0.0, 1, 500)
    intake.enter("a", 1)
    with pytest.raises(QueueFullError, match="100"):
        intake.check(0.0, 1, 500)


def test_a_call_of_more_prompts_than_the_bound_may_wait_alone() -> None:
    intake = Intake(10, 100)
    intake.check(0.0, 64, 5000)
    intake.enter("a", 1)
    intake.check(0.0, 9)
    with pytest.raises(QueueFullError, match="1 requests wait already, and 10 may; this call has 10; try again later"):
        intake.check(0.0, 10)


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


def test_time_in_which_nobody_waited_is_no_sign_of_a_slow_engine() -> None:
    intake = Intake(1000, 10**6)
    intake.enter("alone", 1, now=80.0)
    intake.leave("alone", 80.0, started=True)
    for i in range(24):
        intake.enter(f"w{i}", 1, now=100.0)
    for i in range(4):
        intake.leave(f"w{i}", 100.1, started=True)
    assert intake.retry_after(100.2) == 5.0
    for i in range(4, 8):
        intake.leave(f"w{i}", 102.1, started=True)
    assert intake.retry_after(104.1) == 8.0


def test_a_rate_from_long_ago_says_nothing() -> None:
    intake = Intake(10, 100)
    intake.enter("a", 1)
    intake.leave("a", 0.0, started=True)
    intake.enter("b", 1)
    assert intake.retry_after(1000.0) == 30.0


def test_an_empty_queue_has_room_at_once() -> None:
    assert Intake(10, 100).retry_after(0.0) == 1.0


CLASSES = parse_service_classes("")


def test_patient_requests_leave_places_for_urgent_ones() -> None:
    intake = Intake(8, 1000, CLASSES)
    taken = {}
    for name in ("flex", "default", "priority"):
        taken[name] = 0
        for _ in range(20):
            try:
                intake.check(0.0, 1, 1, name)
            except QueueFullError:
                break
            intake.enter(f"{name}{taken[name]}", 1, name)
            taken[name] += 1
    assert taken == {"flex": 4, "default": 2, "priority": 2}
    with pytest.raises(QueueFullError, match="8 requests wait already, and 4 may before one of class flex is taken"):
        intake.check(0.0, 1, 1, "flex")


def test_prompt_tokens_are_shared_like_places() -> None:
    intake = Intake(100, 1000, CLASSES)
    intake.check(0.0, 1, 5000, "flex")  # alone
    intake.enter("a", 490, "flex")
    intake.check(0.0, 1, 10, "flex")
    with pytest.raises(QueueFullError, match="and 500 tokens may before one of class flex is taken; this one has 11"):
        intake.check(0.0, 1, 11, "flex")
    intake.check(0.0, 1, 260, "default")
    with pytest.raises(QueueFullError):
        intake.check(0.0, 1, 261, "default")
    intake.check(0.0, 1, 510, "priority")


def test_shares_follow_the_order_of_the_classes_and_nothing_else() -> None:
    classes = parse_service_classes({"batch": {"priority": 99}, "chat": {"priority": -10}})
    shares = {name: Intake(10, 10, classes).share(name) for name in classes}
    assert shares == pytest.approx({"priority": 1, "chat": 1, "default": 5 / 6, "flex": 4 / 6, "batch": 0.5})
    assert Intake(10, 10).share("flex") == 1
    equal = parse_service_classes({name: {"priority": 0} for name in CLASSES})
    assert {Intake(10, 10, equal).share(name) for name in CLASSES} == {1}
    Intake(1, 1, CLASSES).check(0.0, 1, 5, "flex")  # somebody must get in


def test_retry_after_counts_only_the_requests_ahead() -> None:
    intake = Intake(1000, 10**6, CLASSES)
    for i in range(21):
        intake.enter(f"s{i}", 1)
        intake.leave(f"s{i}", 100.0 + i, started=True)
    for name, count in (("flex", 20), ("default", 10), ("priority", 5)):
        for i in range(count):
            intake.enter(f"{name}{i}", 1, name)
    times = [intake.retry_after(120.0, name) for name in ("priority", "default", "flex", None)]
    assert times == pytest.approx([5, 15, 34, 34], abs=1)
    for i in range(5):
        intake.leave(f"priority{i}", 120.0, started=False)
    assert intake.retry_after(120.0, "priority") == 1.0


def forecast(
    starts: dict[str, float], newcomers: dict[str, float], pace: float = 0.0, made_at: float = 100.0
) -> Forecast:
    return Forecast(made_at, starts, newcomers, pace)


def test_the_expected_wait_counts_requests_that_came_after_the_forecast() -> None:
    intake = Intake(100, 1000, CLASSES)
    assert intake.expected_wait("default", 100.0) is None
    for name in ("a", "b"):
        intake.enter(name, 1)
    # The first answer of a request decides.
    intake.foreseen(forecast({"a#0": 102.0, "a#1": 103.0, "b": 104.0}, {"default": 106.0, "priority": 101.0}, 2.0))
    assert intake.expected_wait("default", 101.0) == 5.0
    intake.enter("c", 1, "default")
    intake.enter("d", 1, "flex")
    assert intake.expected_wait("default", 101.0) == 7.0
    assert intake.expected_wait("priority", 100.5) == 0.5  # they do not go before it
    intake.leave("a", 102.0, started=True)
    assert intake.expected_wait("default", 102.0) == 6.0
    intake.leave("c", 102.0, started=False)
    assert intake.expected_wait("default", 102.0) == 4.0
    assert intake.expected_wait("default", 500.0) == 0.0
    intake.enter("e", 1)
    intake.foreseen(forecast({"b": 104.0, "d": 105.0, "e": 107.0}, {"default": 108.0}, 2.0, made_at=103.0))
    assert intake.expected_wait("default", 103.0) == 6.0
    intake.clear()
    assert (intake.forecast, intake.expected_wait("default", 103.0)) == (None, None)


def test_a_tenant_waits_behind_its_own() -> None:
    intake = Intake(100, 1000, CLASSES)
    for name, tenant in (("a", "busy"), ("b", "busy"), ("c", None)):
        intake.enter(name, 1, tenant=tenant)
    intake.foreseen(forecast({"c": 101.0, "a": 102.0, "b": 106.0}, {"default": 102.0}, 1.0))
    waits = [intake.expected_wait("default", 100.0, 0, tenant) for tenant in ("busy", "other", None)]
    assert waits == [9.0, 2.0, 2.0]
    intake.enter("d", 1, tenant="busy")
    waits = [intake.expected_wait("default", 100.0, 0, tenant) for tenant in ("busy", "other", None)]
    assert waits == [12.0, 3.0, 3.0]
    first_come = Intake(100, 1000)  # all in one line, and the forecast knows its end
    first_come.enter("a", 1, tenant="busy")
    first_come.foreseen(forecast({"a": 102.0}, {"default": 103.0}, 1.0))
    assert first_come.expected_wait("default", 100.0, 0, "busy") == 3.0


def test_a_forecast_without_a_line_says_nothing_about_a_line() -> None:
    intake = Intake(100, 1000)
    intake.foreseen(forecast({}, {"default": 100.0}))
    assert intake.expected_wait("default", 101.0, free_rows=0) == 0.0
    intake.enter("a", 1)
    assert intake.expected_wait("default", 101.0, free_rows=2) == 0.0
    assert intake.expected_wait("default", 101.0, free_rows=1) is None
    assert intake.retry_after(101.0, "default") == 30.0  # the rate of starts, which is not known either


def test_the_line_is_in_the_order_of_the_forecast() -> None:
    intake = Intake(100, 1000, CLASSES)
    for time, (name, tier) in enumerate([("a", "default"), ("b", "priority"), ("c", "flex")]):
        intake.enter(name, 1, tier, float(60 + time))  # so long ago that nobody is expected to follow
    unknown = [(place.request_id, place.position, place.waited, place.expected_start) for place in intake.line(95.0)]
    assert unknown == [("a", 1, 35.0, None), ("b", 2, 34.0, None), ("c", 3, 33.0, None)]
    newcomers = {"priority": 102.0, "default": 103.5, "flex": 108.0}
    intake.foreseen(forecast({"b": 101.0, "a": 103.0, "c": 107.0}, newcomers, 2.0))
    for name, tier in (("d", "default"), ("e", "default"), ("f", "priority"), ("g", "flex")):
        intake.enter(name, 1, tier, 100.0)
    line = intake.line(102.0)
    assert [place.position for place in line] == [1, 2, 3, 4, 5, 6, 7]
    expected = {"b": 0.0, "f": 0.0, "a": 1.0, "d": 4.0, "c": 5.0, "e": 7.0, "g": 12.0}
    assert {place.request_id: place.expected_start for place in line} == expected
    assert list(expected) == [place.request_id for place in line]


def test_the_line_says_who_waits_for_kv_from_files() -> None:
    intake = Intake(100, 1000, CLASSES)
    for name in "ab":
        intake.enter(name, 1, "default", 60.0)
    intake.foreseen(forecast({"a": 101.0}, {"default": 101.0}).with_loads({"b#0": 103.0}))
    expected = [("a", 0.5, None), ("b", 2.5, 2.5)]
    assert [(each.request_id, each.expected_start, each.loading) for each in intake.line(100.5)] == expected
    intake.foreseen(forecast({"a": 101.0, "b": 102.0}, {"default": 101.0}))
    assert [each.loading for each in intake.line(100.5)] == [None, None]


def test_the_time_to_come_again_is_that_of_the_forecast() -> None:
    intake = Intake(2, 1000, CLASSES)
    for name in "ab":
        intake.enter(name, 1)
    assert intake.retry_after(100.0) == 30.0
    intake.foreseen(forecast({"a": 103.0, "b": 104.0}, {"priority": 100.1, "default": 107.2, "flex": 900.0}, 1.0))
    times = [intake.retry_after(100.0, name) for name in ("priority", "default", "flex", None)]
    assert times == [1.0, 6.0, 60.0, 60.0]
    assert intake.retry_after(100.0, "default", "another") == 8.0
    with pytest.raises(QueueFullError) as full:
        intake.check(102.0, 1, 1, "priority")
    assert full.value.retry_after == 1.0
    with pytest.raises(QueueFullError) as full:
        intake.check(102.0, 1, 1, "default")
    assert full.value.retry_after == 4.0


def calibrated(ratios: list[float]) -> Intake:
    """An intake whose requests waited so many times the second that was predicted."""
    intake = Intake(1000, 10**6)
    for index, ratio in enumerate(ratios):
        intake.enter(f"s{index}", 1, now=100.0, predicted=1.0)
        intake.leave(f"s{index}", 100.0 + ratio, started=True)
    return intake


def test_only_waits_that_began_are_compared_with_their_predictions() -> None:
    intake = calibrated([0.5, 1.5])
    intake.enter("left", 1, now=100.0, predicted=1.0)
    intake.leave("left", 900.0, started=False)
    intake.enter("not predicted", 1, now=100.0)
    intake.leave("not predicted", 900.0, started=True)
    assert len(intake.calibration) == 2


def test_a_request_that_would_wait_in_vain_is_refused_with_retry_after() -> None:
    intake = calibrated([0.5] * 3 + [0.8] * 27)  # 9 of 10 waited for at least 0.8 of the forecast
    with pytest.raises(QueueFullError, match=r"start in about 12\.3 s, but its queue_timeout allows 3 s") as full:
        intake.check_wait(12.34, {"timeout": None, "queue_timeout": 3.0})
    assert (full.value.kind, full.value.retry_after) == ("forecast", pytest.approx(9.34))
    with pytest.raises(QueueFullError):
        intake.check_wait(1.01 * 3.0 / 0.8, {"timeout": None, "queue_timeout": 3.0})
    intake.check_wait(0.99 * 3.0 / 0.8, {"timeout": None, "queue_timeout": 3.0})
    with pytest.raises(QueueFullError, match=r"in about 2 s, 3\.5 s after it came, but its timeout allows 3 s") as full:
        intake.check_wait(2.0, {"timeout": 3.0, "queue_timeout": None}, spent=1.5)
    assert full.value.retry_after == pytest.approx(0.5)
    intake.check_wait(2.0, {"timeout": 3.0, "queue_timeout": None}, spent=1.3)
    intake.check_wait(None, {"timeout": None, "queue_timeout": 0.0})
    intake.check_wait(0.04, {"timeout": None, "queue_timeout": 0.001})


def test_forecasts_that_are_too_low_refuse_nobody_who_is_in_time_by_them() -> None:
    intake = calibrated([3.0] * 30)
    intake.check_wait(2.9, {"timeout": None, "queue_timeout": 3.0})
    with pytest.raises(QueueFullError):
        intake.check_wait(3.1, {"timeout": None, "queue_timeout": 3.0})


def test_nobody_is_refused_before_forecasts_have_been_compared() -> None:
    calibrated([1.0] * 19).check_wait(1e6, {"timeout": None, "queue_timeout": 0.1})
    with pytest.raises(QueueFullError):
        calibrated([1.0] * 20).check_wait(1e6, {"timeout": None, "queue_timeout": 0.1})


def test_waits_are_longer_where_requests_of_higher_rank_keep_coming() -> None:
    intake = Intake(200, 1000, CLASSES)
    intake.enter("first", 1, "default", 0.0)
    intake.leave("first", 1.0, started=True)
    intake.enter("d", 1, "default", 85.0)
    intake.enter("f", 1, "flex", 85.0)
    for index in range(9):  # in half a minute, in which 30 can start: they take 0.3 of all starts
        intake.enter(f"p{index}", 1, "priority", 85.0 + index)
        intake.leave(f"p{index}", 86.0 + index, started=True)
    made = forecast({"d": 107.0, "f": 110.0}, {"priority": 100.0, "default": 108.0, "flex": 112.0}, 1.0)
    intake.foreseen(made)
    starts = {place.request_id: place.expected_start for place in intake.line(100.0)}
    assert starts == {"d": pytest.approx(7 / 0.7), "f": pytest.approx(10 / 0.7)}
    assert intake.expected_wait("priority", 100.0, tenant=None) == 0.0
    assert intake.expected_wait("default", 100.0, tenant=None) == pytest.approx(8 / 0.7)
    later = dataclasses.replace(made, made_at=130.0, starts={"d": 137.0, "f": 140.0})
    intake.foreseen(later)
    starts = {place.request_id: place.expected_start for place in intake.line(130.0)}
    assert starts == {"d": 7.0, "f": 10.0}, "nobody has come for half a minute"
    for index in range(100):
        intake.enter(f"q{index}", 1, "priority", 130.0)
        intake.leave(f"q{index}", 130.0, started=True)
    intake.foreseen(later)
    starts = {place.request_id: place.expected_start for place in intake.line(130.0)}
    assert starts == pytest.approx({"d": 35.0, "f": 50.0}), "never more than five times as long"


def test_requests_from_before_the_forecast_calibrate_it() -> None:
    """A burst comes while nobody waits, and there is no forecast; the next must know how good forecasts are."""
    intake = Intake(1000, 1000)
    for index in range(30):
        intake.enter(f"r{index}", 1, now=100.0, predicted=intake.expected_wait("default", 100.0))
    intake.enter("other", 1, now=100.0, tenant=None)  # of a priority of its own: nobody forecasts those
    starts = {f"r{index}": 110.0 + index for index in range(30)} | {"other": 150.0}
    intake.foreseen(dataclasses.replace(forecast(starts, {"default": 150.0}, 1.0), made_at=102.0))
    for index in range(30):
        intake.leave(f"r{index}", 102.0 + 1.5 * (8.0 + index), started=True)
    intake.leave("other", 150.0, started=True)
    assert (len(intake.calibration), intake.calibration.quantile(0.5)) == (30, pytest.approx(1.5))


def test_a_forecast_says_nothing_while_the_engine_stands_still() -> None:
    intake = Intake(100, 1000)
    intake.enter("a", 1, now=100.0)
    intake.enter("b", 1, now=100.0)
    intake.foreseen(forecast({"a": 110.0, "b": 120.0}, {"default": 130.0}, 10.0))
    for heard, starts, wait, again in ((106.0, [0.0, 9.0], 19.0, 19.0), (105.9, [None, None], None, 30.0)):
        intake.heard_at = heard
        assert intake.expected_wait("default", 111.0) == wait
        assert [place.expected_start for place in intake.line(111.0)] == starts
        assert [place.request_id for place in intake.line(111.0)] == ["a", "b"]
        assert intake.retry_after(111.0) == intake.retry_after(111.0, "default") == again  # nobody has started yet


def test_a_forecast_stays_valid_during_a_long_step() -> None:
    """A step of a large model can take a minute on two cores."""
    intake = Intake(100, 1000)
    assert not intake.is_outdated(1000.0)
    for now, busy in ((1000.0, False), (1060.0, True), (5000.0, False), (5060.0, True)):
        intake.heard(now, busy)
    assert (intake.is_outdated(5239.0), intake.is_outdated(5241.0)) == (False, True)
    for step in range(40):
        intake.heard(5061.0 + step, True)
    assert (intake.is_outdated(5104.0), intake.is_outdated(5106.0)) == (False, True)
