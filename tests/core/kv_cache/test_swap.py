"""Host blocks, and what the manager does with them: swap out, swap in, drop; and giving back the end of a table."""

from __future__ import annotations

import pytest

from chairlift.core.kv_cache.block_pool import NULL_BLOCK
from chairlift.core.kv_cache.eviction.lease import LeaseRule
from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.kv_cache.swap import Swapped, SwapPool
from chairlift.core.request import Request
from chairlift.errors import InvariantError
from tests.core.kv_cache.make import BLOCK, admit, compute, manager, request

# -- the pool ----------------------------------------------------------------------------------------------------------


def test_each_group_has_blocks_of_its_own_from_0_on() -> None:
    pool = SwapPool([3, 2])
    assert (pool.capacity, pool.num_used) == (5, 0)
    assert pool.allocate(0, 3) == [0, 1, 2]
    assert pool.allocate(1, 1) == [0]
    assert [pool.num_free(group) for group in range(2)] == [0, 1]
    assert pool.num_used == 4


def test_blocks_come_back_when_their_step_has_run_and_are_given_out_first() -> None:
    pool = SwapPool([4])
    blocks = pool.allocate(0, 2)
    pool.release(0, blocks, 7)
    pool.step_done(6)
    assert (pool.num_free(0), pool.num_used) == (2, 2)
    pool.step_done(7)
    assert (pool.num_free(0), pool.num_used) == (4, 0)
    assert pool.allocate(0, 3) == [0, 1, 2]
    pool.release(0, [2], 5)
    assert pool.num_free(0) == 2, "step 5 has run already"


def test_steps_may_be_named_out_of_order() -> None:
    pool = SwapPool([2])
    first, second = pool.allocate(0, 1), pool.allocate(0, 1)
    pool.release(0, first, 9)
    pool.release(0, second, 8)
    pool.step_done(8)
    assert pool.allocate(0, 1) == second


def test_the_audit_sees_a_host_block_held_twice_or_lost() -> None:
    pool = SwapPool([3])
    blocks = pool.allocate(0, 2)
    pool.check_invariants([Swapped(5, [blocks], 1)])
    for wrong in ([], [Swapped(5, [[0]], 1)], [Swapped(5, [blocks], 1)] * 2, [Swapped(5, [[0, 1, 2]], 1)]):
        with pytest.raises(InvariantError, match="group 0"):
            pool.check_invariants(wrong)


# -- swap out, swap in -------------------------------------------------------------------------------------------------


def running(kv: KVCacheManager, name: str, tokens: int) -> Request:
    """A request whose prompt is computed, and that has sampled a token."""
    one = request(name, tokens)
    admit(kv, one)
    compute(kv, one)
    return one


def leave(one: Request) -> None:
    one.num_computed_tokens = 0


def test_saved_blocks_come_back() -> None:
    kv = manager(num_host_blocks=4, enable_prefix_caching=False)
    one = running(kv, "one", 10)
    table = list(one.block_ids[0])
    saved = kv.swap_out(one, 10, 4)
    assert saved == [(0, block, host) for host, block in enumerate(table)]
    leave(one)
    assert one.block_ids == [] and kv.swapped["one"].num_tokens == 10
    assert kv.counts().used == 3, "step 4 may still write them"
    kv.check_invariants([])
    kv.step_done(4)
    assert kv.counts().used == 0
    assert kv.swap_in(one, 11, 0.0, 6) is None, "step 5 has not saved them yet"
    kv.step_done(5)
    admission = kv.swap_in(one, 17, 0.0, 6)
    assert admission is not None and admission.num_computed_tokens == 10 and admission.copies == []
    assert admission.swap_in == [(0, host, block) for host, block in enumerate(one.block_ids[0][:3])]
    assert len(one.block_ids[0]) == 5 == kv.tables.held_blocks
    one.num_computed_tokens = 10
    kv.check_invariants([one])
    assert (kv.swapped, kv.swap_pool.num_used) == ({}, 3)
    kv.step_done(6)
    assert kv.swap_pool.num_used == 0


def test_a_saved_request_returns_in_the_same_step_if_no_other_is_in_flight() -> None:
    kv = manager(num_host_blocks=8)
    one = running(kv, "one", 10)
    kv.step_done(4)
    kv.swap_out(one, 10, 4)
    assert kv.swap_in(one, 11, 0.0, 5) is not None
    other = running(kv, "other", 10)
    kv.swap_out(other, 10, 5)
    assert kv.swap_in(other, 11, 0.0, 6) is None, "step 5 may fail, and what it computes be lost"


def test_nothing_changes_when_host_memory_is_short() -> None:
    kv = manager(num_host_blocks=2)
    one = running(kv, "one", 10)
    table = list(one.block_ids[0])
    assert kv.swap_out(one, 10, 0) is None
    assert (one.block_ids, kv.swapped, kv.swap_pool.num_used) == ([table], {}, 0)
    assert kv.swap_out(one, 8, 0) == [(0, table[0], 0), (0, table[1], 1)]


def test_without_swap_space_nothing_is_saved() -> None:
    kv = manager()
    assert kv.swap_out(running(kv, "one", 1), 1, 0) is None


def test_a_request_that_does_not_fit_stays_swapped() -> None:
    kv = manager(num_blocks=6, num_host_blocks=4, enable_prefix_caching=False)
    one = running(kv, "one", 10)
    kv.swap_out(one, 10, -1)
    leave(one)
    kv.step_done(0)
    other = running(kv, "other", 11)
    before = kv.counts(), kv.swapped["one"]
    assert kv.swap_in(one, 11, 0.0, 1) is None
    assert (kv.counts(), kv.swapped["one"]) == before
    kv.tables.free(other, 0)
    leave(other)
    assert kv.swap_in(one, 11, 0.5, 1) is None, "3 of 5 blocks leave less than half free"
    assert kv.swap_in(one, 12, 0.4, 1) is not None


@pytest.mark.parametrize("share", [True, False])
def test_blocks_still_in_the_prefix_cache_are_shared_instead_of_copied(share: bool) -> None:
    kv = manager(num_host_blocks=4)
    one = running(kv, "one", 10)
    table = list(one.block_ids[0])
    kv.swap_out(one, 10, -1)
    leave(one)
    kv.step_done(0)
    admission = kv.swap_in(one, 11, 0.0, 1, share=share)
    assert admission is not None
    assert (one.block_ids[0][:2] == table[:2]) == share
    assert [host for _, host, _ in admission.swap_in] == ([2] if share else [0, 1, 2])
    one.num_computed_tokens = 10
    kv.check_invariants([one])
    one.token_ids += [1, 2, 3]
    kv.publish(one, 12)
    assert kv.counts().cached == (0 if share else 2)
    assert len(kv.prefix_cache or ()) == (4 if share else 3), "root and blocks; one that may not share offers nothing"


def test_only_blocks_inside_the_window_are_saved() -> None:
    kv = manager(33, 5, None, num_host_blocks=8, enable_prefix_caching=False)
    one = running(kv, "one", 18)
    kv.tables.extend(one, 19, -1)
    windowed, full = one.block_ids
    assert windowed[:3] == [NULL_BLOCK] * 3
    saved = kv.swap_out(one, 18, -1)
    leave(one)
    assert saved is not None
    assert [move for move in saved if move[0] == 0] == [(0, windowed[3], 0), (0, windowed[4], 1)]
    assert [move for move in saved if move[0] == 1] == [(1, block, host) for host, block in enumerate(full)]
    kv.step_done(0)
    admission = kv.swap_in(one, 19, 0.0, 1)
    assert admission is not None and [host for group, host, _ in admission.swap_in if group == 0] == [0, 1]
    assert [block == NULL_BLOCK for block in one.block_ids[0]] == [True, True, True, False, False]
    one.num_computed_tokens = 18
    kv.check_invariants([one])


def test_positions_before_released_window_blocks_cannot_be_restored() -> None:
    kv = manager(33, 5, num_host_blocks=8)
    one = running(kv, "one", 18)
    kv.tables.extend(one, 19, -1)
    before = [list(table) for table in one.block_ids]
    assert kv.swap_out(one, 14, -1) is None
    assert not kv.tables.shrink(one, 12, -1)
    assert (one.block_ids, kv.swap_pool.num_used) == (before, 0)
    assert kv.tables.shrink(one, 16, -1)


@pytest.mark.parametrize("num_tokens", [0, 11])
def test_only_what_is_computed_can_be_saved(num_tokens: int) -> None:
    kv = manager(num_host_blocks=8)
    with pytest.raises(InvariantError, match=f"cannot save {num_tokens} positions"):
        kv.swap_out(running(kv, "one", 10), num_tokens, 0)


def test_swapping_in_an_unsaved_request_is_an_error() -> None:
    kv = manager(num_host_blocks=8)
    with pytest.raises(InvariantError, match="nothing in host memory"):
        kv.swap_in(request("one", 10), 11, 0.0, 1)


def test_dropped_blocks_wait_for_the_step_that_writes_them() -> None:
    kv = manager(num_host_blocks=3)
    one = running(kv, "one", 10)
    kv.swap_out(one, 10, 4)
    leave(one)
    kv.drop_swapped(one)
    assert (kv.swapped, kv.swap_pool.num_used) == ({}, 3)
    kv.check_invariants([])
    kv.step_done(5)
    assert kv.swap_pool.num_used == 0
    kv.drop_swapped(one)
    assert kv.admit(one, 11) is not None


def test_requests_saved_since_a_step_are_named() -> None:
    kv = manager(num_host_blocks=9)
    for step, name in enumerate(["a", "b", "c"], start=3):
        one = running(kv, name, 10)
        kv.swap_out(one, 10, step)
    assert kv.swapped_since(5) == ["b", "c"]


# -- shrink ------------------------------------------------------------------------------------------------------------


def test_shrinking_a_table_frees_its_end() -> None:
    kv = manager()
    one = running(kv, "one", 18)
    table = list(one.block_ids[0])
    assert one.num_published == 4
    assert kv.tables.shrink(one, 8, 3)
    one.num_computed_tokens = 8
    assert one.block_ids[0] == table[:2] and kv.tables.held_blocks == 2
    assert one.num_published == 2 and one.last_node is kv.pools[0].nodes[table[1]]
    kv.check_invariants([one])
    assert kv.counts().used == 5
    kv.step_done(3)
    assert (kv.counts().used, kv.counts().cached) == (2, 2)
    kv.tables.extend(one, 20, 3)
    one.num_computed_tokens = 20
    one.token_ids += [1] * 2
    kv.publish(one, 20)
    assert one.num_published == 5
    kv.check_invariants([one])


def test_a_table_can_shrink_to_nothing() -> None:
    kv = manager()
    one = running(kv, "one", 18)
    assert kv.tables.shrink(one, 0, -1)
    one.num_computed_tokens = 0
    assert (one.block_ids, one.num_published, one.last_node, kv.counts().used) == ([[]], 0, None, 0)
    kv.check_invariants([one])


def test_a_fork_shares_only_the_blocks_that_remain() -> None:
    kv = manager(enable_prefix_caching=False)
    source = running(kv, "source", 18)
    fork = request("fork", source.token_ids[:18], source=source)
    assert kv.tables.shrink(source, 8, -1)
    source.num_computed_tokens = 8
    assert admit(kv, fork).num_computed_tokens == 0


def test_shrinking_makes_room_that_is_seen() -> None:
    kv = manager(num_blocks=6)
    one = running(kv, "one", 18)
    other = request("other", 8)
    assert kv.admit(other, 8) is None
    assert kv.tables.shrink(one, 8, -1)
    one.num_computed_tokens = 8
    assert kv.admit(other, 8) is not None


def test_only_whole_blocks_are_kept() -> None:
    kv = manager()
    with pytest.raises(InvariantError, match=f"blocks have {BLOCK}"):
        kv.tables.shrink(running(kv, "one", 10), 6, 0)


# -- retention ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["free", "swap_out", "shrink"])
def test_blocks_of_a_higher_retention_outlast_those_released_later(how: str) -> None:
    kv = manager(num_blocks=17, num_host_blocks=8, eviction=LeaseRule())
    kept, other = request("kept", 12), request("other", 12)
    kept.retention = 1
    for one in (kept, other):
        admit(kv, one)
        compute(kv, one)
        if how == "free":
            kv.tables.free(one, -1)
        elif how == "swap_out":
            kv.swap_out(one, 12, -1)
        else:
            kv.tables.shrink(one, 0, -1)
        one.num_computed_tokens = 0
    admit(kv, request("large", 13 * BLOCK))
    again = [request(one.request_id, one.token_ids) for one in (kept, other)]
    assert [len(kv.prefix_cache.walk(one, 3)) if kv.prefix_cache else 0 for one in again] == [3, 0]
