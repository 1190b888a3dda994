"""The cost of computing a pack, and the division of packs among ranks. Equal tokens are not equal work.

Attention costs the square of each sequence's length, so packs of equally many tokens differ in cost (WLB-LLM, 2025).
The number of tokens stays the cap, as it bounds memory; cost decides which packs share a step. Standard library only.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence

from chairlift.errors import ConfigError

__all__ = ["Cost", "deal_rows", "idle", "level_rows"]


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Work of one forward and backward pass over a pack, in a unit of its own: a * sum(L) + b * sum(L^2)."""

    linear: float
    """a: cost per token."""
    quadratic: float
    """b: cost per squared length of a sequence."""

    def __post_init__(self) -> None:
        if not (self.linear >= 0 and self.quadratic >= 0 and self.linear + self.quadratic > 0):
            raise ConfigError(f"a cost needs factors of at least 0, not both 0, got {self.linear}, {self.quadratic}")

    @classmethod
    def transformer(cls, hidden: int = 4096) -> Cost:
        """Cost of a model with this hidden size: 6 * hidden per token, 1 per squared length (as in verl)."""
        return cls(6.0 * hidden, 1.0)

    @classmethod
    def tokens(cls) -> Cost:
        """Cost by tokens alone, for models without attention or short sequences."""
        return cls(1.0, 0.0)

    def of(self, lengths: Iterable[int]) -> float:
        """Cost of a pack with sequences of these lengths."""
        if not self.quadratic:
            return self.linear * sum(lengths)
        return sum(length * (self.linear + self.quadratic * length) for length in lengths)


def idle(costs: Iterable[Sequence[float]]) -> float:
    """Waiting time of ranks as a fraction of the mean time: sum(max) / sum(mean) - 1 over all entries. Each entry has
    one cost per rank and ends with the slowest rank.
    """
    longest = mean = 0.0
    for row in costs:
        longest += max(row)
        mean += sum(row) / len(row)
    return longest / mean - 1 if mean else 0.0


def deal_rows(costs: Sequence[float], ranks: int, seed: int) -> list[list[int]]:
    """Cut packs into rows of ``ranks`` that cost alike, and shuffle the rows: indices, dearest first in each row.

    Raises ConfigError unless the packs make whole rows.
    """
    if ranks < 1 or len(costs) % ranks:
        raise ConfigError(f"{len(costs)} packs cannot be divided evenly among {ranks} ranks; add packs without tokens")
    order = sorted(range(len(costs)), key=lambda index: -costs[index])
    rows = [order[start : start + ranks] for start in range(0, len(order), ranks)]
    random.Random(seed).shuffle(rows)
    return rows


def level_rows(rows: Sequence[Sequence[float]], first: int = 0) -> list[list[int]]:
    """For each row, which of its packs each rank takes, so that the ranks' sums over all rows are alike.

    Rows whose packs differ most come first, and the dearest pack of each goes to the rank that has had least: longest
    processing time first (Graham, 1969), over rows of packs of similar cost. Among
    equals rank ``first`` comes first; counting it up from call to call leaves no rank the dearest pack of every row.
    """
    ranks = len(rows[0]) if rows else 0
    loads = [0.0] * ranks
    taken: list[list[int]] = [[]] * len(rows)
    for number in sorted(range(len(rows)), key=lambda number: min(rows[number]) - max(rows[number])):
        row = rows[number]
        waiting = sorted(range(ranks), key=lambda rank: (loads[rank], (rank - first) % ranks))
        chosen = [0] * ranks
        for rank, pack in zip(waiting, sorted(range(ranks), key=lambda pack: -row[pack]), strict=True):
            chosen[rank] = pack
            loads[rank] += row[pack]
        taken[number] = chosen
    return taken
