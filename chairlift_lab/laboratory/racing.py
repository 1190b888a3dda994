"""Ends rows early, so that the time goes to rows that may still turn out to win.

Each row has one comparison that decides about it: its strict goodput against its *reference*. That is the baseline for
a rule that does not know the targets, and ``fcfs-targets`` for a policy, because every policy is told the targets. A
row is looked at after 3, 5, 8, 12 and 16 seeds. It gets no more seeds if

- it wins beyond doubt: the difference would remain after a correction for all rows and all looks (Bonferroni), or
- it will hardly win by a margin that matters: the 80 % interval of its ratio ends below 1.03, or
- it failed.

The second test gives up some rows that would win by a little, and it makes no row a winner. Its rows keep the interval
of the seeds that they have. Looking several times finds more differences by chance, so the p values of such a
run are multiplied by the number of looks, the last one included, before Holm's correction. Which rows end follows from
their seeds alone, so an interrupted run ends with the same rows. The idea is that of races (Maron and Moore, "Hoeffding
races", NIPS 1993).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from chairlift_lab.laboratory.plan import LabPlan, PlannedCell
from chairlift_lab.laboratory.state import CellResult, LabState
from chairlift_lab.laboratory.statistics import PairedRatio

__all__ = ["Rows", "is_decided", "reference_of", "rows_of", "seeds_of_rows"]

_LEVEL: Final = 0.05
_MARGIN: Final = 1.03
"""Ratio up to which a win does not matter."""
_GIVEN_UP: Final = 0.8
"""Level of the interval by which a row is given up."""

RowKey = tuple[str, str]
"""(key of a group, name of a row)."""
Rows = Mapping[RowKey, Sequence[PlannedCell]]


def rows_of(plan: LabPlan) -> dict[RowKey, list[PlannedCell]]:
    """All rows of a plan: (group, row) -> its cells, seed by seed."""
    rows: dict[RowKey, list[PlannedCell]] = {}
    for cell in plan.cells():
        rows.setdefault((cell.group.key, cell.row), []).append(cell)
    return rows


def reference_of(rows: Rows, cells: Sequence[PlannedCell]) -> Sequence[PlannedCell]:
    """The cells that a row must beat; none for the baseline, or if the plan does not have them."""
    group, name = cells[0].group.key, cells[0].reference
    return rows.get((group, name), ()) if name != cells[0].row else ()


def seeds_of_rows(plan: LabPlan, state: LabState) -> dict[RowKey, int]:
    """(group, row) -> number of seeds that the row gets, by the results so far."""
    rows = rows_of(plan)
    found = dict.fromkeys(rows, plan.seeds)
    tests = len(rows) * (len(plan.looks) + 1)
    for key, cells in rows.items():
        theirs = reference_of(rows, cells)
        if not theirs or cells[0].is_reference:
            continue
        for look in plan.looks:
            sides = [[state.cells.get(plan.key(cell)) for cell in side[:look]] for side in (cells, theirs)]
            if is_decided(sides[0], sides[1], tests):
                found[key] = look
                break
    return found


def is_decided(ours: Sequence[CellResult | None], theirs: Sequence[CellResult | None], tests: int) -> bool:
    """Whether a row needs no more seeds. ``tests``: comparisons of the whole run, times the looks at each. A row that
    lacks a seed is not decided."""
    if any(mine is not None and mine.error for mine in ours):
        return True
    sides = [[None if each is None else each.goodput for each in side] for side in (ours, theirs)]
    ratio = PairedRatio.of(sides[0], sides[1], _GIVEN_UP)
    if ratio is None:
        return False
    return ratio.high <= _MARGIN or (ratio.ratio > 1 and ratio.p_value * tests < _LEVEL)
