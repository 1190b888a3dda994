"""Rules of eviction: their names, and the order of T-LRU."""

from __future__ import annotations

import math

import pytest

from chairlift.base.outputs import FinishReason
from chairlift.config import CacheConfig, EngineConfig
from chairlift.core.kv_cache.eviction.lru import LRU
from chairlift.core.kv_cache.eviction.rule import EvictionRule, Prices
from chairlift.core.kv_cache.eviction.rules import eviction_from_config, eviction_from_name
from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.plugins.tlru import TLRU
from chairlift.core.request import Request, RequestStatus, Service
from chairlift.errors import ConfigError
from tests.core.kv_cache.make import BLOCK, admit, compute, manager, request


class NewestFirst(LRU):
    """A rule from outside of the package."""

    name = "newest_first"


class NoRule:
    """A class that is no rule."""


def end_turn(kv: KVCacheManager, one: Request) -> None:
    """Compute the prompt of a request, and end the request with no further token."""
    admit(kv, one)
    compute(kv, one)
    one.token_ids.pop()
    one.finish_reason = FinishReason.STOP
    kv.tables.free(one, -1)
    one.num_computed_tokens = 0
    one.move_to(RequestStatus.FINISHED)


def num_lost(kv: KVCacheManager, one: Request) -> int:
    """Number of tokens of an ended turn that the cache does not have any more."""
    again = Request("again", [*one.token_ids, 0], max_tokens=1)
    return len(one.token_ids) - kv.num_shared(again)


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lru", "tlru", "lease"])
def test_a_model_without_kv_has_requests_but_no_blocks(name: str) -> None:
    kv = KVCacheManager((), 16, max_step_tokens=64, eviction=eviction_from_name(name))
    one = Request("one", list(range(40)), max_tokens=1)
    kv.arrived(one)
    assert kv.admit(one, 40) is not None
    one.finish_reason = FinishReason.STOP
    kv.tables.free(one, -1)


@pytest.mark.parametrize("name", ["lru", "asked", "tlru", "lease"])
def test_each_rule_has_one_name(name: str) -> None:
    assert eviction_from_name(name).name == name
    assert CacheConfig(cache_eviction=name).cache_eviction == name


def test_the_rule_is_chosen_by_the_retention_levels() -> None:
    without = '{"default": {"retention": 0}, "priority": {"retention": 0}}'
    for settings, name in (
        ({}, "asked"),
        ({"scheduling_policy": "priority"}, "lease"),
        ({"scheduling_policy": "priority", "service_classes": without}, "asked"),
        ({"cache_eviction": "lease"}, "lease"),
    ):
        config = EngineConfig.from_flat(settings)
        assert eviction_from_config(config.cache, config.scheduler).name == name


def test_a_rule_of_ones_own_is_loaded_by_its_path() -> None:
    assert eviction_from_name(f"{__name__}:NewestFirst").name == "newest_first"


@pytest.mark.parametrize(
    ("name", "message"),
    [("NoRule", "has no .*order.*start from chairlift.core.kv_cache.eviction.lru.LRU"), ("Missing", "be imported")],
)
def test_a_class_that_cannot_be_used_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        eviction_from_name(f"{__name__}:{name}")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="cache_eviction must be auto, asked, lease, lru, tlru or module:Class; got 'fifo'"
    ):
        EngineConfig.from_flat({"cache_eviction": "fifo"})


@pytest.mark.parametrize("rule", ["lru", "asked", "tlru"])
def test_a_retention_that_nothing_looks_at_is_refused(rule: str) -> None:
    settings = {"scheduling_policy": "priority", "cache_eviction": rule}
    EngineConfig.from_flat(settings | {"service_classes": '{"chat": {"ttft_ms": 100}, "priority": {"min_seqs": 1}}'})
    classes = '{"chat": {"retention": 1}}'
    with pytest.raises(ConfigError, match=f"chat has retention 1, but cache_eviction {rule} does not look at it"):
        EngineConfig.from_flat(settings | {"service_classes": classes})
    EngineConfig.from_flat(settings | {"service_classes": classes, "cache_eviction": "lease"})


# -- T-LRU -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "lost"), [(LRU(), [60, 0]), (TLRU(), [50, 10])])
def test_the_tail_of_a_conversation_goes_before_what_its_next_first_token_needs(
    rule: EvictionRule, lost: list[int]
) -> None:
    """The example of the paper: the target allows 100 tokens, and a turn adds 50. Conversation 1, the older one, has
    400 tokens, conversation 2 has 40; 60 tokens of memory are needed. By LRU the first then computes 110 tokens, by
    T-LRU 100, and the second 60."""
    kv = manager(num_blocks=1 + 110, eviction=rule)
    rule.prices.step_tokens = 100
    if isinstance(rule, TLRU):
        rule.next_tokens = 50.0
    first, second = request("first", 400), request("second", 40)
    end_turn(kv, first)
    end_turn(kv, second)
    kv.check_invariants([])
    admit(kv, request("other", 60, may_share=False))
    # Blocks have 4 tokens, and B = 350 is inside of one: it is kept.
    assert [num_lost(kv, one) for one in (first, second)] == [pytest.approx(each, abs=BLOCK) for each in lost]


def test_the_target_of_a_request_decides_how_much_of_it_may_be_lost() -> None:
    rule = TLRU()
    rule.prices = Prices(BLOCK, step_tokens=8, compute_seconds=lambda num_tokens, begin: num_tokens / 1000)
    plain, urgent = request("plain", 40), request("urgent", 40)
    urgent.service = Service(first_token_by=7.0205)
    urgent.arrival_time = 7.0
    assert (rule.target_tokens(plain), rule.target_tokens(urgent)) == (8, 20)
    urgent.service = Service(first_token_by=math.inf)
    assert rule.target_tokens(urgent) == 8


def test_a_block_that_one_conversation_needs_is_no_tail_of_another() -> None:
    rule = TLRU()
    kv = manager(num_blocks=1 + 40, eviction=rule)
    rule.prices.step_tokens = 8
    long = request("long", 80)
    short = request("short", long.token_ids[:24])
    end_turn(kv, long)
    end_turn(kv, short)  # its tail has 8 tokens, which are in the middle of the other conversation
    admit(kv, request("other", 22 * BLOCK, may_share=False))
    assert (num_lost(kv, long), num_lost(kv, short)) == (8, 0)


def test_a_preempted_request_has_no_tail() -> None:
    rule = TLRU()
    kv = manager(num_blocks=1 + 20, eviction=rule)
    rule.prices.step_tokens = 8
    ended, preempted = request("ended", 20), request("preempted", 20)
    admit(kv, preempted)
    compute(kv, preempted)
    kv.tables.free(preempted, -1)
    end_turn(kv, ended)
    admit(kv, request("other", 12 * BLOCK, may_share=False))
    assert num_lost(kv, ended) == 8
    assert kv.num_shared(request("again", preempted.token_ids)) == 20


def test_the_mean_number_of_new_tokens_is_that_of_turns_that_found_something() -> None:
    rule = TLRU()
    for known, new in ((0, 100), (50, 30), (60, 50)):
        one = request("one", known + new)
        one.num_cached_tokens = known
        one.finish_reason = FinishReason.STOP
        manager(eviction=rule)
        rule.leaving(one, 0, [])
    assert rule.next_tokens == 30 + 0.05 * 20
