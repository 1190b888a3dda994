"""Equal beginnings are shared, and nothing else is: not by collision, not across salts or adapters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from chairlift.core.kv_cache.manager import KVCacheManager
from chairlift.core.kv_cache.prefix_cache import NEVER
from tests.core.kv_cache.make import BLOCK, admit, compute, manager, request

PROMPT = list(range(100, 113))  # three full blocks and one token


def weak_hash(bits: int) -> Callable[[bytes], bytes]:
    return lambda data: bytes([hashlib.sha256(data).digest()[0] & ((1 << bits) - 1)])


def hit(kv: KVCacheManager, prompt: list[int], **settings: Any) -> int:
    """Tokens that a request with this prompt finds in the cache; the request leaves at once."""
    probe = request("probe", prompt, **settings)
    found = admit(kv, probe).num_computed_tokens
    kv.tables.free(probe, -1)
    return found


def filled(kv: KVCacheManager, prompt: list[int], **settings: Any) -> KVCacheManager:
    first = request("first", prompt, **settings)
    admit(kv, first)
    compute(kv, first)
    kv.tables.free(first, -1)
    return kv


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (PROMPT, 12),
        (PROMPT[:12], 8),  # the last token must be computed, for its logits
        (PROMPT[:11], 8),
        (PROMPT[:8] + [7] * 8, 8),
        (PROMPT[:7] + [7] * 8, 4),
        ([7, *PROMPT], 0),
        (PROMPT[:1], 0),
    ],
)
def test_a_hit_is_the_longest_common_beginning_in_full_blocks(prompt: list[int], expected: int) -> None:
    assert hit(filled(manager(), PROMPT), prompt) == expected


def test_caching_can_be_switched_off() -> None:
    kv = filled(manager(enable_prefix_caching=False), PROMPT)
    assert hit(kv, PROMPT) == 0
    assert kv.counts().cached == 0


@pytest.mark.parametrize(
    ("owner", "reader", "shared"),
    [
        ({}, {}, True),
        ({"cache_salt": "a"}, {"cache_salt": "a"}, True),
        ({"cache_salt": "a"}, {"cache_salt": "b"}, False),
        ({"cache_salt": "a"}, {}, False),
        ({"adapter_id": 1}, {"adapter_id": 1}, True),
        ({"adapter_id": 1}, {"adapter_id": 2}, False),
        ({"adapter_id": 1}, {}, False),
        ({"adapter_id": 1, "cache_salt": "1"}, {"adapter_id": 11, "cache_salt": ""}, False),
    ],
)
@pytest.mark.parametrize("bits", [None, 0, 1])
def test_salts_and_adapters_separate_blocks(
    owner: dict[str, Any], reader: dict[str, Any], shared: bool, bits: int | None
) -> None:
    seam: dict[str, Any] = {} if bits is None else {"hash_function": weak_hash(bits)}
    kv = filled(manager(**seam), PROMPT, **owner)
    found = hit(kv, PROMPT, **reader)
    assert found in ((0, 4, 8, 12) if shared else (0,))  # with few hash bits content may be unfindable, never foreign
    if bits is None:
        assert found == (12 if shared else 0)


@pytest.mark.parametrize("bits", [0, 2, 4, 6])
def test_collisions_never_share_foreign_content(bits: int) -> None:
    """Every hit is checked against a book of what was written into each block."""
    kv = manager(num_blocks=40, hash_function=weak_hash(bits))
    written: dict[int, tuple[int, ...]] = {}
    hits = 0
    for number in range(60):
        prompt = [number % 3] * (number % 5) + [number % 7, *range(number % 11)] + [5] * 4
        one = request(f"r{number}", prompt)
        known = admit(kv, one).num_computed_tokens
        hits += known
        for index, block in enumerate(one.block_ids[0]):
            content = tuple(prompt[: (index + 1) * BLOCK])
            if index * BLOCK < known:
                assert written[block] == content
            else:
                written[block] = content
        compute(kv, one)
        kv.check_invariants([one])
        kv.tables.free(one, -1)
        kv.check_invariants([])
    assert hits or bits < 6


def test_keys_depend_on_the_secret() -> None:
    keys = []
    for secret in (b"one", b"two", b"one"):
        kv = filled(manager(secret=secret), PROMPT)
        assert kv.prefix_cache is not None
        keys.append(set(kv.prefix_cache._nodes))
    assert keys[0] == keys[2]
    assert not keys[0] & keys[1]


def test_the_end_of_a_prompt_is_evicted_before_its_beginning() -> None:
    kv = filled(manager(num_blocks=9), PROMPT)
    assert kv.counts().cached == 3
    seen = []
    for count in range(6, 9):
        other = request(f"other{count}", count * BLOCK)
        admit(kv, other)
        kv.tables.free(other, -1)
        seen.append(hit(kv, PROMPT))
    assert seen == [8, 4, 0]


def test_a_hit_renews_a_prompt() -> None:
    kv = manager(num_blocks=9)
    old, new = [1] * 9, [2] * 9
    filled(kv, old)
    filled(kv, new)
    hit(kv, old)
    other = request("other", 6 * BLOCK)  # takes the four plain blocks and two of the four cached ones
    admit(kv, other)
    kv.tables.free(other, -1)
    assert (hit(kv, old), hit(kv, new)) == (8, 0)


def test_a_parent_outlives_its_children_and_a_child_survives_without_its_parents_block() -> None:
    """A window group gives the beginning back; the path to what is still there must stay whole."""
    kv = manager(12, 4)
    one = request("one", list(range(16)))
    admit(kv, one)
    for end in (8, 16):
        assert kv.tables.extend(one, end, -1) is not None
        one.num_computed_tokens = end
        kv.publish(one, end)
    kv.tables.extend(one, 17, -1)
    kv.check_invariants([one])
    other = request("other", 7 * BLOCK)
    admit(kv, other)
    kv.check_invariants([one, other])
    kv.tables.free(other, -1)
    # Only the last window of the 16 tokens is still cached, and it is enough.
    assert hit(kv, [*range(16), 5]) == 16
    kv.tables.free(one, -1)
    kv.check_invariants([])


def test_publishing_after_eviction_starts_again_from_the_root() -> None:
    kv = manager(num_blocks=9)
    one = request("one", PROMPT)
    admit(kv, one)
    compute(kv, one)
    kv.forget(one)  # as if another request had failed that shared these blocks
    assert kv.prefix_cache is not None
    assert len(kv.prefix_cache) == 0
    one.num_published = 3
    one.token_ids += [1, 2, 3]
    assert kv.tables.extend(one, 17, -1) is not None
    one.num_computed_tokens = 16
    kv.publish(one, 16)
    kv.check_invariants([one])
    assert hit(kv, [*one.token_ids, 9]) == 16


def test_a_failed_request_leaves_nothing_and_offers_nothing() -> None:
    kv = manager()
    one = request("one", PROMPT)
    admit(kv, one)
    compute(kv, one)
    kv.forget(one)
    assert one.num_published == NEVER
    kv.publish(one, 13)
    kv.tables.free(one, -1)
    assert kv.counts().cached == 0
    assert hit(kv, PROMPT) == 0


def test_two_requests_that_computed_the_same_prompt_cache_it_once() -> None:
    kv = manager()
    one, two = request("one", PROMPT), request("two", PROMPT)
    admit(kv, one)
    admit(kv, two)
    compute(kv, one, two)
    kv.check_invariants([one, two])
    kv.tables.free(one, -1)
    kv.tables.free(two, -1)
    assert kv.counts().cached == 3
    kv.check_invariants([])


def test_a_copy_takes_the_place_of_a_block_that_was_evicted() -> None:
    """Two requests compute the same blocks at once, and the second goes on. When the blocks that the first published
    are gone, those of the second are shared: without them nobody would find what follows."""
    kv = manager(1 + 4 + 3)
    longer = [*PROMPT[:12], 7, 8, 9, 10]
    first, second = request("first", PROMPT[:12]), request("second", longer)
    admit(kv, first, reserve=12)
    admit(kv, second, reserve=16)
    compute(kv, first, second)
    assert second.has_copies and not first.has_copies
    kv.tables.free(first, -1)
    third = request("third", 12, max_tokens=1)
    admit(kv, third, reserve=12)  # takes all that the first has left
    kv.fill_holes(second)
    kv.check_invariants([second, third])
    kv.tables.free(second, -1)
    kv.check_invariants([third])
    kv.tables.free(third, -1)
    assert hit(kv, [*longer, 11]) == 16


def test_the_tree_is_empty_once_its_blocks_are_gone() -> None:
    """No node without a block may stay behind: the tree must not outgrow the cache."""
    kv = manager(num_blocks=5)
    for number in range(50):
        one = request(f"r{number}", [number] * 13, cache_salt=f"s{number}")
        admit(kv, one)
        compute(kv, one)
        kv.tables.free(one, -1)
        assert kv.prefix_cache is not None
        assert len(kv.prefix_cache) <= 2 * kv.pools[0].num_blocks
        kv.check_invariants([])
