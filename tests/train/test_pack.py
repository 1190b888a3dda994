"""Packing loses nothing, keeps to its capacity, lets nothing wait for long, and wastes little."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift_train.pack import LookaheadPacker, lower_bound, pack_indices
from tests.train.mixes import MIXES

CAPACITY = 4096


def draw(mix: str, count: int, seed: int = 0, capacity: int = CAPACITY) -> list[int]:
    rng = random.Random(seed)
    return [MIXES[mix](rng, capacity) for _ in range(count)]


def best_fit_decreasing(lengths: list[int], capacity: int) -> int:
    """Packs that the textbook's loop over all packs needs."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [(room, pack) for pack, room in enumerate(rooms) if room >= length]
        if fits:
            rooms[min(fits)[1]] -= length
        else:
            rooms.append(capacity - length)
    return len(rooms)


@given(
    st.lists(st.integers(1, 64), max_size=200),
    st.integers(64, 300),
    st.one_of(st.none(), st.integers(1, 50)),
    st.sampled_from([1, 2, 8]),
    st.one_of(st.none(), st.integers(1, 5)),
)
def test_every_sequence_lies_in_exactly_one_pack_that_holds_it(
    lengths: list[int], capacity: int, pool: int | None, align: int, most: int | None
) -> None:
    capacity = capacity // align * align
    packs = pack_indices(lengths, capacity, pool=pool, align=align, max_sequences=most)
    assert sorted(index for pack in packs for index in pack) == list(range(len(lengths)))
    for pack in packs:
        assert 1 <= len(pack) <= (most or capacity)
        assert sum(-(-lengths[index] // align) * align for index in pack) <= capacity
    assert len(packs) >= (lower_bound(lengths, capacity, align=align))
    assert packs == pack_indices(list(lengths), capacity, pool=pool, align=align, max_sequences=most)


@given(st.lists(st.integers(1, 64), min_size=1, max_size=200))
def test_the_whole_set_needs_no_more_packs_than_best_fit_decreasing(lengths: list[int]) -> None:
    assert len(pack_indices(lengths, 64)) <= best_fit_decreasing(lengths, 64)


@given(st.lists(st.tuples(st.integers(1, 64), st.sampled_from("ab")), max_size=150), st.integers(1, 20))
def test_the_oldest_opens_each_pack_and_keys_never_mix(items: list[tuple[int, str]], pool: int) -> None:
    packer = LookaheadPacker(64, pool)
    pending: dict[int, tuple[int, str]] = {}
    waited: dict[int, int] = {}

    def take() -> None:
        pack = packer.next_pack()
        assert pack[0] == min(pending)
        assert len({pending.pop(serial)[1] for serial in pack}) == 1
        for serial in pending:
            waited[serial] += 1
            assert waited[serial] <= pool

    for serial, (length, key) in enumerate(items):
        packer.add(serial, length, key)
        pending[serial], waited[serial] = (length, key), 0
        assert packer.pending() == sorted(pending)
        if packer.full:
            take()
    while packer:
        take()
    assert not pending


@given(st.lists(st.integers(1, 64), min_size=1, max_size=60), st.integers(64, 100))
def test_a_pack_is_closed_only_when_nothing_pending_fits(lengths: list[int], capacity: int) -> None:
    packer = LookaheadPacker(capacity, len(lengths))
    for serial, length in enumerate(lengths):
        packer.add(serial, length)
    left = set(range(len(lengths)))
    while packer:
        pack = packer.next_pack()
        left -= set(pack)
        room = capacity - sum(lengths[serial] for serial in pack)
        assert all(lengths[serial] > room for serial in left)


@pytest.mark.parametrize(
    ("lengths", "first"),
    [
        ([7, 2, 3, 1], [0, 2]),  # one that fits exactly, though 2 + 1 would too
        ([4, 5, 2, 4, 2], [0, 3, 2]),  # a pair that fits exactly, not the larger 5
        ([4, 5, 3, 3], [0, 2, 3]),  # two copies of one length
        ([4, 5, 3], [0, 1]),  # one copy is no pair: the largest
        ([7, 4, 2], [0, 2]),  # the largest that fits
    ],
)
def test_completion_is_exact_where_it_can_be(lengths: list[int], first: list[int]) -> None:
    assert pack_indices(lengths, 10, pool=len(lengths))[0] == first


@given(st.lists(st.integers(1, 64), max_size=80), st.integers(0, 80), st.integers(1, 20))
def test_the_pending_sequences_are_the_whole_state(lengths: list[int], cut: int, pool: int) -> None:
    def run(packer: LookaheadPacker, serials: list[int]) -> list[list[int]]:
        packs = []
        for serial in serials:
            packer.add(serial, lengths[serial])
            if packer.full:
                packs.append(packer.next_pack())
        return packs

    first = LookaheadPacker(64, pool)
    run(first, list(range(len(lengths))[:cut]))
    second = LookaheadPacker(64, pool)
    for serial in first.pending():
        second.add(serial, lengths[serial])
    rest = list(range(len(lengths))[cut:])
    assert run(first, rest) == run(second, rest)
    assert first.pending() == second.pending()


@pytest.mark.parametrize("mix", MIXES)
def test_waste_is_near_the_lower_bound(mix: str) -> None:
    lengths = draw(mix, 50_000)
    packs, bound = len(pack_indices(lengths, CAPACITY, pool=256)), lower_bound(lengths, CAPACITY)
    assert packs / bound - 1 <= 0.006
    if mix in ("chat", "docs"):
        assert 1 - sum(lengths) / packs / CAPACITY <= 0.0015


@pytest.mark.parametrize("mix", MIXES)
def test_the_whole_set_beats_windows_of_best_fit_decreasing(mix: str) -> None:
    lengths = draw(mix, 4_000, seed=1)
    windows = sum(best_fit_decreasing(lengths[i : i + 1000], CAPACITY) for i in range(0, len(lengths), 1000))
    assert len(pack_indices(lengths, CAPACITY)) < windows


@pytest.mark.nightly
def test_a_million_lengths_are_planned_in_three_seconds() -> None:
    lengths = draw("chat", 1_000_000)
    start = time.process_time()
    pack_indices(lengths, CAPACITY, pool=256)
    assert time.process_time() - start <= 3


@pytest.mark.parametrize("pool", [None, 4])
@pytest.mark.parametrize(("lengths", "capacity"), [([5], 4), ([0], 4), ([-1], 4), ([1], 0)])
def test_impossible_lengths_are_refused(lengths: list[int], capacity: int, pool: int | None) -> None:
    with pytest.raises(ConfigError):
        pack_indices(lengths, capacity, pool=pool)


def test_impossible_settings_and_calls_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of align"):
        LookaheadPacker(100, align=8)
    with pytest.raises(ConfigError, match="at least 1"):
        LookaheadPacker(100, pool=0)
    with pytest.raises(ConfigError, match="pending"):
        LookaheadPacker(100).next_pack()


def test_nothing_to_pack_gives_no_pack() -> None:
    assert pack_indices([], 16) == pack_indices([], 16, pool=4) == []
    assert lower_bound([], 16) == 0


def test_the_lower_bound_counts_tokens_and_sequences_that_never_share() -> None:
    assert lower_bound([5, 5, 1], 10) == 2
    assert lower_bound([6, 6, 6], 10) == 3
    assert lower_bound([5, 5], 10) == 1
    assert lower_bound([5, 5], 12, align=4) == 2


@pytest.mark.parametrize("make", [iter, np.array, tuple, lambda lengths: torch.tensor(lengths)])
def test_lengths_are_any_whole_numbers(make: Callable[[list[int]], Any]) -> None:
    lengths = [3, 4, 5, 2] * 20
    assert pack_indices(make(lengths), 6) == pack_indices(lengths, 6) != []
    assert pack_indices(make(lengths), 6, pool=8) == pack_indices(lengths, 6, pool=8)


@pytest.mark.parametrize("wrong", [[1.5], ["a"], [None]])
def test_other_lengths_are_refused(wrong: list[Any]) -> None:
    with pytest.raises(ConfigError, match="whole numbers of tokens"):
        pack_indices(wrong, 6)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8])
def test_numbers_of_numpy_are_accepted(kind: type[np.integer[Any]]) -> None:
    lengths = np.array([200, 100, 50, 7, 200, 93] * 20, kind)
    expected = pack_indices(lengths.tolist(), 200)
    assert pack_indices(lengths, lengths.max()) == expected
    assert pack_indices(lengths, kind(200), pool=4) == pack_indices(lengths.tolist(), 200, pool=4)
    assert lower_bound(lengths, 256) == lower_bound(lengths.tolist(), 256)
