"""Packing loses nothing, keeps to its capacity, and wastes little."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift.train.pack import pack_sequences


@given(st.lists(st.integers(1, 64), max_size=200), st.integers(64, 300))
def test_every_sequence_lies_in_exactly_one_pack(lengths: list[int], capacity: int) -> None:
    packs = pack_sequences(lengths, capacity)
    assert sorted(index for pack in packs for index in pack.indices) == list(range(len(lengths)))
    for pack in packs:
        assert pack.num_tokens <= capacity
        assert pack.cu_seqlens[0] == 0
        sizes = [end - start for start, end in itertools.pairwise(pack.cu_seqlens)]
        assert sizes == [lengths[index] for index in pack.indices]


@given(st.lists(st.integers(1, 64), min_size=2, max_size=200))
def test_no_two_packs_could_have_been_one(lengths: list[int]) -> None:
    fills = sorted(pack.num_tokens for pack in pack_sequences(lengths, 64))
    assert len(fills) < 2 or fills[0] + fills[1] > 64


def test_waste_on_log_normal_lengths_is_below_half_a_percent() -> None:
    rng = random.Random(0)
    lengths = [min(4096, max(1, round(rng.lognormvariate(5.8, 0.9)))) for _ in range(20_000)]
    packs = pack_sequences(lengths, 4096)
    assert 1 - sum(lengths) / (4096 * len(packs)) < 0.005


def test_the_tightest_pack_is_chosen() -> None:
    # After 7, 6 and 5 have opened packs with room 3, 4 and 5, a 4 must go beside the 6 and a 3 beside the 7.
    packs = pack_sequences([7, 6, 5, 4, 3], 10)
    assert [pack.indices for pack in packs] == [(0, 4), (1, 3), (2,)]


def test_result_depends_on_the_arguments_only() -> None:
    lengths = [5, 5, 5, 3, 3, 8, 1]
    assert pack_sequences(lengths, 8) == pack_sequences(list(lengths), 8)


@pytest.mark.parametrize(("lengths", "capacity"), [([5], 4), ([0], 4), ([-1], 4), ([1], 0)])
def test_impossible_requests_are_refused(lengths: list[int], capacity: int) -> None:
    with pytest.raises(ConfigError):
        pack_sequences(lengths, capacity)


def test_nothing_to_pack_gives_no_pack() -> None:
    assert pack_sequences([], 16) == []
