"""Statistics of the prefix cache: pauses by tool, leases, what a turn found, and times of blocks."""

from __future__ import annotations

import pytest

from chairlift.base.turn_cache import BLOCK_TIME_BOUNDS
from chairlift.core.kv_cache.eviction.lease import LeaseRule
from chairlift.core.kv_cache.eviction.lru import LRU
from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.engine.cache_statistics import CacheStatistics
from tests.core.kv_cache.eviction.test_pauses import cache, later, run
from tests.core.kv_cache.make import manager, request


def times(counts: list[int]) -> dict[float, int]:
    """Upper bound of a bucket -> its count, for the buckets that have values."""
    return {bound: count for bound, count in zip((*BLOCK_TIME_BOUNDS, 1e9), counts, strict=True) if count}


def test_leases_are_counted_by_level_and_by_their_end() -> None:
    kv, rule = cache()
    read = CacheStatistics(kv).read
    assert read()["leased_blocks"] == {"1": 0, "2": 0, "3": 0}
    rule.gaps.observe("", ["search"], 5.0)
    said = run(kv, request("agent", 40))
    rule.paused("agent", ["search"])
    found = read()
    assert (found["leased_blocks"]["3"], found["lease_budget_blocks"], found["leases_ended"]) == (10, 20, {})
    assert (found["num_pauses"], found["num_leases"], found["pauses_by_tool"]) == (1, 1, {"search": 1})
    rule.now = 6.0
    run(kv, request("flood", 150))
    found = read()
    assert (found["leased_blocks"]["3"], found["leases_ended"]) == (0, {"expired": 10})
    run(kv, later("back", [*said, 1], 7.0))
    assert (read()["turns_by_cache"], read()["pauses_by_tool"]) == ({"expired": 1}, {})


def test_leases_over_the_budget_and_those_in_the_way_are_counted_apart() -> None:
    kv, rule = cache(41)
    for name in ("one", "two", "three"):
        run(kv, request(name, 40))
        rule.paused(name, ["search"])
    found = CacheStatistics(kv).read()
    assert (found["leased_blocks"]["3"], found["leases_ended"]) == (20, {"over_budget": 10})
    run(kv, request("flood", 120))
    assert CacheStatistics(kv).read()["leases_ended"] == {"over_budget": 10, "displaced": 10}


@pytest.mark.parametrize("rule", [LRU(), LeaseRule()])
def test_block_times_are_counted_under_every_rule(rule: LRU) -> None:
    kv: KVCacheManager = manager(11, eviction=rule)
    said = run(kv, request("one", 20))
    rule.now = 4.0
    run(kv, later("again", [*said, 1, 2, 3], 4.0))
    rule.now = 100.0
    run(kv, request("flood", 40))
    found = CacheStatistics(kv).read()
    assert times(found["block_reuse_gaps"]) == {10.0: 5}
    assert found["num_block_reuse_seconds"] == 20.0
    assert times(found["block_idle_times"]) == {120.0: 6}
    assert times(found["block_lifetimes"]) == {120.0: 6}
    assert (found["num_block_idle_seconds"], found["num_block_lifetime_seconds"]) == (576.0, 596.0)


def test_a_clock_that_was_set_back_makes_no_negative_time() -> None:
    kv = manager(11, eviction=(rule := LRU()))
    rule.now = 50.0
    said = run(kv, request("one", 20))
    rule.now = 1.0
    run(kv, later("again", [*said, 1], 1.0))
    found = CacheStatistics(kv).read()
    assert (times(found["block_reuse_gaps"]), found["num_block_reuse_seconds"]) == ({0.1: 5}, 0.0)


def test_without_leases_a_turn_still_tells_what_it_found() -> None:
    kv = manager(21, eviction=(rule := LRU()))
    said = run(kv, request("agent", 40))
    rule.paused("agent", ["search"])
    back = later("back", [*said, 1], 3.0)
    said = run(kv, back)
    assert back.resumed is not None
    assert (back.resumed.sequence_id, back.resumed.tools, back.resumed.gap) == ("agent", ("search",), 3.0)
    rule.paused("back", ["search"])
    run(kv, request("flood", 80))
    once_more = later("once more", [*said, 1], 9.0)
    run(kv, once_more)
    assert once_more.resumed is not None and once_more.resumed.cache == "no_lease"
    found = CacheStatistics(kv).read()
    assert (found["turns_by_cache"], found["num_leases"]) == ({"kept": 1, "no_lease": 1}, 0)
    assert "leased_blocks" not in found


def test_the_nodes_of_a_pause_are_kept_only_for_leases() -> None:
    for rule, kept in ((LRU(), False), (LeaseRule(), True)):
        kv = manager(41, eviction=rule)
        run(kv, request("agent", 40))
        turn = rule.paused("agent", ["search"])
        assert turn is not None
        assert (turn.node.parent is not None) is kept


def test_turns_without_calls_are_kept_up_to_a_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chairlift.core.kv_cache.eviction.turns._MOST_TOKENS", 100)
    kv = manager(81, eviction=(rule := LRU()))
    for name in ("one", "two", "three"):
        run(kv, request(name, 40))
    assert len(rule.turns) == 2
    assert rule.paused("one", ["search"]) is None
    assert rule.paused("three", ["search"]) is not None
    run(kv, request("four", 40))
    assert len(rule.turns) == 3


def test_few_names_of_tools_become_labels() -> None:
    kv = manager(400, eviction=(rule := LRU()))
    statistics = CacheStatistics(kv)
    calls = [(f"tool-{number}",) for number in range(25)] + [("a b",), ("x" * 65,), ("tool-1", "tool-2")]
    for number, tools in enumerate(calls):
        run(kv, request(f"turn {number}", 8))
        rule.paused(f"turn {number}", tools)
    found = statistics.read()["pauses_by_tool"]
    assert len(found) == 22
    assert (found["other"], found["several"], found["tool-24"]) == (7, 1, 1)
    rule.now = 301.0
    assert statistics.read()["pauses_by_tool"] == {}
    run(kv, request("new", 8))
    rule.paused("new", ("tool-0",))
    assert statistics.read()["pauses_by_tool"] == {"other": 1}
