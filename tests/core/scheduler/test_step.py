"""The rows of a step: first decodes, then chunks, then new requests, within one budget of tokens."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from chairlift.base.outputs import FinishReason
from chairlift.core.request import Request, RequestStatus
from chairlift.core.scheduler.output import FAILED_ROW, SchedulerOutput
from chairlift.errors import InvariantError, PromptTooLongError, RequestError
from tests.core.scheduler.driver import BLOCK, Driver, request


def work(out: SchedulerOutput) -> list[tuple[str, int]]:
    """(request, tokens) of every row, in order."""
    decodes = [(name, 1) for name, _ in out.decode_rows]
    return decodes + [(name, chunk.num_tokens) for name, chunk in zip(out.chunk_ids, out.chunks, strict=True)]


def test_a_step_serves_decodes_then_chunks_then_newcomers() -> None:
    driver = Driver(max_num_batched_tokens=10)
    driver.add(request("a", 3))
    assert work(driver.step()) == [("a", 3)]
    driver.add(request("b", 12), request("c", 5))
    assert work(driver.step()) == [("a", 1), ("b", 7), ("c", 2)]  # three quarters in their order, the rest by size
    assert work(driver.step()) == [("a", 1), ("b", 5), ("c", 3)]
    assert work(driver.step()) == [("a", 1), ("b", 1), ("c", 1)]


@pytest.mark.parametrize("budget", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_budget_holds_in_every_step_and_everything_is_computed_once(budget: int, depth: int) -> None:
    driver = Driver(max_num_batched_tokens=budget, depth=depth, max_num_seqs=4)
    driver.add(*[request(f"r{i}", 1 + 5 * i, max_tokens=3 + i) for i in range(6)])
    outs = driver.run()
    assert max(out.num_tokens for out in outs) <= budget
    assert all(out.num_tokens == sum(count for _, count in work(out)) for out in outs)
    # Depth d computes up to d tokens beyond an end that only a token can tell; a length ends exactly.
    assert sum(out.num_tokens for out in outs) == sum(1 + 5 * i + 3 + i - 1 for i in range(6))
    assert sorted(driver.finished) == [f"r{i}" for i in range(6)]


def test_a_budget_of_one_token_gives_each_its_turn() -> None:
    driver = Driver(max_num_batched_tokens=1)
    driver.add(request("a", 2, max_tokens=2), request("b", 1, max_tokens=1))
    assert [work(out) for out in driver.run() if out.num_tokens] == [[("a", 1)], [("a", 1)], [("a", 1)], [("b", 1)]]


def test_chunks_say_where_they_start_end_and_whether_they_sample() -> None:
    driver = Driver(max_num_batched_tokens=4)
    driver.add(request("a", 10, max_tokens=1))
    chunks = [chunk for out in driver.run() for chunk in out.chunks]
    assert [(c.start, c.end, c.samples, c.why) for c in chunks] == [
        (0, 4, False, "prefill"),
        (4, 8, False, "prefill"),
        (8, 10, True, "prefill"),
    ]


def test_rows_are_limited_and_used_again() -> None:
    driver = Driver(max_num_seqs=2)
    driver.add(*[request(f"r{i}", 2, max_tokens=2 + i) for i in range(4)])
    outs = driver.run()
    assert max(len(work(out)) for out in outs) == 2
    assert {row.slot for out in outs for row in out.joined} == {0, 1}
    left = [slot for out in outs for slot in out.left]
    assert len(left) >= 2
    assert driver.finished == ["r0", "r1", "r2", "r3"]


def test_tokens_reach_the_right_request() -> None:
    driver = Driver(max_num_batched_tokens=5, tokens=lambda name: ord(name))
    requests = [request(name, 1 + 3 * i, max_tokens=2 + i) for i, name in enumerate("abcd")]
    driver.add(*requests)
    driver.run()
    for one in requests:
        assert one.token_ids[one.num_prompt_tokens :] == [ord(one.request_id)] * (
            one.max_total_tokens - len(one.token_ids[: one.num_prompt_tokens])
        )


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stop_token_ends_and_what_was_computed_ahead_is_dropped_and_counted(depth: int) -> None:
    driver = Driver(depth=depth)
    one = request("a", 3, max_tokens=20, stop_token_ids=frozenset({7}))
    driver.add(one)
    driver.run()
    assert one.token_ids[3:] == [7]
    assert (one.finish_reason, one.stop_reason) == (FinishReason.STOP, 7)
    assert driver.scheduler.num_late == depth


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_no_token_is_computed_beyond_the_length_limit(depth: int) -> None:
    driver = Driver(depth=depth)
    one = request("a", 3, max_tokens=5)
    driver.add(one)
    assert sum(out.num_tokens for out in driver.run()) == 3 + 5 - 1
    assert one.finish_reason is FinishReason.LENGTH
    assert driver.scheduler.num_late == 0


def test_a_step_with_nothing_to_do_changes_nothing() -> None:
    driver = Driver()
    out = driver.step()
    assert (out.num_tokens, out.step, driver.scheduler.step) == (0, 1, 0)
    assert driver.scheduler.next_event(0.0) is None


def test_a_request_that_can_never_fit_is_refused_with_both_numbers() -> None:
    driver = Driver(num_blocks=5)
    driver.add(request("a", 10, max_tokens=7))
    with pytest.raises(PromptTooLongError, match=r"room for 17 tokens \(10 of the prompt and 7.* holds 16"):
        driver.add(request("b", 10, max_tokens=8))
    driver.run()


def test_an_id_is_used_once_at_a_time() -> None:
    driver = Driver()
    driver.add(request("a", 2))
    with pytest.raises(RequestError, match="'a' is already in use"):
        driver.add(request("a", 2))
    driver.run()
    driver.add(request("a", 2))
    driver.run()
    assert driver.finished == ["a", "a"]


# -- one row, or one step, fails ---------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_row_without_a_token_ends_alone(depth: int) -> None:
    driver = Driver(depth=depth, tokens=lambda name: FAILED_ROW if name == "b" else 5, caching=True)
    requests = [request(name, 5, max_tokens=6) for name in "abc"]
    driver.add(*requests)
    driver.run()
    assert [one.finish_reason for one in requests] == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
    assert requests[1].num_output_tokens == 0
    assert [len(one.token_ids) for one in requests] == [11, 5, 11]
    probe = request("probe", requests[1].token_ids)
    driver.add(probe)
    driver.run()
    assert probe.num_cached_tokens == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_step_ends_its_requests_only(depth: int) -> None:
    driver = Driver(depth=depth, max_num_batched_tokens=8, caching=True)
    requests = [request(name, 6, max_tokens=5) for name in "abc"]
    driver.add(*requests)
    out = driver.step(fail=True)  # a whole, and the beginning of b
    assert work(out) == [("a", 6), ("b", 2)]
    driver.run()
    assert [one.finish_reason for one in requests] == [FinishReason.ERROR, FinishReason.ERROR, FinishReason.LENGTH]
    assert requests[2].num_output_tokens == 5


# -- abort -------------------------------------------------------------------------------------------------------


def _running(driver: Driver, one: Request) -> None:
    driver.step()
    assert one.status is RequestStatus.RUNNING


def _preempted(driver: Driver, one: Request) -> None:
    driver.step()
    driver.step()
    assert driver.scheduler.preempt("a")
    assert one.status is RequestStatus.PREEMPTED


def _half_computed(driver: Driver, one: Request) -> None:
    driver.step()
    assert one.num_computed_tokens > 0
    assert not one.decoding or one.num_output_tokens


_STATES: dict[str, Any] = {
    "waiting": lambda driver, one: None,
    "running": _running,
    "preempted": _preempted,
    "half computed": _half_computed,
}
_MEMBERSHIPS = ("continuous", "static", "dynamic")
# A static batch is never preempted.
_CASES = [(state, name) for state in _STATES for name in _MEMBERSHIPS if (state, name) != ("preempted", "static")]


@pytest.mark.parametrize(("state", "batching"), _CASES)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_abort_frees_everything_in_every_state(state: str, depth: int, batching: str) -> None:
    budget = 4 if state == "half computed" else 64
    driver = Driver(depth=depth, batching=batching, max_num_batched_tokens=budget, max_num_seqs=2)
    one, other = request("a", 9, max_tokens=9), request("b", 3, max_tokens=4)
    driver.add(one, other)
    _STATES[state](driver, one)
    gone = driver.scheduler.abort("a", 1.0)
    assert gone == [one]
    assert (one.status, one.finish_reason) == (RequestStatus.FINISHED, FinishReason.ABORT)
    driver.scheduler.check_invariants()
    assert driver.scheduler.abort("a") == []
    tokens = list(one.token_ids)
    driver.run()
    assert one.token_ids == tokens
    assert (other.finish_reason, other.num_output_tokens) == (FinishReason.LENGTH, 4)
    assert driver.finished == ["b"]


def test_an_abort_of_an_unknown_id_does_nothing() -> None:
    driver = Driver()
    driver.add(request("ab", 3))
    assert driver.scheduler.abort("a") == []
    driver.run()
    assert driver.finished == ["ab"]


# -- several answers to one prompt -------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("budget", [3, 64])
def test_siblings_wait_for_the_prompt_and_share_it(depth: int, budget: int) -> None:
    driver = Driver(depth=depth, max_num_batched_tokens=budget)
    first = request("a#0", list(range(10)), max_tokens=12)
    others = [request(f"a#{i}", list(range(10)), max_tokens=12, source=first) for i in (1, 2)]
    driver.add(first, *others)
    outs = driver.run()
    chunks = [(name, chunk) for out in outs for name, chunk in zip(out.chunk_ids, out.chunks, strict=True)]
    assert sum(chunk.num_tokens for name, chunk in chunks if name == "a#0") == 10
    for one in others:
        assert [chunk.start for name, chunk in chunks if name == one.request_id] == [9]
    copies = [copy for out in outs for copy in out.copies]
    assert len(copies) == 2
    assert sorted(driver.finished) == ["a#0", "a#1", "a#2"]


@pytest.mark.parametrize("ended_after", [0, 1, 2])
def test_siblings_go_on_when_the_first_is_aborted(ended_after: int) -> None:
    driver = Driver(max_num_batched_tokens=6)
    first = request("a#0", list(range(10)), max_tokens=12)
    others = [request(f"a#{i}", list(range(10)), max_tokens=3, source=first) for i in (1, 2)]
    driver.add(first, *others)
    for _ in range(ended_after):
        driver.step()
    driver.scheduler.abort("a#0")
    driver.scheduler.abort("a#2")
    driver.run()
    assert driver.finished == ["a#1"]
    assert others[0].num_output_tokens == 3


# -- steady decode -----------------------------------------------------------------------------------------------


class _Recorded(Request):
    """Notes every attribute that is written, but for the two that say which beat it advances with, and every comparison
    with another object."""

    __slots__ = ("writes",)
    writes: list[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        object.__setattr__(self, "writes", [])
        super().__init__(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        self.writes.append(name)
        object.__setattr__(self, name, value)

    def __eq__(self, other: object) -> bool:
        self.writes.append("==")
        return self is other

    __hash__ = Request.__hash__


class _Tokens(list[int]):
    """Tokens of a step. Reading all of them is allowed, searching for a certain token is not."""

    def __contains__(self, token: object) -> bool:
        raise AssertionError(f"a steady step searches its tokens for {token!r}")


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_steady_step_touches_no_request(depth: int) -> None:
    driver = Driver(depth=depth, max_num_seqs=4)
    requests = [_Recorded(f"r{i}", list(range(BLOCK)), max_tokens=50) for i in range(3)]
    driver.add(*requests)
    for _ in range(2 + depth):
        driver.step()
    steady = 0
    for _ in range(12):
        for one in requests:
            one.writes.clear()
        before = [(len(one.token_ids), one.num_computed_tokens) for one in requests]
        opens_a_block = requests[0].num_computed_tokens % BLOCK == 0
        driver.flights = deque((out, _Tokens(tokens)) for out, tokens in driver.flights)
        out = driver.step()
        assert [(len(one.token_ids), one.num_computed_tokens) for one in requests] == [
            (t + 1, c + 1) for t, c in before
        ]
        assert bool(out.new_blocks) == opens_a_block
        assert (out.left, out.joined, out.copies, out.chunks, out.decode_slots) == ([], [], [], [], None)
        if not opens_a_block:
            steady += 1
            assert [one.writes for one in requests] == [[], [], []]
    assert steady == 9


def test_a_prompt_is_shared_while_it_is_answered_and_the_answer_by_the_turn_that_follows() -> None:
    driver = Driver(caching=True)
    first, beside = (request(name, [*range(9)], max_tokens=12) for name in "ab")
    driver.add(first)
    driver.step()
    driver.add(beside)
    driver.run()
    assert (first.num_cached_tokens, beside.num_cached_tokens) == (0, 2 * BLOCK)
    turn = request("c", [*first.token_ids, 1, 2])
    driver.add(turn)
    driver.run()
    assert turn.num_cached_tokens == 5 * BLOCK == len(first.token_ids) // BLOCK * BLOCK


def test_the_audit_notices_contradictory_counts() -> None:
    driver = Driver(max_num_seqs=1)
    one, two = request("a", 3), request("b", 3)
    driver.add(one, two)
    driver.step()
    driver.scheduler.batch.num_computed_tokens += 1
    with pytest.raises(InvariantError, match="3 tokens are computed, but 4 are counted"):
        driver.scheduler.check_invariants()
    driver.scheduler.batch.num_computed_tokens -= 1
    driver.scheduler.waiting.remove(two)
    with pytest.raises(InvariantError, match="a request is lost"):
        driver.scheduler.check_invariants()
    driver.scheduler.batch.free_slots.append(one.slot)
    with pytest.raises(InvariantError, match="are not all rows, once each"):
        driver.scheduler.check_invariants()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_that_joined_in_a_failed_step_waits_for_another(depth: int) -> None:
    driver = Driver(
        num_blocks=9,
        num_host_blocks=8,
        batching="static",
        caching=True,
        offload=True,
        depth=depth,
        max_num_batched_tokens=2,
        max_num_seqs=2,
    )
    for name in ("a", "b", "c"):  # the third takes the blocks of the other two
        driver.add(request(name, 30 if name == "c" else 10, max_tokens=1))
        driver.run()
    again = [request(f"another {name}", [100 * ord(name) + i for i in range(10)], max_tokens=1) for name in "ab"]
    driver.add(*again)
    out = driver.step(fail=True)
    assert [row.request_id for row in out.joined] == ["another a", "another b"] and len(out.swap_in) == 4
    assert out.chunk_ids == ["another a"], "there is no budget for the other, which begins with what comes back"
    outs = driver.run()
    assert [one.finish_reason for one in again] == [FinishReason.ERROR, FinishReason.LENGTH]
    assert sum(len(out.swap_in) for out in outs) == 2, "what was to come back for it comes once more"
