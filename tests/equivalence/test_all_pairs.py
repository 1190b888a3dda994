from __future__ import annotations

import itertools

import pytest

from tests.equivalence.all_pairs import all_pairs, every_combination


@pytest.mark.parametrize("sizes", [(2, 2), (1, 3), (5, 4, 4, 3, 3, 2, 2), (2,) * 12])
def test_all_pairs_has_every_pair_of_values(sizes: tuple[int, ...]) -> None:
    factors = {f"factor {i}": [f"{i}.{value}" for value in range(size)] for i, size in enumerate(sizes)}
    rows = all_pairs(factors)
    for a, b in itertools.combinations(factors, 2):
        assert {(row[a], row[b]) for row in rows} == set(itertools.product(factors[a], factors[b]))
    first, second = sorted(sizes)[-2:]
    assert first * second <= len(rows) <= max(2 * first * second, 14)
    assert rows == all_pairs(factors)


def test_every_combination_is_the_cross_product() -> None:
    assert every_combination({"a": [1, 2], "b": "xy"}) == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]
