"""Reference counts and the order in which blocks are given out."""

from __future__ import annotations

import pytest

from chairlift.core.kv_cache.block_pool import NULL_BLOCK, BlockPool
from chairlift.core.kv_cache.prefix_node import PrefixNode
from chairlift.errors import ConfigError, InvariantError


def node() -> PrefixNode:
    return PrefixNode(b"", None, (), 1)


def take(pool: BlockPool, count: int) -> list[int]:
    return [pool.allocate()[0] for _ in range(count)]


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_without_room_is_refused(num_blocks: int) -> None:
    with pytest.raises(ConfigError, match=f"got {num_blocks}"):
        BlockPool(num_blocks)


def test_every_block_but_the_null_block_is_given_out_once() -> None:
    pool = BlockPool(6)
    assert pool.capacity == pool.num_free == 5
    assert sorted(take(pool, 5)) == [1, 2, 3, 4, 5]
    assert (pool.num_free, pool.num_used) == (0, 5)
    pool.check_invariants(dict.fromkeys(range(1, 6), 1))


def test_blocks_without_content_go_first_then_the_least_recently_used() -> None:
    pool = BlockPool(6)
    first, second, third, *plain = take(pool, 5)
    for block in (first, second, third):
        pool.attach(block, node())
    for block in (second, plain[0], first, plain[1], third):
        pool.release(block)
    assert pool.num_cached == 3
    given = [pool.allocate() for _ in range(5)]
    assert [block for block, _ in given] == [plain[1], plain[0], second, first, third]
    assert [evicted is not None for _, evicted in given] == [False, False, True, True, True]
    assert pool.num_cached == 0


def test_sharing_a_cached_block_takes_it_off_the_free_list() -> None:
    pool = BlockPool(3)
    block, other = take(pool, 2)
    pool.attach(block, node())
    pool.release(block)
    pool.share(block)
    pool.share(block)
    assert (pool.num_free, pool.num_cached, pool.ref_counts[block]) == (0, 0, 2)
    pool.check_invariants({block: 2, other: 1})
    pool.release(block)
    assert pool.num_free == 0
    pool.release(block)
    assert (pool.num_free, pool.num_cached) == (1, 1)


def test_a_used_block_the_cache_forgets_is_plain_when_it_comes_back() -> None:
    pool = BlockPool(3)
    block = take(pool, 1)[0]
    pool.attach(block, node())
    pool.detach(block)
    pool.release(block)
    assert pool.num_cached == 0
    assert pool.allocate() == (block, None)


def test_a_free_block_the_cache_forgets_is_given_out_first() -> None:
    pool = BlockPool(4)
    block = take(pool, 1)[0]
    pool.attach(block, node())
    pool.release(block)
    pool.detach(block)
    assert pool.num_cached == 0
    assert pool.allocate() == (block, None)


@pytest.mark.parametrize("block", [NULL_BLOCK, 1])
def test_releasing_what_is_not_taken_is_a_bug(block: int) -> None:
    with pytest.raises(InvariantError, match=f"block {block} was released"):
        BlockPool(3).release(block)


def test_the_audit_sees_a_lost_reference() -> None:
    pool = BlockPool(3)
    block = take(pool, 1)[0]
    pool.check_invariants({block: 1})
    for wrong in ({}, {block: 2}, {block: 1, block + 1: 1}):
        with pytest.raises(InvariantError):
            pool.check_invariants(wrong)
