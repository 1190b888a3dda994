"""Preemption: which request is chosen when blocks run short, what it costs, and that every request still ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from chairlift.base.outputs import FinishReason
from chairlift.core.request import LEGAL_TRANSITIONS, Request, RequestStatus
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.core.scheduler.policy import FCFS
from chairlift.core.scheduler.preemption import PreemptionMode, PreemptionRate, candidates, is_pinned
from tests.core.scheduler.driver import BLOCK, Driver, request


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_latest_arrival_is_preempted_and_returns_with_its_tokens(depth: int) -> None:
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
        if seen and second.short_of_blocks:  # it keeps its row, and the beginning of what it has
            assert second.slot >= 0 and len(second.block_ids[0]) > 0
    assert len(seen) > 1  # it gives up more, but for the same shortage
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert (
        driver.scheduler.num_preemptions,
        driver.scheduler.preemptor.num_tails,
        driver.scheduler.preemptor.num_swaps,
    ) == (1, 1, 0)
    assert driver.finished == ["a", "b"]
    assert (first.num_output_tokens, second.num_output_tokens) == (10, 10)


def lost(out: SchedulerOutput) -> int:
    return out.num_recomputed


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_dropped_tail_is_all_that_is_computed_again(depth: int) -> None:
    driver = Driver(num_blocks=7, depth=depth)
    driver.add(request("a", 2 * BLOCK, max_tokens=10), request("b", 2 * BLOCK, max_tokens=10))
    outs = driver.run()
    again = sum(map(lost, outs))
    assert 0 < again <= 2 * BLOCK
    chunks = [chunk for out in outs for chunk in out.chunks if chunk.why == "recompute"]
    assert chunks and all(chunk.start >= BLOCK for chunk in chunks)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_swapped_blocks_are_not_computed_again(depth: int) -> None:
    driver = Driver(num_blocks=7, num_host_blocks=6, depth=depth, preemption=PreemptionMode("swap"))
    requests = [request("a", 2 * BLOCK, max_tokens=10), request("b", 2 * BLOCK, max_tokens=10)]
    driver.add(*requests)
    outs = driver.run()
    assert driver.scheduler.preemptor.num_swaps == driver.scheduler.num_preemptions == requests[1].num_preemptions > 0
    saved, back = [entry for out in outs for entry in out.swap_out], [entry for out in outs for entry in out.swap_in]
    assert saved and [(group, host) for group, _, host in saved] == [(group, host) for group, host, _ in back]
    assert sum(map(lost, outs)) <= driver.scheduler.preemptor.num_swaps * (
        1 + depth
    )  # what steps in flight computed is dropped
    assert driver.kv.swap_pool.num_used == 0 and not driver.kv.swapped


def test_without_room_in_host_memory_swapping_falls_back_to_recomputing() -> None:
    driver = Driver(num_blocks=7, num_host_blocks=1, preemption=PreemptionMode("swap"))
    driver.add(request("a", 2 * BLOCK, max_tokens=10), request("b", 2 * BLOCK, max_tokens=10))
    outs = driver.run()
    assert (driver.scheduler.preemptor.num_swaps, driver.scheduler.num_preemptions) == (0, 1)
    assert sum(map(lost, outs)) > 0


@pytest.mark.parametrize("ends", ["abort", "finish"])
def test_a_request_that_ends_while_swapped_leaves_nothing_in_host_memory(ends: str) -> None:
    driver = Driver(num_host_blocks=8, preemption=PreemptionMode("swap"))
    driver.add(request("a", 5, max_tokens=9))
    driver.step()
    assert driver.scheduler.preempt("a")
    assert driver.scheduler.requests["a"].status is RequestStatus.SWAPPED
    driver.scheduler.abort("a") if ends == "abort" else driver.scheduler.finish("a", FinishReason.STOP)
    driver.add(request("b", 3, max_tokens=2))
    driver.run()
    assert driver.kv.swap_pool.num_used == 0


class Prices:
    """So many seconds per token and per block."""

    def __init__(self, token: float, block: float) -> None:
        self.token, self.block = token, block

    def recompute_seconds(self, num_tokens: int) -> float:
        return self.token * num_tokens

    def swap_seconds(self, num_blocks: Sequence[int]) -> float:
        return self.block * sum(num_blocks)


@pytest.mark.parametrize(("block", "room", "swaps"), [(0.1, 3, True), (0.1, 1, False), (100.0, 8, False)])
def test_auto_takes_what_costs_less_of_what_there_is_room_for(block: float, room: int, swaps: bool) -> None:
    mode = PreemptionMode("auto", Prices(1.0, block))
    driver = Driver(num_blocks=7, num_host_blocks=room, preemption=mode)
    driver.add(request("a", 2 * BLOCK, max_tokens=10), request("b", 2 * BLOCK, max_tokens=10))
    driver.run()
    assert driver.scheduler.num_preemptions > 0
    assert (driver.scheduler.preemptor.num_swaps > 0) == swaps
    assert (driver.scheduler.preemptor.num_tails > 0) != swaps


def test_a_request_preempted_in_two_parts_is_counted_once() -> None:
    driver = Driver(num_blocks=5, num_host_blocks=3, preemption=PreemptionMode("auto", Prices(1.0, 2.5)))
    driver.add(request("a", BLOCK, max_tokens=10), request("b", BLOCK, max_tokens=10))
    outs = driver.run()
    assert any(out.swap_out for out in outs) and driver.scheduler.preemptor.num_tails == 1
    assert (driver.scheduler.num_preemptions, driver.scheduler.preemptor.num_swaps) == (1, 0)


def test_where_nobody_is_preempted_requests_join_with_room_for_their_longest_answer() -> None:
    driver = Driver(num_blocks=7, preemption=PreemptionMode("none"))
    driver.add(request("a", 2 * BLOCK, max_tokens=9), request("b", 2 * BLOCK, max_tokens=9))
    outs = driver.run()
    assert [len(out.joined) for out in outs if out.joined] == [1, 1]
    assert not any(out.preempted for out in outs)
    assert not driver.scheduler.preempt("a")


def test_where_nobody_is_preempted_beginnings_are_shared_all_the_same() -> None:
    driver = Driver(preemption=PreemptionMode("none"), caching=True)
    first, second = (request(name, [5] * 9) for name in "ab")
    driver.add(first)
    driver.run()
    driver.add(second)
    driver.run()
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 2 * BLOCK)


def test_a_victim_that_keeps_no_block_keeps_no_row() -> None:
    driver = Driver(num_blocks=4)
    first, second = request("a", 2 * BLOCK, max_tokens=4), request("b", 1, max_tokens=3)
    driver.add(first, second)
    while not second.num_preemptions:
        driver.step()
    assert (driver.scheduler.preemptor.num_tails, second.status, second.slot) == (0, RequestStatus.PREEMPTED, -1)
    driver.run()
    assert driver.finished == ["a", "b"]


def test_a_failed_step_drops_the_copies_that_it_made() -> None:
    driver = Driver(num_host_blocks=8, preemption=PreemptionMode("swap"))
    one = request("a", 5, max_tokens=9)
    driver.add(one)
    driver.step()
    driver.scheduler.preempt("a")
    assert one.status is RequestStatus.SWAPPED
    driver.add(request("b", 3, max_tokens=2))
    driver.failing = driver.scheduler.step + 1  # the step that copies
    driver.step()
    assert not driver.kv.swapped
    driver.run()
    assert one.num_output_tokens in (9, 1)  # computed again, or in the step that failed


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
def test_every_request_finishes_however_few_blocks_there_are(num_blocks: int, depth: int, caching: bool) -> None:
    driver = Driver(num_blocks=num_blocks, depth=depth, caching=caching, max_num_batched_tokens=9, max_preemptions=3)
    requests = [request(f"r{i}", [i % 2] * 3 + [i], max_tokens=9 + i % 5) for i in range(8)]
    driver.add(*requests)
    driver.run(2_000)
    assert [one.num_output_tokens for one in requests] == [9 + i % 5 for i in range(8)]
    assert max(one.num_preemptions for one in requests) <= 3


def test_only_running_requests_with_progress_may_be_preempted() -> None:
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
    assert (rate.num_preempted, rate.num_finished, rate.recent(0.0)) == (0, 0, 0.0)
    for now, preempted in [(0.0, True), (10.0, False), (30.0, False), (50.0, True)]:
        rate.finished(_finished(preempted), now)
    assert (rate.num_preempted, rate.num_finished, rate.recent(50.0)) == (2, 4, 0.5)
    assert rate.recent(60.0) == 0.5
    assert rate.recent(60.1) == pytest.approx(1 / 3)
    assert rate.recent(100.0) == 1.0
    assert rate.recent(1000.0) == 0.0
    assert (rate.num_preempted, rate.num_finished) == (2, 4)


def test_the_scheduler_keeps_the_rate() -> None:
    driver = Driver()
    driver.add(request("a", 3, max_tokens=5), request("b", 3, max_tokens=5))
    driver.step()
    driver.step()
    driver.scheduler.preempt("b")
    driver.run()
    rate = driver.scheduler.preemption_rate
    assert (rate.num_preempted, rate.num_finished) == (1, 2)
    assert driver.scheduler.num_preemptions == 1


@pytest.mark.parametrize("start", RequestStatus)
@pytest.mark.parametrize("end", RequestStatus)
def test_a_request_changes_its_status_along_the_table_only(start: RequestStatus, end: RequestStatus) -> None:
    one = request("a", 2)
    one.status = start
    if end in LEGAL_TRANSITIONS[start]:
        one.move_to(end)
        assert one.status is end
    else:
        with pytest.raises(AssertionError, match=f"{start.name} -> {end.name}"):
            one.move_to(end)


def test_a_finished_request_changes_its_status_no_more() -> None:
    assert not LEGAL_TRANSITIONS[RequestStatus.FINISHED]
    assert all(
        RequestStatus.FINISHED in after for status, after in LEGAL_TRANSITIONS.items() if status.value != "finished"
    )


def test_where_nobody_is_preempted_a_window_is_all_that_answers_keep() -> None:
    """The blocks for a whole step of a prompt are not reserved any more once the prompt is computed."""
    window = Driver(windows=(32,), num_blocks=201, preemption=PreemptionMode("none"), max_num_batched_tokens=256)
    for name in "abcdef":
        window.add(request(name, 40, max_tokens=300))
    assert max(len(out.decode_rows) for out in window.run(2000)) >= 5
