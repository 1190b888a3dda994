"""The longest prefix first: who goes first, who waits at most how long, and what it gains."""

from __future__ import annotations

import itertools

import pytest

from chairlift.core.plugins.longest_prefix import LongestPrefixFirst
from chairlift.core.request import Request
from chairlift.core.scheduler.policies import load_policy
from tests.core.scheduler.driver import Driver, request

STEMS = [list(range(1000 * stem, 1000 * stem + 200)) for stem in range(1, 6)]
PATH = "chairlift.core.plugins.longest_prefix:LongestPrefixFirst"


class _Patient(LongestPrefixFirst):
    ageing_seconds = 5.0


def prompt(name: str, stem: int, common: int = 120, max_tokens: int = 4, now: float = 0.0) -> Request:
    """A request with ``common`` tokens of a stem, then tokens of its own."""
    own = [10**6 + 100 * sum(map(ord, name)) + i for i in range(6)]
    return request(name, STEMS[stem][:common] + own, max_tokens, arrival_time=now)


def driver(rows: int = 1, policy: LongestPrefixFirst | None = None) -> Driver:
    return Driver(
        caching=True,
        num_blocks=400,
        max_num_batched_tokens=256,
        max_num_seqs=rows,
        max_model_len=512,
        policy=policy or _Patient(),
        policy_share=1.0,
    )


def starts(drive: Driver) -> list[str]:
    return [row.request_id for out in drive.run() for row in out.joined]


def test_requests_that_begin_like_a_running_one_go_first() -> None:
    drive = driver()
    drive.add(prompt("a0", 0), prompt("b0", 1), prompt("a1", 0), prompt("c0", 2), prompt("b1", 1), prompt("a2", 0))
    assert starts(drive) == ["a0", "a1", "a2", "b0", "b1", "c0"]


def test_the_longest_common_prefix_goes_before_a_shorter_one() -> None:
    drive = driver(rows=2)
    drive.add(prompt("a0", 0, 80, 12), prompt("b0", 1, 160, 12))
    drive.step()
    drive.add(prompt("a1", 0, 80), prompt("x0", 2), prompt("b1", 1, 160), prompt("b2", 1, 160))
    assert starts(drive) == ["b1", "b2", "a1", "x0"]


def test_short_and_different_prompts_keep_the_order_of_arrival() -> None:
    drive = driver()
    drive.add(*(prompt(f"{stem}{n}", stem, 40) for n, stem in itertools.product(range(2), range(3))))
    assert starts(drive) == ["00", "10", "20", "01", "11", "21"]


def check_the_bound(policy: LongestPrefixFirst) -> None:
    """Requests with one beginning arrive faster than they end. Another one waits at most its ageing time, plus the
    time until a row is free."""
    drive = driver(policy=policy)
    drive.add(prompt("a0", 0), prompt("z0", 1))
    started: dict[str, float] = {}
    for number in range(200):
        drive.now = 0.1 * number
        drive.add(prompt(f"b{number}", 0, now=drive.now))
        started |= {row.request_id: drive.now for row in drive.step().joined}
    assert 1.0 < started["z0"] <= 5.0 + 4 * 0.1 + 1e-9, started["z0"]
    assert len(drive.scheduler.waiting) > 100, "the traffic is no overload"
    younger = [name for name, at in started.items() if at < started["z0"] and name[0] == "b"]
    assert len(younger) > 5, "the order of arrival would do as well"


def test_an_aged_request_goes_before_all_younger_ones() -> None:
    check_the_bound(_Patient())


@pytest.mark.planted("test_an_aged_request_goes_before_all_younger_ones")
def test_a_policy_without_ageing_is_noticed() -> None:
    class Endless(_Patient):
        ageing_seconds = 1e9

    with pytest.raises((AssertionError, KeyError)):
        check_the_bound(Endless())


def test_a_preempted_request_goes_before_those_with_a_common_beginning() -> None:
    drive = driver(rows=2)
    drive.add(prompt("a0", 0, max_tokens=30), prompt("z0", 1, max_tokens=30))
    for _ in range(4):
        drive.step()
    drive.add(prompt("a1", 0))
    assert drive.scheduler.preempt("z0")
    assert [row.request_id for row in drive.step().joined] == ["z0"]
    drive.run()


def test_it_remembers_nothing_of_requests_that_have_ended() -> None:
    policy = _Patient()
    drive = driver(rows=3, policy=policy)
    for number in range(60):
        drive.add(prompt(f"r{number}", number % 5), prompt(f"s{number}", number % 5, 30))
    drive.step()
    assert 0 < len(policy._common) <= 5
    drive.scheduler.abort("r50")
    drive.run()
    assert not any((policy._begins, policy._lanes, policy._waiting, policy._running, policy._newest, policy._common))


def test_fewer_beginnings_are_computed_again_than_in_order_of_arrival() -> None:
    """The cache holds two of five beginnings."""

    def computed(policy: LongestPrefixFirst | None) -> int:
        settings = {} if policy is None else {"policy": policy}
        drive = Driver(
            caching=True,
            num_blocks=110,
            max_num_batched_tokens=256,
            max_num_seqs=2,
            max_model_len=512,
            **settings,
        )
        drive.add(*(prompt(f"r{number}", number % 5, 160) for number in range(40)))
        return sum(out.num_tokens - out.num_decodes for out in drive.run())

    assert computed(LongestPrefixFirst()) < 0.5 * computed(None)


def test_a_setting_loads_it() -> None:
    assert isinstance(load_policy(PATH), LongestPrefixFirst)
    fork = LongestPrefixFirst().fork()
    assert fork.name == "longest_prefix" and fork.lane is not None
