"""All-pairs testing: a few combinations that together contain every pair of values of any two factors (Cohen et al.,
1997)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["all_pairs", "every_combination"]

Pair = tuple[tuple[str, int], tuple[str, int]]
"""Values of two factors: (name of a factor, index of its value) for each."""


def every_combination(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All combinations of values of all factors."""
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]


def all_pairs(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Combinations that together contain every pair of values of any two factors. The list is always the same.

    The algorithm is greedy: each combination starts from a pair that is still missing, and takes, factor by factor, the
    value that adds the most missing pairs. At least two factors are needed.
    """
    names = list(factors)
    missing: dict[Pair, None] = {}  # an ordered set
    for a, b in itertools.combinations(names, 2):
        for i, j in itertools.product(range(len(factors[a])), range(len(factors[b]))):
            missing[(a, i), (b, j)] = None
    found: list[dict[str, Any]] = []
    while missing:
        chosen: dict[str, int] = dict(next(iter(missing)))
        for name in names:
            if name not in chosen:
                gains = [len(_new_pairs(names, chosen, name, i, missing)) for i in range(len(factors[name]))]
                chosen[name] = gains.index(max(gains))
        for pair in itertools.combinations(((name, chosen[name]) for name in names), 2):
            missing.pop(pair, None)
        found.append({name: factors[name][chosen[name]] for name in names})
    return found


def _new_pairs(
    names: Sequence[str], chosen: Mapping[str, int], name: str, value: int, missing: Mapping[Pair, None]
) -> list[Pair]:
    """Missing pairs that the value ``name = value`` would form with the values chosen so far."""
    pairs: list[Pair] = []
    for other, index in chosen.items():
        ends = ((other, index), (name, value))
        pair = ends if names.index(other) < names.index(name) else (ends[1], ends[0])
        if pair in missing:
            pairs.append(pair)
    return pairs
