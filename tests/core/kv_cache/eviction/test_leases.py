"""Leases: which block goes first, the budget, and the part of each tenant."""

from __future__ import annotations

import math
import random

import pytest

from chairlift.core.kv_cache.block_pool import BlockPool
from chairlift.core.kv_cache.eviction.lease import LeaseRule
from chairlift.core.kv_cache.eviction.leases import Lease, LeaseOrder
from chairlift.core.kv_cache.prefix_node import PrefixNode


def node() -> PrefixNode:
    return PrefixNode(b"", None, b"", 1)


def take(pool: BlockPool, count: int) -> list[int]:
    return [pool.allocate()[0] for _ in range(count)]


class Pool:
    """A pool with the rule, and the blocks that were released into it."""

    def __init__(self, capacity: int) -> None:
        self.rule = LeaseRule()
        self.pool = BlockPool(1 + capacity, self.rule)
        self.order: LeaseOrder = self.rule.orders[0]

    def fill(self, *leases: Lease | None) -> list[int]:
        """Use one block for each lease, all at once, and release them in this order."""
        blocks = take(self.pool, len(leases))
        for block, lease in zip(blocks, leases, strict=True):
            self.pool.attach(block, node())
            if lease is not None:
                self.order.lease(block, lease)
            self.pool.release(block)
            self.pool.check_invariants({other: 1 for other in blocks if self.pool.ref_counts[other]})
        return blocks


def test_ended_leases_go_first_then_ordinary_blocks_then_leased_ones() -> None:
    each = Pool(12)
    late, plain, soon, high, over, *more = each.fill(
        Lease(1, 9.0), None, Lease(1, 5.0), Lease(2), Lease(1, 2.0), *[None] * 7
    )
    each.rule.now = 2.0
    assert take(each.pool, 12) == [over, plain, *more, soon, late, high]


def test_of_leased_blocks_those_that_are_expected_last_go_first() -> None:
    each = Pool(8)
    early, late, middle, unknown, *plain = each.fill(
        Lease(3, 50.0, "", 1, 10.0),
        Lease(3, 40.0, "", 2, 30.0),
        Lease(3, 90.0, "", 3, 20.0),
        Lease(3, 60.0),
        *[None] * 4,
    )
    assert take(each.pool, 8) == [*plain, unknown, late, middle, early]


def test_a_full_budget_takes_no_conversation_that_comes_later_than_those_that_it_has() -> None:
    """Twelve conversations that take turns find nothing if the one that comes next always loses its blocks."""
    each = Pool(8)
    blocks = each.fill(*[Lease(3, 50.0 + number, "", number + 1, 10.0 + number) for number in range(8)])
    assert each.order.num_leased == 4
    assert take(each.pool, 8) == [*blocks[4:], *blocks[3::-1]]


def test_a_block_of_two_turns_is_kept_as_long_as_either_needs_it() -> None:
    each = Pool(8)
    shared, own, *_ = each.fill(Lease(3, 20.0, "", 1, 10.0), Lease(3, 20.0, "", 1, 10.0), *[None] * 6)
    each.order.lease(shared, Lease(3, 40.0, "", 2, 30.0))
    assert each.order._leases[shared] == Lease(3, 40.0, "", 0, 10.0)
    each.order.end(shared, 1)
    each.order.end(own, 1)
    assert (each.order.num_leased, take(each.pool, 1)) == (1, [own])


def test_time_is_compared_when_a_block_is_needed() -> None:
    each = Pool(4)
    leased, _, plain, _ = each.fill(Lease(1, 3.0), None, None, None)
    each.rule.now = 2.9
    assert take(each.pool, 1) != [leased]
    each.rule.now = 3.0
    assert take(each.pool, 1) == [leased]
    each.rule.now = 1.0  # a clock that goes back gives no lease back
    assert take(each.pool, 1) == [plain]


def test_the_last_block_of_a_request_goes_before_the_blocks_that_it_follows() -> None:
    each = Pool(8)
    leaf, middle, root, *plain = each.fill(*[Lease(1, 5.0)] * 3, *[None] * 5)
    assert take(each.pool, 8) == [*plain, leaf, middle, root]


def test_a_used_block_keeps_its_lease_until_it_ends() -> None:
    each = Pool(4)
    leased, *plain = each.fill(Lease(1, 5.0), None, None, None)
    each.pool.share(leased)
    each.pool.release(leased)
    assert each.order.num_leased == 1
    each.pool.share(leased)
    each.rule.now = 6.0
    each.pool.release(leased)  # used just now, so it goes after those that were not
    assert take(each.pool, 4) == [*plain, leased]


def test_the_greater_of_two_leases_holds() -> None:
    each = Pool(8)
    block, *_ = each.fill(Lease(1, 5.0), *[None] * 7)
    each.order.lease(block, Lease(0, 9.0))
    assert each.order.held_by() == {"": 1}
    each.order.lease(block, Lease(1, 7.0, "a"))
    assert each.order.held_by() == {"a": 1}
    each.rule.now = 7.5
    each.order.lease(block, Lease(0, 9.0, "b"))  # the other one has ended
    assert each.order.held_by() == {"b": 1}
    each.pool.check_invariants({})


def test_a_lease_can_be_ended_and_its_block_goes_first() -> None:
    each = Pool(6)
    first, *plain = each.fill(Lease(2), *[None] * 5)
    each.order.end(plain[0], 0)  # it has none
    each.order.end(first, 1)
    assert each.order.num_leased == 1  # the lease is not that of turn 1
    each.order.end(first, 0)
    assert take(each.pool, 3) == [first, plain[0], plain[1]]
    assert each.order.num_leased == 0


def test_a_block_with_new_content_has_no_lease() -> None:
    each = Pool(2)
    first, _ = each.fill(Lease(2), None)
    each.pool.share(first)
    each.pool.detach(first)
    each.pool.release(first)
    (again,) = take(each.pool, 1)
    assert again == first
    each.pool.attach(again, node())
    each.pool.release(again)
    assert each.order.num_leased == 0


def test_at_most_half_is_leased_and_the_lowest_lease_ends() -> None:
    each = Pool(6)
    blocks = each.fill(Lease(2), Lease(1), Lease(1), Lease(2), None, Lease(1))
    assert each.order.num_leased == 3
    assert take(each.pool, 6) == [blocks[i] for i in (1, 4, 2, 5, 0, 3)]


def test_a_tenant_within_its_share_loses_nothing_to_others() -> None:
    each = Pool(16)
    each.rule.prices.tenant_weights = {"heavy": 3.0}
    each.fill(*[Lease(1, 50.0, "small")] * 2, *[Lease(2, math.inf, "heavy")] * 14)
    assert each.order.held_by() == {"small": 2, "heavy": 6}
    each.fill(*[Lease(1, 60.0, "small")] * 8)
    assert each.order.held_by() == {"small": 2, "heavy": 6}


def test_one_tenant_alone_may_have_the_whole_budget() -> None:
    each = Pool(10)
    each.fill(*[Lease(1, 50.0, "only")] * 10)
    assert each.order.held_by() == {"only": 5}


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_eviction_is_that_of_a_sorted_list(seed: int) -> None:
    """Against a list of (part, level, next use, end, number of the release), sorted anew for each question."""
    rng = random.Random(seed)
    each = Pool(rng.randint(2, 12))
    pool = each.pool
    used: list[int] = []
    plain = list(range(pool.capacity, 0, -1))
    kept: dict[int, tuple[int, Lease | None]] = {}  # block -> (number of its release, its lease)
    leases: dict[int, Lease] = {}
    count = 0

    def key(block: int) -> tuple[float, ...]:
        number, lease = kept[block]
        return (1, number) if lease is None else (2, *lease.queue, number)

    for _ in range(400):
        action = rng.choice(["allocate", "release", "release", "share", "detach"])
        if action == "allocate" and pool.num_free:
            block, evicted = pool.allocate()
            expected = plain.pop() if plain else min(kept, key=key)
            assert (block, evicted is not None) == (expected, expected in kept)
            kept.pop(block, None)
            leases.pop(block, None)
            used.append(block)
            if rng.random() < 0.8:
                pool.attach(block, node())
        elif action == "release" and used:
            block = used.pop(rng.randrange(len(used)))
            if pool.nodes[block] is None:
                pool.release(block)
                plain.append(block)
                continue
            lease = Lease(rng.randint(1, 2), rng.choice([5.0, 7.0, math.inf]), "", 0, rng.choice([3.0, 4.0]))
            if rng.random() < 0.7:
                each.order.lease(block, lease)
                older = leases.get(block, lease)
                leases[block] = max(older, lease)
                if older.level == lease.level:
                    leases[block] = leases[block]._replace(expected=min(older.expected, lease.expected))
            pool.release(block)
            count += 1
            kept[block] = count, leases.get(block)
            leased = [other for other, (_, lease) in kept.items() if lease is not None]
            if len(leased) > pool.capacity // 2:
                first = min(leased, key=key)
                count += 1
                kept[first] = count, None
                del leases[first]
        elif kept:
            block = rng.choice(sorted(kept))
            del kept[block]
            if action == "share":
                pool.share(block)
                used.append(block)
            else:
                pool.detach(block)
                plain.append(block)
                leases.pop(block, None)
        pool.check_invariants(dict.fromkeys(used, 1))
