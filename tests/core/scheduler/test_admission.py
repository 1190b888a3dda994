"""Admission: the policy's order, a bounded look past requests that do not fit, ageing, and the three memberships."""

from __future__ import annotations

import pytest

from chairlift.config import CacheGroup
from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.kv_cache.prefix_cache import PrefixCache
from chairlift.core.kv_cache.prefix_node import PrefixNode
from chairlift.core.request import Request, RequestStatus, Service
from chairlift.core.scheduler.admission import WaitingQueue
from chairlift.core.scheduler.membership import membership_from_name
from chairlift.core.scheduler.policy import FCFS
from chairlift.core.scheduler.precedence import Precedence
from chairlift.core.scheduler.scheduler import Scheduler
from chairlift.errors import ConfigError
from tests.core.scheduler.driver import BLOCK, Driver, request


def ids(requests: list[Request]) -> list[str]:
    return [one.request_id for one in requests]


def test_the_queue_keeps_policy_order_and_finds_what_it_removes() -> None:
    queue = WaitingQueue(FCFS, look_ahead=1)
    requests = [request(name, 2) for name in "abcde"]
    for sequence, one in enumerate(requests):
        one.sequence = sequence // 2  # some keys are equal: arrival among them
    for one in reversed(requests):
        queue.add(one)
    assert ids(list(queue)) == ["b", "a", "d", "c", "e"]
    queue.remove(requests[0])
    assert ids(list(queue)) == ["b", "d", "c", "e"]
    assert ids(list(queue.line(0.0))) == ["b", "d", "c", "e"]


@pytest.mark.parametrize("status", [RequestStatus.PREEMPTED, RequestStatus.SWAPPED])
def test_preempted_requests_come_last_in_the_order_by_size(status: RequestStatus) -> None:
    """One may need many blocks for few tokens; the smallest of the others must not wait until it fits."""
    queue = WaitingQueue(FCFS)
    gave_way, large, small = (request(name, 2) for name in ("gave way", "large", "small"))
    gave_way.move_to(RequestStatus.RUNNING)
    gave_way.move_to(status)
    for size, one in ((1, gave_way), (9, large), (5, small)):
        one.size = one.sequence = size
        queue.add(one)
    assert ids(list(queue.line(0.0)))[0] == "gave way"
    for expected in ("small", "large", "gave way"):
        (smallest,) = queue.smallest(0.0)
        assert smallest.request_id == expected
        queue.remove(smallest)


@pytest.mark.parametrize(("look_ahead", "admitted"), [(0, []), (1, []), (2, ["s"]), (8, ["s"])])
def test_only_a_bounded_number_of_requests_that_do_not_fit_are_skipped(look_ahead: int, admitted: list[str]) -> None:
    driver = Driver(num_blocks=9, look_ahead=look_ahead)
    driver.add(request("a", 5 * BLOCK, max_tokens=8))
    driver.step()
    driver.add(request("x", 6 * BLOCK), request("y", 7 * BLOCK), request("s", 2))
    out = driver.step()
    assert [row.request_id for row in out.joined] == admitted


def test_a_request_that_was_passed_often_is_passed_no_more() -> None:
    driver = Driver(num_blocks=9, max_times_passed=2, max_num_seqs=8)
    driver.add(request("a", 5 * BLOCK, max_tokens=8))
    driver.step()
    big = request("x", 7 * BLOCK, max_tokens=1)
    driver.add(big)
    joined = []
    for name in "bcde":
        driver.add(request(name, 1, max_tokens=1))
        joined += [row.request_id for row in driver.step().joined]
    assert joined == ["b", "c"]
    assert big.times_passed == 2
    driver.run()
    assert driver.finished.index("x") < driver.finished.index("d")


def test_a_request_that_is_passed_still_goes_before_later_ones_of_its_kind() -> None:
    driver = Driver(num_blocks=9)
    driver.add(request("a", 6 * BLOCK, max_tokens=4))
    driver.step()
    driver.add(request("x", 4 * BLOCK, max_tokens=1), request("y", 4 * BLOCK, max_tokens=1))
    driver.run()
    assert driver.finished == ["a", "x", "y"]


@pytest.mark.parametrize(("watermark", "joins"), [(0.0, True), (0.25, True), (0.26, False)])
def test_the_watermark_holds_back_newcomers_but_not_an_empty_batch(watermark: float, joins: bool) -> None:
    driver = Driver(num_blocks=9, watermark=watermark)
    driver.add(request("a", 4 * BLOCK, max_tokens=1))
    alone = Driver(num_blocks=9, watermark=0.5)
    alone.add(request("a", 8 * BLOCK, max_tokens=1))
    assert len(alone.step().joined) == 1
    driver.add(request("b", 2 * BLOCK, max_tokens=1))
    assert [row.request_id for row in driver.step().joined] == (["a", "b"] if joins else ["a"])


# -- membership --------------------------------------------------------------------------------------------------


def test_an_unknown_membership_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="continuous, static, dynamic or module:Class; got 'none'"):
        membership_from_name("none")


@pytest.mark.parametrize(
    ("batching", "joins_at", "finishes"),
    [
        ("continuous", 1, ["b", "c", "a"]),
        ("dynamic", 7, ["b", "a", "c"]),
        ("static", 7, ["a", "b", "c"]),
    ],
)
def test_each_membership_lets_newcomers_join_at_its_times(batching: str, joins_at: int, finishes: list[str]) -> None:
    driver = Driver(batching=batching)
    driver.add(request("a", 3, max_tokens=7), request("b", 3, max_tokens=2))
    driver.step()
    driver.add(request("c", 3, max_tokens=2))
    outs = driver.run()
    joined = next(i for i, out in enumerate(outs, 1) if "c" in [row.request_id for row in out.joined])
    assert joined == joins_at
    assert driver.finished == finishes


def test_a_static_batch_computes_held_rows_to_its_end_and_reserves_the_worst_case() -> None:
    driver = Driver(batching="static")
    long, short = request("a", 3, max_tokens=9), request("b", 5, max_tokens=2)
    driver.add(long, short)
    outs = driver.run()
    rows = [len(out.decode_rows) + len(out.chunks) for out in outs]
    assert rows == [2] * 9
    assert [out.num_held for out in outs] == [0, 0, *[1] * 7]
    assert not [blocks for out in outs for blocks in out.new_blocks]  # all of it was taken at the start
    assert [len(row.block_ids[0]) for row in outs[0].joined] == [3, 4]  # 3 + 8 and 5 + 8 positions
    assert (long.num_output_tokens, short.num_output_tokens) == (9, 2)


def test_a_static_batch_computes_to_its_end_also_behind_a_request_that_does_not_fit() -> None:
    driver = Driver(batching="static", max_num_seqs=3, num_blocks=13)
    driver.add(request("a", 3, max_tokens=9), request("b", 40, max_tokens=2), request("c", 4, max_tokens=3))
    driver.add(request("d", 4, max_tokens=2))  # of the next batch, whatever room there is
    outs = driver.run()
    assert [row.request_id for row in outs[0].joined] == ["a", "c"]
    assert [len(out.decode_rows) + len(out.chunks) for out in outs[:9]] == [2] * 9
    assert outs[9].joined[0].request_id == "b"


@pytest.mark.parametrize(("num_blocks", "max_model_len", "most"), [(65, 128, 31), (9, 24, 23), (7, 128, 24)])
def test_a_held_row_computes_no_further_than_the_model_and_the_cache_go(
    num_blocks: int, max_model_len: int, most: int
) -> None:
    driver = Driver(batching="static", num_blocks=num_blocks, max_model_len=max_model_len, max_num_seqs=2)
    long, short = request("a", 20, max_tokens=2), request("b", 1, max_tokens=12)
    driver.add(long, short)
    driver.step()
    assert (long.limit, short.limit) == (most, 12)
    driver.run()
    assert sorted(driver.finished) == ["a", "b"]


@pytest.mark.parametrize(("waiting", "joined"), [(1, 0), (2, 2), (3, 2), (4, 4), (5, 4), (8, 8), (9, 8)])
def test_a_batch_of_a_preferred_size_does_not_wait_to_fill(waiting: int, joined: int) -> None:
    driver = Driver(batching="dynamic", batch_wait_ms=500.0, preferred_sizes=(2, 4))
    driver.add(*(request(f"r{i}", 2) for i in range(waiting)))
    assert driver.scheduler.next_event(0.0) == (0.0 if joined else 0.5)
    assert len(driver.step().joined) == joined
    driver.now = 0.5
    driver.run()
    assert len(driver.finished) == waiting


def test_a_dynamic_batch_does_not_hold_rows() -> None:
    driver = Driver(batching="dynamic")
    driver.add(request("a", 3, max_tokens=9), request("b", 5, max_tokens=2))
    outs = driver.run()
    assert [len(out.decode_rows) + len(out.chunks) for out in outs] == [2, 2, *[1] * 7]
    assert not any(out.num_held for out in outs)


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_a_batch_fires_when_full_or_after_the_wait(batching: str) -> None:
    driver = Driver(batching=batching, batch_wait_ms=500.0, max_num_seqs=3)
    driver.now = 10.0
    driver.add(request("a", 3, arrival_time=10.0))
    assert driver.step().num_tokens == 0
    assert driver.scheduler.next_event(10.0) == 10.5
    driver.now = 10.4
    driver.add(request("b", 3, arrival_time=10.4))
    assert driver.step().num_tokens == 0
    assert driver.scheduler.next_event(10.4) == 10.5
    driver.now = 10.5
    assert [row.request_id for row in driver.step().joined] == ["a", "b"]
    driver.run()
    driver.add(*[request(name, 3, arrival_time=10.5) for name in "cdef"])
    assert driver.scheduler.next_event(10.5) == 10.5
    assert [row.request_id for row in driver.step().joined] == ["c", "d", "e"]


@pytest.mark.parametrize("batching", ["static", "dynamic"])
@pytest.mark.parametrize("which", ["first_token_by", "finish_by"])
def test_a_late_request_is_dropped_before_the_batch_starts(batching: str, which: str) -> None:
    policy = Precedence({}, max_running=8)
    driver = Driver(batching=batching, batch_wait_ms=6000.0, policy=policy, drop_late=True)
    driver.add(request("a", 3), request("late", 3, service=Service(**{which: 1.0})))
    assert driver.step().num_tokens == 0
    driver.now = driver.scheduler.next_event(0.0) or 0.0
    assert 1.0 < driver.now < 1.001
    assert driver.step().num_tokens == 0
    assert [dropped.request_id for dropped in driver.scheduler.dropped] == ["late"]
    assert driver.scheduler.next_event(driver.now) == 6.0
    driver.run()
    assert driver.finished == ["a"]


def test_a_deadline_that_passes_before_the_wait_ends_the_wait_at_once() -> None:
    driver = Driver(batching="static", batch_wait_ms=6000.0, policy=Precedence({}, max_running=8), drop_late=True)
    driver.add(request("late", 3, service=Service(first_token_by=1.0)))
    driver.now = 0.999
    assert driver.step().num_tokens == 0
    due = driver.scheduler.next_event(1.001)
    assert due is not None and 1.0 < due < 1.001
    driver.now = 1.001
    driver.step()
    assert [dropped.request_id for dropped in driver.scheduler.dropped] == ["late"]


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_a_closed_batch_is_filled_even_beyond_the_first_steps_budget(batching: str) -> None:
    driver = Driver(batching=batching, max_num_batched_tokens=8)
    driver.add(*[request(name, 7, max_tokens=2) for name in "abc"])
    assert [row.request_id for row in driver.step().joined] == ["a", "b", "c"]
    driver.run()
    assert sorted(driver.finished) == ["a", "b", "c"]


def test_a_request_that_joins_a_continuous_batch_has_work_in_the_same_step() -> None:
    driver = Driver(max_num_batched_tokens=8)
    driver.add(*[request(name, 7, max_tokens=2) for name in "abc"])
    assert [row.request_id for row in driver.step().joined] == ["a", "b"]


@pytest.mark.parametrize("depth", [0, 1])
def test_aborting_the_last_mate_releases_a_held_batch(depth: int) -> None:
    driver = Driver(batching="static", depth=depth)
    driver.add(request("a", 3, max_tokens=30), request("b", 3, max_tokens=2))
    for _ in range(4 + depth):
        driver.step()
    assert driver.finished == []
    assert [one.request_id for one in driver.scheduler.abort("a")] == ["a", "b"]
    driver.run()


def test_request_that_does_not_fit_is_not_hashed_again_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for its cached prefix costs a hash per block; a queue of such requests would stall every step."""
    walks: list[str] = []
    original = PrefixCache.walk

    def walk(self: PrefixCache, request: Request, max_blocks: int) -> list[PrefixNode]:
        walks.append(request.request_id)
        return original(self, request, max_blocks)

    monkeypatch.setattr(PrefixCache, "walk", walk)
    kv = KVCacheManager([CacheGroup(1 + 8)], 4, max_step_tokens=64)
    scheduler = Scheduler(kv, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, watermark=0.0)
    scheduler.add(Request("runs", list(range(13)), max_tokens=18))
    scheduler.add(Request("waits", list(range(50, 78)), max_tokens=4))
    for _ in range(18):
        out = scheduler.schedule(0.0)
        scheduler.update(out, [7] * (out.num_decodes + sum(chunk.samples for chunk in out.chunks)), 0.0)
    assert walks.count("waits") <= 7  # when queued, at the first try, and once per block that was published meanwhile
    assert "runs" not in scheduler.running
    assert "waits" in scheduler.running or scheduler.schedule(0.0).joined[0].request_id == "waits"


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_closed_batch_takes_all_answers_to_a_prompt_together(batching: str) -> None:
    kv = KVCacheManager([CacheGroup(64)], 4, max_step_tokens=64)
    scheduler = Scheduler(
        kv,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=64,
        membership=membership_from_name(batching),
    )
    first = Request("a#0", [1, 2, 3], max_tokens=4)
    scheduler.add(first)
    scheduler.add(Request("a#1", [1, 2, 3], max_tokens=4, source=first))
    assert [row.request_id for row in scheduler.schedule(0.0).joined] == ["a#0", "a#1"]
