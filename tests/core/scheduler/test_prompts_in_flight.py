"""Prompts that begin alike and arrive together compute their common beginning once."""

from __future__ import annotations

from typing import Any

import pytest

from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.request import Request
from chairlift.core.rows.adapters import AdapterRows
from chairlift.core.scheduler.prompts_in_flight import LEAST_MOVES, MAX_WAITS, PromptsInFlight
from tests.core.scheduler.driver import BLOCK, Driver, request

SHARED = list(range(1000, 1040))


def alike(name: str, own: int = 3, **settings: object) -> Request:
    """A request whose prompt begins with SHARED and ends with ``own`` tokens of its own."""
    return request(name, SHARED + [ord(name[-1]) * 10 + i for i in range(own)], **settings)


def driver(**settings: object) -> Driver:
    return Driver(**{"caching": True, "num_blocks": 200, "max_num_batched_tokens": 512, **settings})  # type: ignore[arg-type]


def waits(drive: Driver) -> list[str]:
    return sorted(each.request_id for each in drive.scheduler.batch.in_flight)


def test_equal_prompts_at_once_compute_one() -> None:
    drive = driver()
    drive.add(*(request(f"r{n}", SHARED) for n in range(6)))
    first = drive.step()
    assert [row.request_id for row in first.joined] == ["r0"]
    assert waits(drive) == []  # its blocks are published, and the others wait in the queue again
    second = drive.step()
    assert len(second.joined) == 5 and second.num_recomputed == 0
    # Five rows compute the last block of their prompt, and the first request decodes.
    assert second.num_tokens == 5 * BLOCK + 1
    drive.run()
    assert len(drive.finished) == 6


def test_a_chunked_leader_is_followed_until_the_common_part_is_there() -> None:
    drive = driver(max_num_batched_tokens=16)
    drive.add(alike("a", 30), alike("b"))
    held = []
    for _ in range(4):
        out = drive.step()
        held.append((waits(drive), [row.request_id for row in out.joined]))
    # 40 common tokens take three steps of 16. The leader still computes its own tokens when the second request joins.
    assert held == [(["b"], ["a"]), (["b"], []), ([], []), ([], ["b"])]
    assert drive.scheduler.batch.in_flight.num_followed == 1
    drive.run()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_look_ahead_does_not_change_who_follows(depth: int) -> None:
    drive = driver(depth=depth, max_num_batched_tokens=16)
    drive.add(*(alike(f"r{n}") for n in range(5)))
    outs = drive.run()
    computed = sum(out.num_tokens - out.num_decodes for out in outs)
    assert computed == 43 + 4 * 3


def test_other_content_salt_or_adapter_is_not_followed() -> None:
    drive = driver(kinds=[AdapterRows()])
    other = list(SHARED)
    other[5] += 1
    drive.add(alike("a"), alike("b", cache_salt="s"), alike("c", adapter_id=1), request("d", other))
    assert [row.request_id for row in drive.step().joined] == ["a", "b", "c", "d"]
    drive.run()


def test_few_common_blocks_are_not_worth_a_step() -> None:
    drive = driver()
    begin = SHARED[: 3 * BLOCK]
    drive.add(request("a", [*begin, *range(20)]), request("b", [*begin, *range(50, 70)]))
    assert len(drive.step().joined) == 2
    drive.run()


@pytest.mark.parametrize("end", ["abort", "fail", "preempt", "update weights", "not ready"])
def test_a_follower_does_not_wait_for_a_leader_that_has_left(end: str) -> None:
    drive = driver(max_num_batched_tokens=16, depth=1)
    leader = alike("a", 30)
    drive.add(leader, alike("b"))
    drive.step(fail=end == "fail")
    assert waits(drive) == ["b"]
    if end == "abort":
        drive.scheduler.abort("a")
    elif end == "fail":
        drive.land()
    elif end == "preempt":
        drive.scheduler.preempt("a")
    elif end == "update weights":
        drive.land()
        drive.scheduler.forget_kv(recompute=True)
    else:
        drive.scheduler.unready(leader)
    assert waits(drive) == []
    drive.scheduler.check_invariants()
    joined = [row.request_id for _ in range(2) for row in drive.step().joined]
    # A leader that computes its prompt again leads again.
    assert joined == (["a"] if end in ("preempt", "update weights") else ["b"])
    if end == "not ready":
        drive.scheduler.ready(leader, drive.now)
    drive.run()
    assert "b" in drive.finished


def test_a_follower_can_be_aborted() -> None:
    drive = driver(max_num_batched_tokens=16)
    drive.add(alike("a", 30), alike("b"), alike("c"))
    drive.step()
    assert waits(drive) == ["b", "c"]
    assert [each.request_id for each in drive.scheduler.abort("b")] == ["b"]
    assert waits(drive) == ["c"]
    drive.run()


def test_waiting_is_bounded_by_the_steps_of_computing() -> None:
    """The leader's tokens go to many short prompts, so that it takes far longer than alone."""
    drive = driver(max_num_batched_tokens=32, policy_share=0.25, num_blocks=1000, max_num_seqs=64)
    common = list(range(1000, 1100))
    drive.add(request("a", [*common, 1, 2]), request("b", [*common, 3, 4]))
    waited = 0
    for number in range(40):
        drive.add(
            *(request(f"{number}.{n}", [number * 100 + n] * (8 if number else 7), max_tokens=1) for n in range(3))
        )
        drive.step()
        waited += waits(drive) == ["b"]
    # Alone, the common tokens take four steps of 32. The step in which it begins to wait is not counted.
    assert waited == 1 + 2 + 2 * 4
    drive.run()


def test_a_request_follows_a_limited_number_of_times() -> None:
    """Each leader is aborted in its first step, and the next one is already there."""
    drive = driver(max_num_batched_tokens=16, max_num_seqs=32, depth=1)
    follower = alike("z", arrival_time=1.0)
    drive.add(*(alike(f"{number}", 30) for number in range(MAX_WAITS + 2)), follower)
    for number in range(MAX_WAITS):
        drive.step()
        assert follower in drive.scheduler.batch.in_flight
        drive.scheduler.abort(f"{number}")
    drive.step()
    assert follower.slot >= 0
    drive.run()


def test_without_a_prefix_cache_and_in_static_batches_nobody_follows() -> None:
    for settings in ({"caching": False}, {"batching": "static"}):
        drive = driver(**settings)
        drive.add(alike("a"), alike("b"))
        drive.now = 1.0
        out = drive.step()
        assert [row.request_id for row in out.joined] == ["a", "b"]
        drive.run()


def crowd(count: int, **settings: object) -> Driver:
    drive = driver(num_blocks=4000, max_num_seqs=32, max_num_batched_tokens=64, **settings)
    drive.add(alike("a", 90, max_tokens=2), *(alike(f"r{n}", 2, max_tokens=1) for n in range(count)))
    return drive


def check_a_crowd(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``count`` requests follow one leader. No step moves or compares more of them than it could use."""
    compared = [0]
    right = KVCacheManager.num_common

    def counted(self: KVCacheManager, *args: Any) -> int:
        compared[0] += 1
        return right(self, *args)

    monkeypatch.setattr(KVCacheManager, "num_common", counted)
    drive = crowd(count)
    while drive.scheduler.has_unfinished:
        before = set(waits(drive))
        compared[0] = 0
        drive.step()
        assert compared[0] <= 2 * LEAST_MOVES, compared
        assert len(before ^ set(waits(drive))) <= 3 * LEAST_MOVES
    assert len(drive.finished) == count + 1
    assert drive.scheduler.batch.in_flight.num_followed >= min(count, LEAST_MOVES)


def test_a_step_does_not_grow_with_the_requests_of_one_system_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    check_a_crowd(1500, monkeypatch)


@pytest.mark.planted("test_a_step_does_not_grow_with_the_requests_of_one_system_prompt")
def test_a_step_that_takes_everything_from_the_queue_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptsInFlight, "may_follow", True)
    with pytest.raises(AssertionError):
        check_a_crowd(300, monkeypatch)


def test_a_request_is_compared_with_one_leader_whatever_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompts have equal first blocks, and then documents of their own."""
    compared = []
    right = KVCacheManager.num_common
    monkeypatch.setattr(
        KVCacheManager, "num_common", lambda self, a, b, n: compared.append((a, b)) or right(self, a, b, n)
    )
    begin = SHARED[: 2 * BLOCK]
    drive = driver(num_blocks=4000, max_num_seqs=64, max_num_batched_tokens=4000)
    documents = [[*begin, *range(1000 * n, 1000 * n + 60)] for n in range(30)]
    drive.add(*(request(f"a{n}", document) for n, document in enumerate(documents)))
    drive.add(*(request(f"b{n}", [*document[:40], n, n + 1]) for n, document in enumerate(documents)))
    drive.step()
    followed = [(one.request_id, leader.request_id) for one, leader in compared if one.request_id[0] == "b"]
    assert followed == [(f"b{n}", f"a{n}") for n in range(30)]
    drive.run()


def test_released_requests_that_are_alone_still_run() -> None:
    """The queue is emptied by aborts while most of the released requests are not in it yet."""
    drive = crowd(200, depth=1)
    while not drive.scheduler.batch.in_flight.has_released:
        drive.step()
    for name in [*drive.scheduler.running, *(each.request_id for each in list(drive.scheduler.waiting))]:
        drive.scheduler.abort(name)
    while drive.flights:
        drive.land()
    assert drive.scheduler.next_event(drive.now) == drive.now
    drive.run()
    assert not drive.scheduler.requests
