"""Who gives way when blocks run short, what it costs, and that everybody still arrives."""

from __future__ import annotations

import pytest

from chairlift.request import LEGAL_TRANSITIONS, Request, RequestStatus
from chairlift.scheduler.policy import FCFS
from chairlift.scheduler.preemption import PreemptionRate, candidates, is_pinned
from tests.scheduler.driver import BLOCK, Driver, request


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_latest_arrival_gives_way_and_comes_back_with_its_tokens(depth: int) -> None:
    counter = iter(range(1000, 9999))
    driver = Driver(num_blocks=7, depth=depth, tokens=lambda name: next(counter))
    first, second = request("a", 2 * BLOCK, max_tokens=10), request("b", 2 * BLOCK, max_tokens=10)
    driver.add(first, second)
    seen: list[int] = []
    while driver.scheduler.has_unfinished:
        before = list(second.token_ids)
        out = driver.step()
        assert second.token_ids[: len(before)] == before
        seen += [len(before)] * ("b" in out.preempted)
    assert seen
    assert (first.num_preemptions, second.num_preemptions) == (0, len(seen))
    assert driver.finished == ["a", "b"]
    assert (first.num_output_tokens, second.num_output_tokens) == (10, 10)


def test_a_recompute_is_called_one_and_takes_all_known_tokens() -> None:
    driver = Driver()
    one = request("a", 3, max_tokens=6)
    driver.add(one)
    for _ in range(3):
        driver.step()
    assert driver.scheduler.preempt("a")
    assert (one.status, one.slot, one.num_computed_tokens, one.block_ids) == (RequestStatus.PREEMPTED, -1, 0, [])
    out = driver.step()
    assert [(row.token_ids, row.num_prompt_tokens) for row in out.joined] == [(one.token_ids[:6], 3)]
    assert [(c.start, c.num_tokens, c.samples, c.why) for c in out.chunks] == [(0, 6, True, "recompute")]
    driver.run()
    assert one.num_output_tokens == 6


def test_preemption_needs_progress_in_between() -> None:
    driver = Driver(max_num_batched_tokens=2)
    one = request("a", 5, max_tokens=6)
    driver.add(one)
    driver.step()
    assert driver.scheduler.preempt("a")  # the first time nothing is asked
    driver.step()
    assert not driver.scheduler.preempt("a")
    while one.num_output_tokens < 1:
        driver.step()
    assert driver.scheduler.preempt("a")
    assert not driver.scheduler.preempt("a")  # it does not run
    assert not driver.scheduler.preempt("nobody")
    driver.run()


def test_after_the_most_preemptions_a_request_joins_with_all_it_will_need() -> None:
    driver = Driver(max_preemptions=2)
    one = request("a", 3, max_tokens=18)
    driver.add(one)
    for _ in range(2):
        driver.step()
        driver.step()
        assert driver.scheduler.preempt("a")
    assert is_pinned(one, 2)
    out = driver.step()
    assert [len(row.block_ids[0]) for row in out.joined] == [5]
    driver.step()
    assert not driver.scheduler.preempt("a")
    assert not [blocks for out in driver.run() for blocks in out.new_blocks]


@pytest.mark.parametrize("num_blocks", [6, 8, 11, 17])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("caching", [True, False])
def test_everybody_arrives_however_short_the_blocks(num_blocks: int, depth: int, caching: bool) -> None:
    driver = Driver(num_blocks=num_blocks, depth=depth, caching=caching, max_num_batched_tokens=9, max_preemptions=3)
    requests = [request(f"r{i}", [i % 2] * 3 + [i], max_tokens=9 + i % 5) for i in range(8)]
    driver.add(*requests)
    driver.run(2_000)
    assert [one.num_output_tokens for one in requests] == [9 + i % 5 for i in range(8)]
    assert max(one.num_preemptions for one in requests) <= 3


def test_who_may_be_preempted() -> None:
    requests = [request(name, 4) for name in "abcdefg"]
    for sequence, one in enumerate(requests):
        one.sequence = sequence
    ahead, needy, fresh, stuck, back, pinned, joining = requests
    joining.admitted_at_step = 7
    stuck.num_preemptions, stuck.progress_mark = 1, 4
    back.num_preemptions, back.progress_mark = 1, 3
    pinned.num_preemptions = 5
    assert list(candidates(requests, needy, FCFS, 5, step=7)) == [needy, fresh, back]
    assert FCFS.victim([ahead, back, fresh]) is back
    assert FCFS.victim([]) is None


def _finished(preempted: bool) -> Request:
    one = request("a", 2)
    one.num_preemptions = 3 * preempted
    return one


def test_the_rate_counts_requests_not_preemptions_over_a_window_and_in_total() -> None:
    rate = PreemptionRate(window=60.0)
    assert (rate.total, rate.recent(0.0)) == (0.0, 0.0)
    for now, preempted in [(0.0, True), (10.0, False), (30.0, False), (50.0, True)]:
        rate.finished(_finished(preempted), now)
    assert (rate.total, rate.recent(50.0)) == (0.5, 0.5)
    assert rate.recent(60.0) == 0.5
    assert rate.recent(60.1) == pytest.approx(1 / 3)
    assert rate.recent(100.0) == 1.0
    assert rate.recent(1000.0) == 0.0
    assert rate.total == 0.5


def test_the_scheduler_keeps_the_rate() -> None:
    driver = Driver()
    driver.add(request("a", 3, max_tokens=5), request("b", 3, max_tokens=5))
    driver.step()
    driver.step()
    driver.scheduler.preempt("b")
    driver.run()
    assert driver.scheduler.preemption_rate.total == 0.5
    assert driver.scheduler.num_preemptions == 1


@pytest.mark.parametrize("start", RequestStatus)
@pytest.mark.parametrize("end", RequestStatus)
def test_a_request_changes_along_the_table_only(start: RequestStatus, end: RequestStatus) -> None:
    one = request("a", 2)
    one.status = start
    if end in LEGAL_TRANSITIONS[start]:
        one.move_to(end)
        assert one.status is end
    else:
        with pytest.raises(AssertionError, match=f"{start.name} -> {end.name}"):
            one.move_to(end)


def test_nothing_follows_the_end() -> None:
    assert not LEGAL_TRANSITIONS[RequestStatus.FINISHED]
    assert all(
        RequestStatus.FINISHED in after for status, after in LEGAL_TRANSITIONS.items() if status.value != "finished"
    )
