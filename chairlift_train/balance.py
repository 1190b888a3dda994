"""Estimates the cost of computing a pack, and divides packs among ranks by cost.

The cost of attention grows with the square of each sequence's length, so packs with equal numbers of tokens differ in
cost (WLB-LLM, 2025). The number of tokens limits the size of a pack, because it determines the memory. The cost
determines which ranks compute which packs of a step. Uses the standard library only.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence

from chairlift.errors import ConfigError

__all__ = ["Cost", "deal_rows", "idle", "level_rows"]


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one forward and backward pass over a pack, in an arbitrary unit: a * sum(L) + b * sum(L^2), where L are
    the lengths of its sequences."""

    linear: float
    """Cost per token (a)."""
    quadratic: float
    """Cost per squared length of a sequence (b)."""

    def __post_init__(self) -> None:
        if not (self.linear >= 0 and self.quadratic >= 0 and self.linear + self.quadratic > 0):
            raise ConfigError(f"a cost needs factors of at least 0, not both 0, got {self.linear}, {self.quadratic}")

    @classmethod
    def transformer(cls, hidden: int = 4096) -> Cost:
        """Cost for a model with this hidden size: a = 6 * hidden and b = 1 (as in verl)."""
        return cls(6.0 * hidden, 1.0)

    @classmethod
    def tokens(cls) -> Cost:
        """Cost proportional to the number of tokens, for models without attention and for short sequences."""
        return cls(1.0, 0.0)

    def of(self, lengths: Iterable[int]) -> float:
        """Cost of a pack with sequences of these lengths."""
        if not self.quadratic:
            return self.linear * sum(lengths)
        return sum(length * (self.linear + self.quadratic * length) for length in lengths)


def idle(costs: Iterable[Sequence[float]]) -> float:
    """Waiting time of the ranks divided by their mean computing time: sum(max) / sum(mean) - 1.

    Each item of ``costs`` is a row of packs that the ranks compute at the same time, with one cost per rank. All ranks
    wait for the slowest rank of each row.
    """
    longest = mean = 0.0
    for row in costs:
        longest += max(row)
        mean += sum(row) / len(row)
    return longest / mean - 1 if mean else 0.0


def deal_rows(costs: Sequence[float], ranks: int, seed: int) -> list[list[int]]:
    """Divide packs into rows of ``ranks`` packs of similar cost, and shuffle the rows.

    Returns the indices of the packs of each row, the most expensive pack first. Raises ConfigError if the number of
    packs is not a multiple of ``ranks``.
    """
    if ranks < 1 or len(costs) % ranks:
        raise ConfigError(f"{len(costs)} packs cannot be divided evenly among {ranks} ranks; add packs without tokens")
    order = sorted(range(len(costs)), key=lambda index: -costs[index])
    rows = [order[start : start + ranks] for start in range(0, len(order), ranks)]
    random.Random(seed).shuffle(rows)
    return rows


def level_rows(rows: Sequence[Sequence[float]], first: int = 0) -> list[list[int]]:
    """Assign the packs of each row to ranks, so that the total costs of the ranks are similar.

    ``rows`` has the costs of the packs of each row. Returns, for each row, the index of the pack of each rank.

    The rows with the largest differences of cost are assigned first. In each row, the most expensive pack goes to the
    rank with the lowest total so far (longest processing time first; Graham, 1969). If totals are equal, rank ``first``
    takes precedence. Callers increase ``first`` from call to call, so that no rank always gets the most expensive pack.
    """
    ranks = len(rows[0]) if rows else 0
    loads = [0.0] * ranks
    assignment: list[list[int]] = [[]] * len(rows)
    for number in sorted(range(len(rows)), key=lambda number: min(rows[number]) - max(rows[number])):
        row = rows[number]
        waiting = sorted(range(ranks), key=lambda rank: (loads[rank], (rank - first) % ranks))
        chosen = [0] * ranks
        for rank, pack in zip(waiting, sorted(range(ranks), key=lambda pack: -row[pack]), strict=True):
            chosen[rank] = pack
            loads[rank] += row[pack]
        assignment[number] = chosen
    return assignment
