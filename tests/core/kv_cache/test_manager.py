"""Block tables: what is taken, shared, copied, left behind and given back."""

from __future__ import annotations

import dataclasses

import pytest

from chairlift.base.prefix_keys import block_tokens
from chairlift.config import CacheGroup
from chairlift.core.kv_cache.block_pool import NULL_BLOCK
from chairlift.core.kv_cache.manager import KVCacheManager, NewBlocks
from chairlift.core.request import Request
from chairlift.errors import ConfigError, InvariantError
from tests.core.kv_cache.make import BLOCK, admit, compute, manager, request


@pytest.mark.parametrize("block_size", [0, 3, 24, 512, -16])
def test_block_size_must_be_a_power_of_two(block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"got {block_size}"):
        KVCacheManager([CacheGroup(8)], block_size, max_step_tokens=8)


def test_a_model_that_keeps_nothing_has_no_group() -> None:
    """Its requests need no block, whatever their length, and share nothing."""
    kv = KVCacheManager([], 16, max_step_tokens=8, enable_prefix_caching=False)
    one = request("one", 1000)
    assert kv.fits_when_empty(10**9) and admit(kv, one).num_computed_tokens == 0
    assert (one.block_ids, kv.tables.num_missing(one, 1000), kv.tables.num_remaining(one, 0, 64)) == ([], 0, 64)
    kv.check_invariants([one])
    kv.tables.free(one, 0)
    assert sum(dataclasses.astuple(kv.counts())) == 0


@pytest.mark.parametrize(("length", "blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_admission_takes_what_the_tokens_need(length: int, blocks: int) -> None:
    kv = manager()
    one = request("one", length)
    assert admit(kv, one).num_computed_tokens == 0
    assert len(one.block_ids[0]) == blocks == kv.counts().used
    kv.check_invariants([one])


def test_a_request_that_does_not_fit_takes_nothing() -> None:
    kv = manager(num_blocks=4)
    admit(kv, request("one", 8))
    before = kv.counts()
    assert kv.admit(request("two", 8), 8) is None
    assert kv.counts() == before
    admit(kv, request("three", 4))


@pytest.mark.parametrize(("free", "fits"), [(0.5, True), (0.51, False)])
def test_the_watermark_stays_free(free: float, fits: bool) -> None:
    kv = manager(num_blocks=9)
    assert (kv.admit(request("one", 16), 16, free) is not None) == fits


def test_a_refused_request_is_admitted_after_the_watermark_is_lowered() -> None:
    kv = manager(num_blocks=9)
    one = request("one", 16)
    assert kv.admit(one, 16, 0.51) is None and kv.admit(one, 16, 0.51) is None
    assert kv.admit(one, 16, 0.0) is not None


def test_a_fork_that_was_refused_is_let_in_once_its_source_has_a_token() -> None:
    kv = manager(num_blocks=5, enable_prefix_caching=False)
    source = request("source", 9)
    admit(kv, source)
    fork = request("fork", source.token_ids[:9], source=source)
    assert kv.admit(fork, 9) is None
    compute(kv, source)
    assert kv.admit(fork, 9) is not None


def test_extend_adds_only_what_is_missing() -> None:
    kv = manager(num_blocks=4)
    one = request("one", 5)
    admit(kv, one)
    first = list(one.block_ids[0])
    assert kv.tables.extend(one, 8, -1) == []
    grown = kv.tables.extend(one, 9, -1)
    assert grown == [NewBlocks(0, 2, one.block_ids[0][2:])]
    assert one.block_ids[0][:2] == first
    assert kv.tables.extend(one, 13, -1) is None
    assert len(one.block_ids[0]) == 3
    kv.check_invariants([one])


def test_a_request_that_leaves_frees_its_unshared_blocks_only() -> None:
    kv = manager(num_blocks=5)
    one, two, other = request("one", [*range(9)]), request("two", [*range(9)]), request("other", 4)
    admit(kv, one)
    compute(kv, one)
    admit(kv, two)
    assert kv.counts().used == 4
    assert kv.lacks(other, BLOCK, 0.0)
    assert not kv.lacks(other, BLOCK, 0.0, [two])
    assert kv.lacks(other, 2 * BLOCK, 0.0, [two])


@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_request_lacks_only_the_blocks_that_nobody_who_stays_shares_with_it(in_flight: int) -> None:
    kv = manager(num_blocks=9)  # one of them is the null block
    staying = request("a", 4 * BLOCK)
    admit(kv, staying)
    compute(kv, staying)
    leaving = request("b", staying.token_ids[: 2 * BLOCK] + [7] * (2 * BLOCK))
    assert admit(kv, leaving).num_computed_tokens == 2 * BLOCK
    compute(kv, leaving)
    kv.scheduled(in_flight)
    # Two blocks are free. The newcomer shares two, and three are of its own.
    newcomer = request("c", staying.token_ids[: 2 * BLOCK] + [8] * (3 * BLOCK))
    reserve = len(newcomer.token_ids)
    assert kv.lacks(newcomer, reserve, 0.0)
    assert not kv.lacks(newcomer, reserve, 0.0, [leaving])
    assert kv.lacks(newcomer, reserve + 2 * BLOCK, 0.0, [leaving])
    # If both leave, the two shared blocks are free once, not twice, and the newcomer still uses them.
    assert not kv.lacks(newcomer, 8 * BLOCK, 0.0, [leaving, staying])
    assert kv.lacks(newcomer, 8 * BLOCK + 1, 0.0, [leaving, staying])
    kv.tables.free(leaving, in_flight)
    assert not kv.lacks(newcomer, reserve, 0.0)
    kv.step_done(in_flight)
    assert admit(kv, newcomer).num_computed_tokens == 2 * BLOCK


def test_blocks_computed_behind_a_shared_beginning_are_shared_too() -> None:
    kv = manager()
    requests = [request(name, [*range(length)]) for name, length in [("one", 9), ("two", 17), ("three", 17)]]
    known = []
    for one in requests:
        known.append(admit(kv, one).num_computed_tokens)
        compute(kv, one)
    assert known == [0, 8, 16]


def test_freed_blocks_wait_for_the_step_in_flight() -> None:
    kv = manager(num_blocks=4)
    one, two, other = request("one", 4), request("two", 8), request("other", 4)
    admit(kv, one)
    admit(kv, two)
    kv.tables.free(one, 7)
    kv.tables.free(two, 9)
    assert kv.counts().used == 3
    kv.step_done(6)
    assert kv.admit(other, 4) is None
    kv.check_invariants([])
    kv.step_done(7)
    assert kv.counts().used == 2
    admit(kv, other)
    kv.step_done(9)
    assert kv.counts().used == 1


def test_blocks_that_come_back_soon_are_not_missing() -> None:
    kv = manager(num_blocks=4)
    one, two = request("one", 4), request("two", 8)
    admit(kv, one)
    admit(kv, two)
    assert kv.tables.num_missing(one, 8) == 1
    kv.tables.free(two, 5)
    assert kv.tables.extend(one, 8, 5) is None
    assert not kv.tables.num_missing(one, 8)
    kv.step_done(5)
    assert kv.tables.extend(one, 8, 5) is not None


def test_blocks_of_a_finished_step_are_free_at_once() -> None:
    kv = manager()
    one = request("one", 4)
    admit(kv, one)
    kv.step_done(3)
    kv.tables.free(one, 3)
    assert kv.counts().used == 0


@pytest.mark.parametrize(("length", "copied"), [(8, True), (9, False), (10, True), (2, True), (1, False)])
@pytest.mark.parametrize("caching", [True, False])
def test_a_fork_shares_full_blocks_and_copies_the_one_it_writes(length: int, copied: bool, caching: bool) -> None:
    kv = manager(enable_prefix_caching=caching)
    source = request("source", length)
    admit(kv, source)
    compute(kv, source)
    fork = request("fork", source.token_ids[:length], source=source)
    admission = admit(kv, fork)
    full = (length - 1) // BLOCK
    assert admission.num_computed_tokens == length - 1  # the last prompt token is computed again, for its logits
    assert fork.block_ids[0][:full] == source.block_ids[0][:full]
    assert fork.block_ids[0][full] != source.block_ids[0][full]
    assert admission.copies == ([(0, source.block_ids[0][full], fork.block_ids[0][full])] if copied else [])
    fork.num_computed_tokens = length
    kv.check_invariants([source, fork])
    kv.tables.free(source, -1)
    kv.check_invariants([fork])
    kv.tables.free(fork, -1)
    assert kv.counts().used == 0


def test_a_source_without_a_token_is_not_forked() -> None:
    kv = manager()
    source = request("source", 9)
    admit(kv, source)
    source.num_computed_tokens = 9  # scheduled, but the step is still in flight
    fork = request("fork", source.token_ids, source=source)
    assert admit(kv, fork).num_computed_tokens == 0


@pytest.mark.parametrize("share", [{"share": False}, {}])
def test_a_request_that_may_not_share_gets_its_own_blocks(share: dict[str, bool]) -> None:
    kv = manager()
    one = request("one", 9)
    admit(kv, one)
    compute(kv, one)
    two = request("two", one.token_ids[:9], may_share=bool(share))
    assert admit(kv, two, **share).num_computed_tokens == 0
    assert not set(one.block_ids[0]) & set(two.block_ids[0])


@pytest.mark.parametrize("window", [1, 3, 4, 5, 9])
def test_blocks_behind_a_window_are_released(window: int) -> None:
    kv = manager(40, window, max_step_tokens=1)
    one = request("one", 1, max_tokens=60)
    admit(kv, one)
    for position in range(1, 60):
        one.num_computed_tokens = position
        assert kv.tables.extend(one, position + 1, -1) is not None
        table = one.block_ids[0]
        reach = max(0, position - window + 1) // BLOCK
        assert all(block == NULL_BLOCK for block in table[:reach])
        assert NULL_BLOCK not in table[reach:]
        assert kv.counts().used <= kv.layout.blocks_for(0, 60)
        kv.check_invariants([one])
    kv.tables.free(one, -1)
    assert kv.counts().used == kv.tables.held_blocks == 0


def test_blocks_behind_a_window_stay_while_a_step_uses_them() -> None:
    kv = manager(40, 4)
    one = request("one", 12)
    admit(kv, one)
    one.num_computed_tokens = 12
    used = kv.counts().used
    kv.tables.extend(one, 13, 5)
    assert kv.counts().used == used + 1
    kv.check_invariants([one])
    kv.step_done(5)
    assert kv.counts().used == used + 1 - 2


def test_every_group_releases_blocks_behind_its_window_while_one_group_is_short() -> None:
    """Or who asks is said to lack what it need not take from anybody."""
    kv = manager(3, 4, 7)
    one = request("one", 8)
    admit(kv, one)
    one.num_computed_tokens = 8
    assert kv.tables.extend(one, 9, 5) is None, "step 5 still reads what is given back"
    assert kv.tables.num_missing(one, 9) == 1
    one.num_computed_tokens = 10
    assert kv.tables.extend(one, 11, 6) is None
    assert kv.tables.num_missing(one, 11) == 0
    kv.step_done(6)
    assert kv.tables.extend(one, 11, 6)


def guaranteed(name: str, tokens: int | list[int]) -> Request:
    one = request(name, tokens, max_tokens=60)
    one.is_guaranteed = True
    return one


def test_blocks_behind_the_window_of_a_guaranteed_request_stay_reserved() -> None:
    kv = manager(8, 8)  # a window and a step of 8 tokens are 5 blocks at most
    one, two, pushy = guaranteed("one", 40), request("two", 4), request("pushy", 12)
    admit(kv, one, one.reserve)
    one.num_computed_tokens = 16
    assert kv.tables.extend(one, 17, -1) == []
    assert one.block_ids[0].count(NULL_BLOCK) == 2
    assert kv.counts().free == 4
    assert kv.lacks(pushy, 12, 0.0)
    assert kv.admit(pushy, 12) is None, "two of the four are promised"
    admit(kv, two)
    assert kv.tables.extend(two, 8, -1)
    assert kv.tables.extend(two, 12, -1) is None
    assert kv.tables.num_missing(two, 12) == 1
    kv.check_invariants([one, two])
    for position in range(17, one.limit + 1):
        one.num_computed_tokens = position - 1
        assert kv.tables.extend(one, position, -1) is not None
        kv.check_invariants([one, two])
        if position == 41:
            assert kv.tables.extend(two, 12, -1), "after its prompt it computes a token a step, and has a right to less"
    kv.tables.free(one, -1)
    kv.tables.free(two, -1)
    admit(kv, guaranteed("three", 13), 5 * BLOCK)


def test_guaranteed_requests_that_share_reserve_as_many_blocks_as_apart() -> None:
    """Blocks of a request that left are not freed while another reads them."""
    kv = manager(10, 8)
    one = guaranteed("one", 13)
    admit(kv, one, one.reserve)
    compute(kv, one)
    same = guaranteed("two", one.token_ids[:13])
    assert kv.lacks(same, same.reserve, 0.0)
    assert kv.admit(same, same.reserve) is None, "ten blocks apart, and there are nine"
    assert kv.admit(request("three", same.token_ids), 13) is not None


def test_the_audit_notices_a_wrong_reservation() -> None:
    kv = manager(8, 8)
    one = guaranteed("one", 13)
    admit(kv, one, one.reserve)
    one.reserved[0] = (6, 1)
    with pytest.raises(InvariantError, match="the cache counts otherwise"):
        kv.check_invariants([one])


def test_a_hybrid_shares_only_what_every_group_still_has() -> None:
    kv = manager(40, None, 4)
    one = request("one", list(range(17)))
    admit(kv, one)
    for end in (8, 16, 17):
        assert kv.tables.extend(one, end, -1) is not None
        one.num_computed_tokens = end
        kv.publish(one, end)
    kv.tables.free(one, -1)
    pool = kv.pools[1]
    full = request("full", [*range(16), 99])
    assert admit(kv, full).num_computed_tokens == 16
    assert full.block_ids[1][:3] == [NULL_BLOCK] * 3
    kv.tables.free(full, -1)
    node = pool.nodes[full.block_ids[1][3]] if full.block_ids else None
    assert node is None
    # Take the window group's last block away: now the hit must end where that group still has a whole window.
    last = next(
        b for b in range(1, 40) if (n := pool.nodes[b]) is not None and n.tokens == block_tokens([12, 13, 14, 15])
    )
    lost = pool.nodes[last]
    assert lost is not None
    assert kv.prefix_cache is not None
    pool.detach(last)
    kv.prefix_cache.evicted(1, lost)
    probe = request("probe", [*range(16), 99])
    assert admit(kv, probe).num_computed_tokens == 12
    kv.check_invariants([probe])


@pytest.mark.parametrize(
    ("windows", "num_tokens", "fits"),
    [((None,), 28, True), ((None,), 29, False), ((4,), 10_000, True), ((40,), 29, False), ((None, 4), 29, False)],
)
def test_fits_when_empty_agrees_with_the_capacity(windows: tuple[int | None, ...], num_tokens: int, fits: bool) -> None:
    kv = manager(8, *windows)
    assert kv.fits_when_empty(num_tokens) == fits
    assert (num_tokens <= kv.capacity_tokens) == fits


def test_counts_add_up_over_groups() -> None:
    kv = manager(9, None, 4)
    one = request("one", 8)
    admit(kv, one)
    compute(kv, one)
    kv.tables.free(one, -1)
    counts = kv.counts()
    assert (counts.used, counts.cached, counts.free) == (0, 4, 12)


def test_the_audit_sees_a_write_to_a_shared_block() -> None:
    kv = manager()
    one, two = request("one", [1] * 9), request("two", [1] * 9)
    admit(kv, one)
    compute(kv, one)
    admit(kv, two)
    two.num_computed_tokens = 4
    with pytest.raises(InvariantError, match="others can read"):
        kv.check_invariants([one, two])
