"""Blocks that the prefix cache evicts are kept in host memory and come back: when, for whom, and which are dropped."""

from __future__ import annotations

import pytest

from chairlift.core.kv_cache.block_pool import NULL_BLOCK
from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.kv_cache.swap import SwapPool
from chairlift.core.request import Request, RequestStatus
from chairlift.errors import InvariantError
from tests.core.kv_cache.make import BLOCK, admit, compute, manager, request


def offloading(num_blocks: int = 7, *windows: int | None, num_host_blocks: int = 8) -> KVCacheManager:
    return manager(num_blocks, *windows, num_host_blocks=num_host_blocks, prefix_offload=True)


def serve(kv: KVCacheManager, one: Request, step: int) -> list[tuple[int, int, int]]:
    """The request's prompt is computed in ``step``, and it leaves; what that step copies to host memory."""
    admit(kv, one)
    saved = kv.scheduled(step)
    kv.step_done(step)
    compute(kv, one)
    leave(kv, one, step)
    return saved


def leave(kv: KVCacheManager, one: Request, step: int) -> None:
    kv.tables.free(one, step)
    one.num_computed_tokens = 0
    one.move_to(RequestStatus.FINISHED)
    kv.check_invariants([])


def same(one: Request) -> Request:
    """Another request with its prompt."""
    return request(f"{one.request_id}, again", one.token_ids[: one.num_prompt_tokens])


def filled(kv: KVCacheManager) -> Request:
    """A request of four full blocks whose blocks a second one has taken, in steps 1 and 2."""
    first = request("first", 4 * BLOCK + 1)
    assert serve(kv, first, 1) == []
    saved = serve(kv, request("other", 6 * BLOCK - 1), 2)
    assert [host for _, _, host in saved] == [0, 1, 2, 3]
    return first


def test_evicted_blocks_come_back_from_host_memory() -> None:
    kv = offloading()
    first = filled(kv)
    again = same(first)
    admission = admit(kv, again)
    assert admission.num_computed_tokens == 4 * BLOCK
    # The end of a prompt is evicted first.
    assert admission.swap_in == [
        (0, host, block) for host, block in zip([3, 2, 1, 0], again.block_ids[0], strict=False)
    ]
    assert (kv.num_offloaded, kv.num_brought_back) == (8, 4), "and the other has gone where the first came from"
    kv.check_invariants([again])
    kv.scheduled(3)
    kv.step_done(3)
    leave(kv, again, 3)
    assert (kv.swap_pool.num_used, kv.swap_pool.num_free(0)) == (0, 8)


def test_offloading_is_off_by_default_and_without_host_blocks() -> None:
    for kv in (manager(7, num_host_blocks=8), offloading(num_host_blocks=0)):
        first = request("first", 4 * BLOCK + 1)
        serve(kv, first, 1)
        assert serve(kv, request("other", 6 * BLOCK - 1), 2) == []
        assert admit(kv, same(first)).num_computed_tokens == 0
        assert kv.swap_pool.num_kept == kv.num_offloaded == 0
    kv = manager(7, num_host_blocks=8, prefix_offload=True, enable_prefix_caching=False)
    assert not kv.prefix_offload


def test_a_copy_cannot_be_read_before_the_step_that_makes_it_has_run() -> None:
    kv = offloading(13)
    first, other = request("first", 4 * BLOCK + 1), request("other", 12 * BLOCK - 1)
    serve(kv, first, 1)
    admit(kv, other)
    assert len(kv.scheduled(2)) == 4
    kv.tables.free(other, -1)
    other.move_to(RequestStatus.FINISHED)
    probe = same(first)
    assert kv.num_shared(probe) == 0
    kv.step_done(2)
    assert kv.num_shared(probe) == 4 * BLOCK


def test_blocks_brought_back_are_shared_after_their_step_has_run() -> None:
    kv = offloading(13)
    first = request("first", 4 * BLOCK + 1)
    serve(kv, first, 1)
    serve(kv, request("other", 12 * BLOCK - 1), 2)
    one, two, three = same(first), same(first), same(first)
    two.request_id, three.request_id = "two", "three"
    admit(kv, one)
    kv.scheduled(3)
    late = admit(kv, two)
    assert not set(one.block_ids[0]) & set(two.block_ids[0]), "step 3 may fail, and with it what it brings back"
    assert [host for _, host, _ in late.swap_in] == [3, 2, 1, 0], "each reads a copy of its own"
    kv.step_done(3)
    compute(kv, one)
    kv.check_invariants([one, two])
    kv.tables.free(two, 3)
    admission = admit(kv, three)
    assert admission.swap_in == [] and three.block_ids[0][:4] == one.block_ids[0][:4]


def test_a_beginning_that_is_still_there_is_shared_and_the_rest_comes_back() -> None:
    kv = offloading()
    first = request("first", 4 * BLOCK + 1)
    serve(kv, first, 1)
    assert len(serve(kv, request("other", 4 * BLOCK), 2)) == 2
    again = same(first)
    kept = [node.blocks[0] for node in kv.prefix_cache.walk(first, 4)] if kv.prefix_cache else []
    assert kept[2:] == [None, None]
    admission = admit(kv, again)
    assert again.block_ids[0][:2] == kept[:2] and admission.num_computed_tokens == 4 * BLOCK
    assert [block for _, _, block in admission.swap_in] == again.block_ids[0][2:4]
    assert again.num_published == 2


def test_a_block_with_a_copy_is_not_copied_again() -> None:
    kv = offloading(num_host_blocks=16)
    first = filled(kv)
    assert len(serve(kv, same(first), 3)) == 4, "of the other"
    assert len(serve(kv, request("third", 6 * BLOCK - 1), 4)) == 1, "and its fifth"
    assert (kv.num_offloaded, kv.num_brought_back) == (9, 4)
    assert kv.num_shared(same(first)) == 4 * BLOCK


def test_the_least_recently_used_copy_goes_first() -> None:
    kv = offloading(5, num_host_blocks=4)
    a, b = request("a", 2 * BLOCK + 1), request("b", 2 * BLOCK + 1)
    serve(kv, a, 1)
    serve(kv, b, 2)
    serve(kv, request("x", 4 * BLOCK - 1), 3)
    assert [kv.num_shared(same(one)) for one in (a, b)] == [8, 8], "all four have copies"
    assert len(serve(kv, same(a), 4)) == 2, "of x"
    assert [kv.num_shared(same(one)) for one in (a, b)] == [8, 0]


def test_a_block_that_was_in_use_until_it_was_evicted_has_the_newest_copy() -> None:
    kv = offloading(9, num_host_blocks=4)

    def evict_all(step: int) -> None:
        """Another request takes all blocks, and leaves none to the prefix cache."""
        other = request(f"other {step}", 8 * BLOCK - 1)
        admit(kv, other)
        kv.scheduled(step)
        kv.step_done(step)
        leave(kv, other, step)

    a, b = request("a", 2 * BLOCK + 1), request("b", 2 * BLOCK + 1)
    serve(kv, a, 1)
    serve(kv, b, 2)
    evict_all(3)
    serve(kv, same(a), 4)
    serve(kv, same(b), 5)
    serve(kv, same(a), 6)
    assert kv.num_brought_back == 4, "the last one found a's blocks, and touched no copies"
    evict_all(7)
    serve(kv, request("c", 2 * BLOCK + 1), 8)
    evict_all(9)
    assert [kv.num_shared(same(one)) for one in (a, b)] == [8, 0]


def test_preempted_requests_come_first() -> None:
    kv = offloading(num_host_blocks=4)
    first = filled(kv)
    one = request("one", 3 * BLOCK + 1)
    admit(kv, one)
    kv.scheduled(3)
    kv.step_done(3)
    compute(kv, one)
    saved = kv.swap_out(one, 3 * BLOCK + 1, 3)
    assert saved is not None and len(saved) == 4
    one.num_computed_tokens = 0
    assert kv.swap_pool.num_used == 4 and kv.num_shared(same(first)) == 0
    kv.check_invariants([])
    assert kv.swap_pool.keep(0, None, 4) is None  # type: ignore[arg-type]


def test_a_copy_that_is_being_read_or_made_is_not_given_out() -> None:
    kv = offloading(num_host_blocks=4)
    first = filled(kv)
    again = same(first)
    admit(kv, again)
    assert kv.swap_pool.num_free(0) == 0
    kv.scheduled(3)
    one = request("one", BLOCK)
    kv.step_done(3)
    assert kv.swap_pool.num_free(0) == 4
    compute(kv, again)
    leave(kv, again, 3)
    admit(kv, one)
    pool = SwapPool([1])
    node = kv.prefix_cache.walk(first, 1)[0] if kv.prefix_cache else None
    assert node is not None and pool.keep(0, node, 5) == 0
    assert (pool.num_free(0), pool.keep(0, node, 5)) == (0, None)


def test_a_failed_step_made_no_copies() -> None:
    kv = offloading()
    first = request("first", 4 * BLOCK + 1)
    serve(kv, first, 1)
    other = request("other", 6 * BLOCK - 1)
    admit(kv, other)
    assert len(kv.scheduled(2)) == 4
    kv.step_done(2)
    kv.copies_lost(1)
    assert kv.num_shared(same(first)) == 4 * BLOCK
    kv.copies_lost(2)
    assert kv.num_shared(same(first)) == 0
    assert (kv.swap_pool.num_kept, kv.swap_pool.num_free(0)) == (0, 8)
    kv.check_invariants([other])


def test_a_refused_request_holds_no_copies() -> None:
    """With look-ahead the step is in flight when the next one needs host blocks for somebody who is preempted."""
    kv = offloading(num_host_blocks=16)
    first = filled(kv)
    admit(kv, request("one", 4 * BLOCK))
    kv.scheduled(3)
    kv.step_done(3)
    assert kv.num_shared(same(first)) == 4 * BLOCK
    assert kv.admit(same(first), 4 * BLOCK + 1) is None
    assert kv.swap_pool.num_free(0) == 16


@pytest.mark.parametrize("how", ["forget", "forget_all"])
def test_copies_of_broken_blocks_are_dropped(how: str) -> None:
    kv = offloading()
    first = filled(kv)
    again = same(first)
    admit(kv, again)
    kv.scheduled(3)
    kv.step_done(3)
    compute(kv, again)
    if how == "forget":
        kv.forget(again)
    else:
        kv.forget_all([again])
    assert kv.num_shared(same(first)) == 0
    assert kv.swap_pool.num_kept == (4 if how == "forget" else 0), "of the other, whose blocks have been evicted since"
    leave(kv, again, 3)


@pytest.mark.parametrize("landed", [True, False])
def test_the_beginning_of_a_failed_request_is_not_brought_back_again(landed: bool) -> None:
    """It fails in the very step that brings its beginning back, before any of that is offered to others."""
    kv = offloading()
    first = filled(kv)
    again = same(first)
    assert admit(kv, again).swap_in
    kv.scheduled(3)
    if landed:
        kv.step_done(3)
    kv.forget(again)
    assert kv.num_shared(same(first)) == 0
    kv.check_invariants([again])
    kv.step_done(3)
    leave(kv, again, 3)


def test_each_group_keeps_copies_of_its_own_evicted_blocks() -> None:
    kv = offloading(6, None, 5)
    first = request("first", 3 * BLOCK + 1)
    serve(kv, first, 1)
    assert len(serve(kv, request("other", 4 * BLOCK), 2)) == 4, "two of each group"
    again = same(first)
    admission = admit(kv, again)
    assert admission.num_computed_tokens == 3 * BLOCK
    full, windowed = again.block_ids
    assert windowed[:2] == [NULL_BLOCK] * 2 and NULL_BLOCK not in full
    moved = [(group, block) for group, _, block in admission.swap_in]
    assert moved == [(0, full[1]), (0, full[2]), (1, windowed[2])], "what the window has passed stays where it is"
    kv.check_invariants([again])


@pytest.mark.parametrize("how", ["failed step", "forget_all"])
def test_copies_are_dropped_in_every_group(how: str) -> None:
    kv = offloading(6, None, 5)
    serve(kv, request("first", 3 * BLOCK + 1), 1)
    assert {group for group, _, _ in serve(kv, request("other", 4 * BLOCK), 2)} == {0, 1}
    if how == "forget_all":
        kv.forget_all([])
    else:
        kv.copies_lost(2)
    assert kv.swap_pool.num_kept == 0
    kv.check_invariants([])


def test_a_copy_that_is_dropped_while_it_is_made_is_not_given_out_before_that() -> None:
    kv = offloading(num_host_blocks=4)
    first, other = request("first", 4 * BLOCK + 1), request("other", 6 * BLOCK - 1)
    serve(kv, first, 1)
    admit(kv, other)
    assert len(kv.scheduled(2)) == 4
    kv.forget_all([other])
    assert (kv.swap_pool.num_kept, kv.swap_pool.num_free(0)) == (0, 0)
    kv.step_done(2)
    assert kv.swap_pool.num_free(0) == 4


def test_the_audit_sees_a_copy_its_node_does_not_know_and_one_out_of_order() -> None:
    kv = offloading()
    first = filled(kv)
    assert kv.prefix_cache is not None
    kv.check_invariants([])
    node = kv.prefix_cache.walk(first, 1)[0]
    host, node.hosts[0] = node.hosts[0], 7
    with pytest.raises(InvariantError, match="kept in group 0"):
        kv.check_invariants([])
    node.hosts[0] = host
    kv.swap_pool._kept[0].move_to_end(3)
    kv.swap_pool._kept[0][0].used = 9
    with pytest.raises(InvariantError, match="out of order"):
        kv.check_invariants([])
