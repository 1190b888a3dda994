"""Leases of pauses: whose blocks are kept, for how long, and until when."""

from __future__ import annotations

import pytest

from chairlift.base.outputs import FinishReason
from chairlift.core.kv_cache.eviction.continuum import Continuum
from chairlift.core.kv_cache.eviction.gaps import MOST_SECONDS, Gaps, best_hold
from chairlift.core.kv_cache.eviction.lease import LeaseRule
from chairlift.core.kv_cache.eviction.leases import Lease
from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.request import Request, RequestStatus, Service
from tests.core.kv_cache.make import BLOCK, admit, compute, manager, request


def cache(num_blocks: int = 41, rule: LeaseRule | None = None) -> tuple[KVCacheManager, LeaseRule]:
    rule = rule or LeaseRule()
    kv = manager(num_blocks, eviction=rule)
    rule.prices.compute_seconds = lambda num_tokens, begin: num_tokens / 100
    return kv, rule


def run(kv: KVCacheManager, one: Request, ends: FinishReason = FinishReason.STOP) -> list[int]:
    """Run a request to its end. Returns its tokens."""
    kv.arrived(one)
    admit(kv, one)
    compute(kv, one)
    kv.publish_confirmed(one)
    one.finish_reason = ends
    kv.tables.free(one, -1)
    one.num_computed_tokens = 0
    one.move_to(RequestStatus.FINISHED)
    return one.token_ids


def later(name: str, tokens: list[int], arrival: float, **settings: object) -> Request:
    made = request(name, tokens, **settings)
    made.arrival_time = arrival
    return made


def leased(rule: LeaseRule) -> int:
    return rule.orders[0].num_leased


# -- how long ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gaps", "saving", "cost", "hold"),
    [
        ([], 10.0, 2.0, 5.0),  # an unknown tool: until the cost is the saving
        ([], 10.0, 0.0, MOST_SECONDS),
        ([], 1e9, 1.0, MOST_SECONDS),
        ([1.0], 10.0, 2.0, 1.1),
        ([10.0], 10.0, 2.0, 0.0),  # it would cost 22 and save 10
        ([1.0, 1.0, 1.0, 20.0], 10.0, 1.0, 1.1),  # 7.5 - 1.0 is more than 10 - 5.8
        ([1.0, 2.0, 3.0, 4.0], 10.0, 0.1, 4.4),
        ([400.0], 1e6, 0.0, 0.0),  # longer than any lease
        ([1.0, 400.0], 10.0, 0.0, 1.1),
    ],
)
def test_the_hold_saves_most(gaps: list[float], saving: float, cost: float, hold: float) -> None:
    assert best_hold(gaps, saving, cost) == pytest.approx(hold)


def test_blocks_cost_only_until_the_next_turn_comes() -> None:
    gaps = [1.0] * 3 + [6.0]
    assert best_hold(gaps, 10.0, 0.9) == pytest.approx(6.6)  # 10 - 0.9 x 2.25 is more than 7.5 - 0.9
    assert best_hold(gaps, 10.0, 2.1) == pytest.approx(1.1)


def test_while_few_pauses_are_known_open_ones_count_as_twice_their_age() -> None:
    """The short pauses end first. Alone they would make every lease too short."""
    kv, rule = cache(201)
    for number in range(4):
        run(kv, request(f"slow {number}", 8))
        rule.paused(f"slow {number}", ["search"])
    rule.gaps.observe("", ["search"], 1.0)
    rule.now = 10.0
    run(kv, request("agent", 40))
    rule.paused("agent", ["search"])
    turn = rule.turns.paused[-1]
    assert turn.until == pytest.approx(10.0 + 1.1 * 20.0)
    assert rule.pauses_of(turn) == [1.0, 20.0, 20.0, 20.0, 20.0]
    for _ in range(16):
        rule.gaps.observe("", ["search"], 1.0)
    assert rule.pauses_of(turn) == [1.0] * 17


def test_pauses_are_known_by_tenant_and_tool() -> None:
    gaps = Gaps()
    for seconds in (3.0, 1.0):
        gaps.observe("a", ["search"], seconds)
    gaps.observe("a", ["read", "search", "read"], 9.0)
    gaps.observe("a", ["read"], 0.5)
    assert gaps.of("a", ["search"]) == [1.0, 3.0]
    assert gaps.of("a", ["search", "read"]) == [9.0]
    assert gaps.of("b", ["search"]) == []
    assert gaps.of("a", ["read", "write", "search", "write"]) == [1.0, 3.0]  # never together: the slowest known one
    assert gaps.by_tool() == {"search": (2, 2.0), "read + search": (1, 9.0), "read": (1, 0.5)}


def test_only_the_newest_pauses_of_the_newest_tools_are_kept() -> None:
    gaps = Gaps()
    for number in range(3000):
        gaps.observe("", [f"tool {number}"], 1.0)
        gaps.observe("", ["known"], float(number))
    assert len(gaps.by_tool()) == 1024
    assert gaps.of("", ["known"]) == [float(number) for number in range(2936, 3000)]


# -- a turn ------------------------------------------------------------------------------------------------------------


def test_a_turn_with_calls_keeps_its_blocks_against_a_flood() -> None:
    kv, rule = cache()
    said = run(kv, request("agent", 40))
    run(kv, request("other", 40))
    rule.paused("agent", ["search"])
    assert (leased(rule), rule.num_pauses, rule.num_leases) == (10, 1, 1)
    for number in range(20):
        rule.now += 1.0
        run(kv, request(f"flood {number}", 80))
        kv.check_invariants([])
    back = later("back", [*said, 1], rule.now)
    assert kv.num_shared(back) == 40
    run(kv, back)
    assert (rule.num_returns, rule.found) == (1, {"kept": 1})
    assert rule.gaps.of("", ["search"]) == [20.0]


def test_a_lease_ends_when_the_pause_is_longer_than_known_ones() -> None:
    kv, rule = cache()
    rule.gaps.observe("", ["search"], 5.0)
    said = run(kv, request("agent", 40))
    rule.paused("agent", ["search"])
    rule.now = 5.4
    run(kv, request("flood", 100))
    assert kv.num_shared(later("back", [*said, 1], 5.4)) == 40
    rule.now = 5.6
    run(kv, request("flood again", 120))
    assert kv.num_shared(later("back", [*said, 1], 5.6)) < 40


def test_a_lease_keeps_no_request_waiting() -> None:
    kv, rule = cache(21)
    run(kv, request("agent", 40))
    rule.paused("agent", ["search"])
    assert leased(rule) == 10
    admit(kv, request("large", 80))
    assert leased(rule) == 0


@pytest.mark.parametrize("ends", [FinishReason.ABORT, FinishReason.ERROR])
def test_a_turn_that_did_not_end_well_begins_no_pause(ends: FinishReason) -> None:
    kv, rule = cache()
    run(kv, request("agent", 40), ends)
    rule.paused("agent", ["search"])
    assert (rule.num_pauses, leased(rule)) == (0, 0)


def test_an_unknown_turn_or_one_without_calls_begins_no_pause() -> None:
    kv, rule = cache()
    run(kv, request("agent", 40))
    rule.paused("nobody", ["search"])
    rule.paused("agent", [])
    assert rule.num_pauses == 0
    rule.paused("agent", ["search"])
    rule.paused("agent", ["search"])  # said twice
    assert rule.num_pauses == 1


def test_a_pause_is_learnt_although_the_blocks_were_evicted() -> None:
    kv, rule = cache(21)
    said = run(kv, request("agent", 40))
    rule.paused("agent", ["search"])
    run(kv, request("large", 80))
    run(kv, later("back", [*said, 1], 7.0))
    assert rule.gaps.of("", ["search"]) == [7.0]
    assert (rule.num_returns, rule.found) == (1, {"displaced": 1})


def test_the_blocks_of_a_turn_that_waits_in_the_queue_are_kept() -> None:
    kv, rule = cache()
    rule.gaps.observe("", ["search"], 5.0)
    said = run(kv, request("agent", 40))
    rule.paused("agent", ["search"])
    back = later("back", [*said, 1], 5.2)
    kv.arrived(back)
    rule.now = 30.0
    run(kv, request("flood", 110))
    assert kv.num_shared(back) == 40


def test_a_new_turn_releases_the_branch_that_only_the_older_turn_used() -> None:
    kv, rule = cache()
    one = request("agent", 20, max_tokens=30)
    kv.arrived(one)
    admit(kv, one, 48)
    compute(kv, one)
    one.token_ids += range(1, 20)  # the answer, whose beginning the next prompt leaves out
    one.num_computed_tokens = 40
    kv.publish(one, 40)
    one.finish_reason = FinishReason.STOP
    kv.tables.free(one, -1)
    rule.paused("agent", ["search"])
    assert leased(rule) == 10
    run(kv, request("same", one.token_ids[:20]))  # the same prompt again is no next turn
    assert (leased(rule), rule.num_returns) == (10, 0)
    back = later("back", [*one.token_ids[:20], *range(500, 512)], 1.0)
    run(kv, back)
    assert rule.num_returns == 1
    assert leased(rule) == 0  # the blocks that the new turn has used wait for its own pause
    kv.check_invariants([])


def test_a_conversation_of_another_salt_is_not_continued() -> None:
    kv, rule = cache()
    said = run(kv, request("agent", 40, cache_salt="one"))
    rule.paused("agent", ["search"])
    run(kv, later("back", [*said, 1], 3.0, cache_salt="two"))
    assert rule.num_returns == 0
    run(kv, later("really", [*said, 1], 4.0, cache_salt="one"))
    assert rule.num_returns == 1


def test_each_tenant_has_its_share() -> None:
    kv, rule = cache()
    for name, tenant in (("one", "a"), ("two", "b"), ("three", "b")):
        run(kv, request(name, 32, service=Service(tenant=tenant)))
        rule.paused(name, ["search"])
    assert rule.orders[0].held_by() == {"a": 8, "b": 12}


def test_the_price_is_that_of_hits_in_the_older_half() -> None:
    kv, rule = cache(21)
    assert rule.price() == 0.0
    said = run(kv, request("old", 40))
    rule.now = 1.0
    run(kv, request("flood", 60))  # evicts
    assert rule.price() == 0.0
    rule.now = 2.0
    run(kv, later("again", [*said, 1], 2.0))
    assert rule.price() > 0.0
    rule.now = 100.0
    assert rule.price() == 0.0  # nothing was evicted for a minute


def test_the_saving_is_the_cheaper_of_computing_and_loading() -> None:
    kv, rule = cache()
    run(kv, request("agent", 40))
    turn = rule.turns.pause("agent", ["search"], BLOCK)
    assert turn is not None
    assert rule.saving(turn) == 0.41
    rule.prices.load_seconds = lambda num_tokens: num_tokens / 1000
    assert rule.saving(turn) == 0.041


def test_blocks_that_the_next_turn_does_not_read_get_no_lease() -> None:
    rule = LeaseRule()
    kv = manager(41, None, 8, max_step_tokens=64, eviction=rule)
    run(kv, request("agent", 40))
    rule.paused("agent", ["search"])
    assert [order.num_leased for order in rule.orders] == [10, 2]


def test_continuum_keeps_the_blocks_of_fast_and_unknown_tools_for_two_seconds() -> None:
    kv, rule = cache(rule=Continuum())
    ends = []
    for name, seconds in (("unknown", None), ("fast", 1.5), ("slow", 2.5)):
        if seconds is not None:
            rule.gaps.observe("", [name], seconds)
        run(kv, request(name, 8))
        rule.paused(name, [name])
        ends.append(max((lease.until for lease in rule.orders[0]._leases.values()), default=0.0))
        for block in list(rule.orders[0]._leases):
            rule.orders[0].end(block, rule.orders[0]._leases[block].turn)
    assert ends == [2.0, 2.0, 0.0]


def test_the_lease_of_a_class_and_that_of_a_pause_are_both_kept() -> None:
    kv, rule = cache()
    one = request("agent", 40, service=Service(retention=2))
    run(kv, one)
    assert leased(rule) == 10
    rule.paused("agent", ["search"])
    assert set(rule.orders[0]._leases.values()) == {Lease(3, MOST_SECONDS, "", 1, MOST_SECONDS)}
    assert leased(rule) == 10
    assert BLOCK == 4
