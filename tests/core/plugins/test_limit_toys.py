"""Toy examples of the published budgets, limits of the batch, and memberships. The values are computed by hand."""

from __future__ import annotations

import pytest

from chairlift.core.plugins.kairos import Kairos
from chairlift.core.plugins.lprs import LprsApc
from chairlift.core.plugins.past_future import PastFuture
from chairlift.core.plugins.tensorrt import GuaranteedNoEvict, MaxUtilization
from chairlift.core.plugins.waiting_ratio import WaitingRatio
from chairlift.core.request import Service
from chairlift.core.scheduler.costs import Costs
from chairlift.core.scheduler.prefill_mode import Turn, prefill_mode_from_name
from tests.core.plugins.toys import SHARES, KnownView, LinearModel, started
from tests.core.scheduler.driver import Driver, request

both_shares = pytest.mark.parametrize("share", SHARES)
QUEUE_DELAY = "chairlift.core.plugins.queue_delay:QueueDelay"


@both_shares
@pytest.mark.parametrize(("sizes", "joined"), [([50, 50, 50], 2), ([200, 200], 1)])
def test_kairos_fills_the_gap_below_the_pace(sizes: list[int], joined: int, share: float) -> None:
    """A step takes 10 + rows + 0.01 * positions ms: 17 with 6 rows and 100 positions. Below the target of 20 fit two
    more rows of 50 positions, or one of 200."""

    class Paced(Kairos):
        seconds_per_token = 20.0  # ms, as the times of the model

    costs = Costs([1], LinearModel(10.0, 0.01, 0.0))
    drive = Driver(policy=Paced(), policy_share=share, costs=costs, num_blocks=400, max_num_seqs=16)
    drive.scheduler.batch.token_budget = drive.scheduler.batch.max_tokens = 4096
    drive.add(*(request(f"r{number}", 15 + (number > 1), 40) for number in range(6)))
    drive.step()
    assert len(drive.scheduler.running) == 6
    running = sum(len(each.token_ids) for each in drive.scheduler.running.values())
    assert running == 100  # with the first tokens
    drive.add(*(request(f"new{number}", size, 9) for number, size in enumerate(sizes)))
    assert len(drive.step().joined) == joined
    drive.run()


@pytest.mark.parametrize(("overflow", "tokens"), [(1.0, 256), (10.0, 192)])
def test_lprs_takes_the_budget_of_least_penalty(overflow: float, tokens: int) -> None:
    """5 + rows + 0.1 p ms with 10 rows, target 40, grid 64: 256 tokens take 40.6 ms, 192 take 34.2 ms."""

    class Asked(LprsApc):
        target_seconds = 40.0

    Asked.overflow = overflow
    policy = Asked()
    drive = Driver(
        policy=policy,
        policy_share=1.0,
        costs=Costs([1], LinearModel(5.0, 0.0, 0.1)),
        num_blocks=2000,
        max_num_batched_tokens=2048,
        max_num_seqs=16,
        max_model_len=2048,
    )
    drive.add(*(request(f"r{number}", 4, 20) for number in range(10)))
    while drive.scheduler.decodes.count < 10:
        drive.step()
    drive.add(request("new", 1000))
    out = drive.step()
    assert (out.num_decodes, [chunk.num_tokens for chunk in out.chunks]) == (10, [tokens])


def test_apc_gives_no_small_chunks_while_another_prompt_progresses() -> None:
    needs = [(request("A", 100), 100), (request("B", 30), 30), (request("C", 200), 200)]
    policy = LprsApc()
    for one, _ in needs:
        policy.queued(one, 0.0)
    keys = {"B": 30, "A": 100, "C": 200}
    assert sorted(keys, key=lambda name: policy.keys[name]) == ["B", "A", "C"]
    shares = {one.request_id: tokens for one, tokens in policy.share(needs, 160)}
    assert shares == {"B": 30, "A": 100}  # C would get 30 of 200 tokens, below 64
    shares = {one.request_id: tokens for one, tokens in policy.share(needs[2:], 30)}
    assert shares == {"C": 30}  # nothing else progresses


@both_shares
def test_past_future_admits_by_the_peak(share: float) -> None:
    """(held, left): A (10, 6), B (4, 2): peak 18. With C (5, 8): 27. With D (8, 8): 41, above the 30 of the cache. A
    reservation of 16 + 6 + 13 = 35 would refuse C."""
    sizes = {"A": (10, 6), "B": (4, 2), "C": (5, 8), "D": (8, 8), "E": (1, 1)}
    requests = {
        name: request(name, held, left, service=Service(predicted_tokens=left)) for name, (held, left) in sizes.items()
    }
    policy = PastFuture()
    view = KnownView(capacity=30)
    peaks = [policy.peak([requests[name] for name in names], view) for names in ("AB", "ABC", "ABCD")]
    assert peaks == [18, 27, 41]
    policy.view = view  # type: ignore[attr-defined]
    drive = Driver(policy=policy, policy_share=share)
    drive.add(*requests.values())
    assert started([drive.step()]) == ["A", "B", "C"]  # D ends the pass, so E waits as well
    assert "policy" in {out.held_up_by for out in drive.run()}


def test_past_future_draws_the_rest_from_longer_answers() -> None:
    one = request("r", 4, 100)
    one.token_ids += [7] * 10
    view = KnownView(recent=[3, 8, 25, 10])
    assert PastFuture().rest(one, view) == 15


@both_shares
def test_no_evict_reserves_the_longest_answer(share: float) -> None:
    """10 blocks of 4 tokens, and three requests that may need 8 of them: one at a time."""
    drive = Driver(policy=GuaranteedNoEvict(), policy_share=share, num_blocks=11)
    drive.add(*(request(name, 8, 24) for name in "ABC"))
    most = 0
    while drive.scheduler.has_unfinished:
        drive.step()
        most = max(most, len(drive.scheduler.running))
    assert (most, drive.scheduler.num_preemptions) == (1, 0)


@both_shares
def test_max_utilization_pauses_the_request_that_started_last(share: float) -> None:
    """All three join. When they hold 9 of 10 blocks and need 12, the third is paused."""
    drive = Driver(policy=MaxUtilization(), policy_share=share, num_blocks=11)
    drive.add(*(request(name, 8, 24) for name in "ABC"))
    drive.step()
    assert len(drive.scheduler.running) == 3
    while not (out := drive.step()).preempted_for:
        assert drive.kv.counts().used <= 9
    assert set(out.preempted_for) == {"C"}
    drive.run()


def test_sarathi_is_the_mode_mixed() -> None:
    """8 tokens per step, 3 decode rows, prompts of 10 and 3: steps of 3 + 5, 3 + 5 and 4 + 3."""
    mode = prefill_mode_from_name("mixed")
    drive = Driver(prefill_mode=mode, max_num_batched_tokens=8, policy_share=1.0)
    drive.add(*(request(f"r{number}", 2, 40) for number in range(3)))
    drive.step()
    drive.add(request("P", 10), request("Q", 3))
    outs = [drive.step() for _ in range(3)]
    assert [(out.num_decodes, [chunk.num_tokens for chunk in out.chunks]) for out in outs] == [
        (3, [5]),
        (3, [5]),
        (4, [3]),
    ]
    assert [[chunk.samples for chunk in out.chunks] for out in outs] == [[0], [1], [1]]


def waits_and_joins(arrivals: list[int], share: float) -> list[tuple[int, int]]:
    drive = Driver(
        batching=QUEUE_DELAY, batch_wait_ms=5.0, preferred_sizes=(4,), policy_share=share, max_num_seqs=4, num_blocks=99
    )
    found = []
    for ms in range(12):
        drive.now = ms / 1000
        if ms in arrivals:
            drive.add(request(f"r{ms}", 4, 3, arrival_time=drive.now))
        if joined := drive.step().joined:
            found.append((ms, len(joined)))
    drive.run()
    return found


@both_shares
def test_queue_delay_fires_at_the_preferred_size_or_the_delay(share: float) -> None:
    assert waits_and_joins([0, 1, 2], share) == [(5, 3)]
    assert waits_and_joins([0, 1, 2, 3], share) == [(3, 4)]


@both_shares
def test_running_requests_go_on_while_newcomers_wait_for_each_other(share: float) -> None:
    drive = Driver(batching=QUEUE_DELAY, batch_wait_ms=5.0, policy_share=share)
    drive.add(request("A", 4, 20))
    drive.now = 0.005
    assert started([drive.step()]) == ["A"]
    drive.add(request("B", 4, 20, arrival_time=0.005))
    steps = []
    for ms in (6, 8, 9):
        drive.now = ms / 1000
        steps.append(drive.step())
    assert [(out.num_decodes, len(out.joined), out.held_up_by) for out in steps] == [(1, 0, "batch")] * 3
    drive.now = 0.010
    assert started([drive.step()]) == ["B"]
    drive.run()


@both_shares
def test_waiting_ratio_pauses_answers_only_for_enough_prompts(share: float) -> None:
    """With 10 decode rows, 3 waiting requests are worth a pause, and 2 are after 20 steps."""
    mode = prefill_mode_from_name("chairlift.core.plugins.waiting_ratio:WaitingRatio")
    assert mode.name == WaitingRatio.name and isinstance(WaitingRatio().turn(KnownView()), Turn)
    drive = Driver(prefill_mode=mode, policy_share=share, max_num_seqs=16, num_blocks=400)
    drive.add(*(request(f"r{number}", 2, 60) for number in range(10)))
    drive.step()
    drive.add(request("a", 4), request("b", 4))
    waited = 0
    while not (out := drive.step()).joined:
        assert out.num_decodes == 10
        waited += 1
    assert (waited, out.num_decodes, len(out.joined)) == (20, 0, 2)
    drive.run()
