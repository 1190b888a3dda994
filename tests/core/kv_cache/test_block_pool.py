"""Reference counts and the order in which blocks are given out."""

from __future__ import annotations

import random

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


# -- retention ---------------------------------------------------------------------------------------------------------


def cached(pool: BlockPool, level: int) -> int:
    """A used block with known content that goes back with a retention level."""
    block = pool.allocate()[0]
    pool.attach(block, node())
    pool.retain(block, level)
    pool.release(block)
    return block


def pool_of(*levels: int) -> tuple[BlockPool, list[int]]:
    """A pool without a plain free block, and the cached block of each level in the order of their release."""
    pool = BlockPool(1 + len(levels))
    blocks = take(pool, len(levels))
    for block, level in zip(blocks, levels, strict=True):
        pool.attach(block, node())
        pool.retain(block, level)
        pool.release(block)
        pool.check_invariants({other: 1 for other in blocks if pool.ref_counts[other]})
    return pool, blocks


def test_lower_levels_are_evicted_first_and_the_oldest_within_a_level() -> None:
    pool, (high, mid, *low) = pool_of(2, 1, 0, 0, 0, 0)
    assert (pool.num_free, pool.num_cached, pool.num_protected) == (6, 6, 2)
    assert take(pool, 6) == [*low, mid, high]
    assert (pool.num_free, pool.num_cached, pool.num_protected) == (0, 0, 0)


def test_blocks_without_content_go_before_cached_ones_of_any_level() -> None:
    pool = BlockPool(6)
    first = cached(pool, 0)
    assert take(pool, 5)[-1] == first
    pool = BlockPool(6)
    first = cached(pool, 2)
    assert take(pool, 5)[-1] == first


def test_at_most_half_is_protected_and_the_oldest_falls_back() -> None:
    pool, blocks = pool_of(2, 1, 1, 2, 0, 1)
    # Room for three: the first two, of whatever level, count as level 0 from when there were too many.
    assert pool.num_protected == 3
    assert take(pool, 6) == [blocks[0], blocks[4], blocks[1], blocks[2], blocks[5], blocks[3]]


def test_a_block_keeps_its_highest_level_until_it_is_given_out_anew() -> None:
    pool = BlockPool(5)
    block = cached(pool, 2)
    pool.share(block)
    pool.retain(block, 1)
    pool.release(block)
    assert pool.num_protected == 1
    assert take(pool, 4)[-1] == block
    pool.attach(block, node())
    pool.release(block)
    assert (pool.num_protected, pool.num_cached) == (0, 1)


def test_protected_blocks_can_be_shared_and_forgotten() -> None:
    pool = BlockPool(7)
    first, second = cached(pool, 2), cached(pool, 1)
    pool.share(first)
    pool.detach(second)
    assert (pool.num_protected, pool.num_cached, pool.num_free) == (0, 0, 5)
    pool.check_invariants({first: 1})
    assert pool.allocate() == (second, None)


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_eviction_is_that_of_a_sorted_list(seed: int) -> None:
    """Against a list of (level, block), sorted anew for each question."""
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(2, 12))
    used: list[int] = []
    plain, kept = list(range(pool.capacity, 0, -1)), []  # kept: (level, block), least recently released first
    levels = dict.fromkeys(range(1, pool.num_blocks), 0)
    for _ in range(400):
        action = rng.choice(["allocate", "release", "release", "share", "detach"])
        if action == "allocate" and pool.num_free:
            block, evicted = pool.allocate()
            expected = plain.pop() if plain else min(kept, key=lambda entry: entry[0])[1]
            assert (block, evicted is not None) == (expected, any(entry[1] == expected for entry in kept))
            kept = [entry for entry in kept if entry[1] != block]
            levels[block] = 0
            used.append(block)
            if rng.random() < 0.8:
                pool.attach(block, node())
        elif action == "release" and used:
            block = used.pop(rng.randrange(len(used)))
            level = rng.randint(0, 2)
            pool.retain(block, level)
            pool.release(block)
            if pool.nodes[block] is None:
                plain.append(block)
                continue
            levels[block] = max(levels[block], level)
            kept.append((levels[block], block))
            protected = [entry for entry in kept if entry[0]]
            if len(protected) > pool.capacity // 2:
                kept.remove(protected[0])
                kept.append((0, protected[0][1]))
                levels[protected[0][1]] = 0
        elif kept:
            entry = kept.pop(rng.randrange(len(kept)))
            if action == "share":
                pool.share(entry[1])
                used.append(entry[1])
            else:
                pool.detach(entry[1])
                plain.append(entry[1])
        pool.check_invariants(dict.fromkeys(used, 1))
