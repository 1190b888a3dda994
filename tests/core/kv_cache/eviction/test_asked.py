"""Leases that clients ask for: which blocks they cover, how long they last, and who pays for them."""

from __future__ import annotations

import pytest

from chairlift.base.outputs import FinishReason
from chairlift.core.kv_cache.eviction.asked import AskedRule
from chairlift.core.kv_cache.eviction.lease import LeaseRule
from chairlift.core.kv_cache.eviction.lru import LRU
from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.request import Request, Service
from tests.core.kv_cache.eviction.test_pauses import cache, later, leased, run
from tests.core.kv_cache.make import BLOCK, admit, compute, manager, request


def asking(*leases: tuple[int, float], payer: str = "", **settings: object) -> Service:
    return Service(leases=leases, payer=payer, **settings)  # type: ignore[arg-type]


def flood(kv: KVCacheManager, times: int, length: int = 80) -> None:
    rule = kv.eviction
    for _ in range(times):
        rule.now += 1.0
        run(kv, request(f"flood at {rule.now}", length))
        kv.check_invariants([])


def hit(kv: KVCacheManager, tokens: list[int]) -> int:
    return kv.num_shared(request("look", [*tokens, 1]))


@pytest.mark.parametrize(("rule", "kept"), [(AskedRule, 40), (LeaseRule, 40), (LRU, 0)])
def test_a_prompt_survives_a_flood_only_with_its_lease(rule: type[LRU], kept: int) -> None:
    kv = manager(41, eviction=rule())
    prompt = request("asks", 40, service=asking((40, 300.0)))
    tokens = list(prompt.token_ids)
    run(kv, prompt)
    flood(kv, 20)
    assert hit(kv, tokens) == kept


def test_a_lease_covers_whole_blocks_up_to_its_breakpoint() -> None:
    kv, rule = cache()
    one = request("asks", 40, service=asking((9, 3600.0), (22, 300.0)))
    run(kv, one)
    assert leased(rule) == 22 // BLOCK
    ends = sorted(lease.until for lease in rule.orders[0]._leases.values())
    assert ends == [300.0] * 3 + [3600.0] * 2


def test_a_lease_ends_after_its_seconds() -> None:
    kv, rule = cache()
    one = request("asks", 40, service=asking((40, 300.0)))
    tokens = list(one.token_ids)
    run(kv, one)
    rule.now = 299.0
    run(kv, request("flood", 120))
    assert hit(kv, tokens) == 40
    rule.now = 301.0
    run(kv, request("flood again", 120))
    assert hit(kv, tokens) < 40


def test_each_use_renews_a_lease_but_not_one_that_has_ended() -> None:
    kv, rule = cache()
    one = request("asks", 40, service=asking((40, 300.0)))
    tokens = list(one.token_ids)
    run(kv, one)
    for now in (250.0, 500.0):
        rule.now = now
        run(kv, later(f"uses at {now}", [*tokens, 1], now))
    rule.now = 790.0
    flood(kv, 5)
    assert hit(kv, tokens) == 40
    rule.now = 801.0
    run(kv, later("too late", [*tokens, 1], rule.now))
    flood(kv, 20)
    assert hit(kv, tokens) == 0


def test_a_use_that_lasts_longer_than_the_lease_renews_it() -> None:
    kv, rule = cache()
    one = request("asks", 40, service=asking((40, 300.0)))
    tokens = list(one.token_ids)
    run(kv, one)
    rule.now = 200.0
    slow = later("slow", [*tokens, 1], rule.now)
    admit(kv, slow)
    compute(kv, slow)
    rule.now = 900.0
    slow.finish_reason = FinishReason.STOP
    kv.tables.free(slow, -1)
    rule.now = 1190.0
    flood(kv, 5)
    assert hit(kv, tokens) == 40


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.LENGTH])
def test_an_answer_that_was_cut_off_keeps_its_prompt_too(reason: FinishReason) -> None:
    kv, rule = cache()
    run(kv, request("asks", 40, service=asking((40, 300.0))), reason)
    assert leased(rule) == 10


def test_the_end_of_a_pause_takes_nothing_from_the_client() -> None:
    kv, rule = cache()
    one = request("agent", 40, service=asking((40, 3600.0)))
    tokens = list(one.token_ids)
    run(kv, one)
    rule.paused("agent", ["search"])
    rule.now = 400.0
    flood(kv, 20)
    assert hit(kv, tokens) == 40


def test_who_asks_for_everything_loses_first_and_nobody_waits() -> None:
    """A tenant that asks one hour for all of its prompts takes no more than the budget, and nothing from a tenant
    within its share."""
    kv, rule = cache(81)
    small = request("small", 40, service=asking((40, 300.0), payer="small"))
    tokens = list(small.token_ids)
    run(kv, small)
    for number in range(30):
        rule.now += 1.0
        run(kv, request(f"greedy {number}", 80, service=asking((80, 3600.0), payer="greedy")))
        kv.check_invariants([])
        assert leased(rule) <= 40
    assert rule.orders[0].held_by() == {"small": 10, "greedy": 30}
    assert hit(kv, tokens) == 40
    whole = request("whole", 300)
    assert kv.admit(whole, 300) is not None  # 75 of 80 blocks: leases do not count


def test_many_names_do_not_make_a_larger_share() -> None:
    """Callers that nobody vouches for pay together, whatever names they give themselves."""
    kv, rule = cache(81)
    small = request("small", 60, service=asking((60, 300.0), payer="small"))
    run(kv, small)
    for number in range(30):
        rule.now += 1.0
        run(kv, request(f"name {number}", 40, service=asking((40, 3600.0), tenant=f"name {number}")))
    assert rule.orders[0].held_by()["small"] == 15


def test_a_window_keeps_the_blocks_that_a_breakpoint_reads() -> None:
    rule = LeaseRule()
    kv = manager(81, None, 6, max_step_tokens=128, eviction=rule)
    one = request("asks", 40, service=asking((24, 300.0)))
    tokens = list(one.token_ids)[:24]
    run(kv, one)
    flood(kv, 20)
    assert hit(kv, tokens) == 24


def test_renewed_leases_leave_no_garbage() -> None:
    kv, rule = cache()
    one = request("asks", 40, service=asking((40, 3600.0)))
    tokens = list(one.token_ids)
    run(kv, one)
    for number in range(1000):
        rule.now += 1.0
        run(kv, later(f"uses {number}", [*tokens, number], rule.now))
    order = rule.orders[0]
    assert len(order._ends) < 200
    order.check_invariants()


def test_a_request_without_hints_is_as_before() -> None:
    kv, rule = cache()
    run(kv, request("plain", 40))
    assert leased(rule) == 0
    assert not Request("r", [1], max_tokens=1).service.leases
