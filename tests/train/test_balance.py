"""Ranks get equally many packs, of similar cost, whoever is dealt what."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift_train.balance import Cost, deal_rows, idle, level_rows
from chairlift_train.pack import pack_indices
from tests.train.mixes import MIXES

CAPACITY = 32_768
RANKS = 8


def pack_costs(count: int) -> list[float]:
    """Costs of packs of chats in the order in which they close, for a model of 7 B parameters."""
    rng, cost = random.Random(0), Cost.transformer(hidden=4096)
    lengths = [MIXES["chat"](rng, CAPACITY) for _ in range(count * 8)]
    packs = pack_indices(lengths, CAPACITY, pool=256)[:count]
    assert len(packs) == count
    return [cost.of([lengths[index] for index in pack]) for pack in packs]


def test_cost_is_linear_and_quadratic() -> None:
    assert Cost.transformer(hidden=10).of([3, 4]) == 60 * 7 + 9 + 16
    assert Cost.tokens().of([3, 4]) == 7
    with pytest.raises(ConfigError, match="at least 0"):
        Cost(-1.0, 1.0)


def test_idle_is_what_the_slowest_makes_others_wait() -> None:
    assert idle([(1, 1), (2, 2)]) == 0
    assert idle([(1, 3)]) == pytest.approx(0.5)
    assert idle([(1, 3), (3, 1)]) == pytest.approx(0.5)
    assert idle([]) == 0


@given(st.lists(st.floats(0, 100), max_size=60), st.integers(1, 6), st.integers(0, 9))
def test_dealing_gives_each_pack_to_one_rank(costs: list[float], ranks: int, seed: int) -> None:
    costs = costs[: len(costs) // ranks * ranks]
    rows = deal_rows(costs, ranks, seed)
    assert sorted(index for row in rows for index in row) == list(range(len(costs)))
    spans = sorted((max(costs[i] for i in row), min(costs[i] for i in row)) for row in rows)
    assert all(low_of_next >= high for (high, _), (_, low_of_next) in itertools.pairwise(spans))
    taken = level_rows([[costs[index] for index in row] for row in rows], first=seed)
    assert all(sorted(chosen) == list(range(ranks)) for chosen in taken)


def test_rows_depend_on_the_seed_only() -> None:
    costs = [random.Random(0).random() for _ in range(64)]
    assert deal_rows(costs, 4, 1) == deal_rows(costs, 4, 1) != deal_rows(costs, 4, 2)


def test_packs_that_make_no_whole_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match="7 packs"):
        deal_rows([1.0] * 7, 2, 0)


def test_rows_from_a_window_leave_ranks_idle_for_little() -> None:
    costs = pack_costs(2048)
    in_order = idle([costs[start : start + RANKS] for start in range(0, len(costs), RANKS)])
    windows = [costs[start : start + 256] for start in range(0, len(costs), 256)]
    dealt = idle([[window[index] for index in row] for window in windows for row in deal_rows(window, RANKS, 0)])
    assert dealt <= 0.03 < 0.1 < in_order


def test_eight_packs_per_rank_leave_ranks_idle_for_less() -> None:
    costs = pack_costs(2048)
    steps = [costs[start : start + 8 * RANKS] for start in range(0, len(costs), 8 * RANKS)]
    levelled = []
    for step in steps:
        rows = [[step[index] for index in row] for row in deal_rows(step, RANKS, 0)]
        taken = level_rows(rows)
        levelled.append([sum(row[chosen[rank]] for row, chosen in zip(rows, taken, strict=True)) for rank in range(8)])
    assert idle(levelled) <= 0.01


def test_no_rank_always_gets_the_dearest_pack_of_a_row() -> None:
    dearest = [level_rows([[3.0, 2.0, 1.0]], first)[0].index(0) for first in range(6)]
    assert dearest == [0, 1, 2, 0, 1, 2]
