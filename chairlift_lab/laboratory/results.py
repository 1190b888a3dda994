"""Results of a run as plain data: what is written as JSON, printed and shown on the page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

import chairlift
from chairlift_lab.laboratory.drawn import drawn_figures
from chairlift_lab.laboratory.figures import CellFigures
from chairlift_lab.laboratory.measure import CONTROLS
from chairlift_lab.laboratory.plan import LabGroup, LabPlan, PlannedCell
from chairlift_lab.laboratory.policies import BASELINE
from chairlift_lab.laboratory.racing import Rows, reference_of, rows_of, seeds_of_rows
from chairlift_lab.laboratory.state import CellResult, LabState
from chairlift_lab.laboratory.statistics import PairedRatio, holm

__all__ = ["COMPARED", "lab_record"]

COMPARED: Final = (
    *("goodput_strict", "goodput_loose", "output_tokens_per_second"),
    *("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "worst_wait", "worst_slowdown"),
)
"""Figures of which a paired ratio to the baseline is given."""

_GOODPUT: Final = "goodput_strict"


def lab_record(plan: LabPlan, state: LabState, *, command: str) -> dict[str, Any]:
    """The results of all cells that were run. ``command``: the command line of the whole run."""
    seeds = seeds_of_rows(plan, state)
    rows = {key: cells[: seeds[key]] for key, cells in rows_of(plan).items()}
    found = [_group(plan, state, group, rows) for group in plan.groups()]
    groups = [group for group in found if group is not None]
    _correct(groups, len(plan.looks) + 1)
    return {
        "benchmark": "lab",
        "chairlift": chairlift.__version__,
        "command": command,
        "requests": plan.requests,
        "seeds": plan.seeds,
        "looks": [*plan.looks, plan.seeds],
        "machines": {
            machine.name: {
                "machine": machine.deployment.machine,
                "model": machine.deployment.model,
                "validity": machine.deployment.validity,
            }
            for machine in plan.machines
        },
        "policies": [
            {
                "name": policy.name,
                "source": policy.source,
                "claim": policy.claim,
                "settings": dict(policy.settings),
                "control": policy.name in CONTROLS,
            }
            for policy in plan.policies
        ],
        "traces": [_trace(trace) for trace in plan.traces],
        "groups": groups,
    }


def _trace(trace: Any) -> dict[str, Any]:
    knots = trace.knots
    if knots is None:
        return {"name": trace.name, "title": f"the file {trace.name}", "basis": "the requests of the file", "drawn": []}
    fields = {name: getattr(knots, name) for name in ("name", "title", "source", "licence", "basis")}
    drawn = [[each.name, _short(each.target), _short(each.drawn)] for each in drawn_figures(knots)]
    return {**fields, "drawn": drawn}


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _group(plan: LabPlan, state: LabState, group: LabGroup, rows: Rows) -> dict[str, Any] | None:
    """Results of one trace, machine, memory and load; None if nothing was run. ``rows``: those of all groups."""
    rates = state.rates.get(plan.rate_key(group))
    own = [cells for (key, _), cells in rows.items() if key == group.key]
    default = next(cells for cells in own if cells[0].is_baseline)
    if rates is None or plan.key(default[0]) not in state.cells:
        return None
    capacity, targets = rates
    return {
        "trace": group.trace.name,
        "machine": group.machine.name,
        "memory": group.machine.memory,
        "load": group.load,
        "rate": _short(capacity * group.load),
        "capacity": capacity,
        "length_scale": plan.rate_task(group).scale,
        "targets": targets.to_dict(),
        "target_words": targets.words(),
        "rows": [_row(plan, state, cells, default, reference_of(rows, cells)) for cells in own],
    }


def _row(
    plan: LabPlan,
    state: LabState,
    cells: Sequence[PlannedCell],
    default: Sequence[PlannedCell],
    reference: Sequence[PlannedCell],
) -> dict[str, Any]:
    first = cells[0]
    ours, theirs, others = ([plan.key(cell) for cell in row] for row in (cells, default, reference))
    row: dict[str, Any] = {
        "row": first.row,
        "policy": first.policy.name,
        "share": first.share,
        "baseline": first.is_baseline,
        "command": _command(plan, first, len(cells)),
    }
    row |= _side(state.cells, ours, theirs)
    if reference and row["seeds"]:
        row["reference"] = first.reference
        row["merit"] = _side(state.cells, ours, others).get("ratios", {}).get(_GOODPUT)
    measured = _side(state.measured, ours, theirs)
    if measured["seeds"] or measured.get("error"):
        row["measured"] = measured
        if reference and measured["seeds"]:
            measured["merit"] = _side(state.measured, ours, others).get("ratios", {}).get(_GOODPUT)
    return row


def _side(results: Mapping[str, CellResult], ours: Sequence[str], theirs: Sequence[str]) -> dict[str, Any]:
    """Medians over the seeds that both sides have, and paired ratios to the baseline."""
    pairs = [
        (results[mine], results[other])
        for mine, other in zip(ours, theirs, strict=False)  # a row that was decided has fewer seeds
        if mine in results and other in results
    ]
    failed = next((mine.error for mine, _ in pairs if mine.error), "")
    if failed:
        return {"seeds": 0, "error": failed}
    figures = [(mine.figures, other.figures) for mine, other in pairs if mine.figures and other.figures]
    if not figures:
        return {"seeds": 0}
    names = CellFigures.__dataclass_fields__
    goodput = ([mine.goodput for mine, _ in pairs], [other.goodput for _, other in pairs])
    return {
        "seeds": len(figures),
        "figures": {name: _median([getattr(mine, name) for mine, _ in figures]) for name in names},
        "ratios": {
            name: _ratio([getattr(mine, name) for mine, _ in figures], [getattr(other, name) for _, other in figures])
            for name in COMPARED
        }
        | {_GOODPUT: _ratio(*goodput)},
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _short(statistics.median(known)) if known else None


def _ratio(ours: Sequence[float | None], theirs: Sequence[float | None]) -> dict[str, Any] | None:
    ratio = PairedRatio.of(ours, theirs)
    if ratio is None:
        return None
    high = None if math.isinf(ratio.high) else _short(ratio.high)
    return {"ratio": _short(ratio.ratio), "low": _short(ratio.low), "high": high, "p": _short(ratio.p_value)}


def _correct(groups: Sequence[dict[str, Any]], looks: int) -> None:
    """Add Holm's corrected p value to each ratio, column by column: one figure over all rows and groups. Simulated
    rows were looked at ``looks`` times."""
    for side in ("simulated", "measured"):
        rows = [
            row if side == "simulated" else row.get("measured", {})
            for group in groups
            for row in group["rows"]
            if not row["baseline"]
        ]
        times = looks if side == "simulated" else 1
        for name in COMPARED:
            _correct_column([row.get("ratios", {}).get(name) for row in rows], times)
        _correct_column([row.get("merit") for row in rows], times)


def _correct_column(ratios: Sequence[dict[str, Any] | None], looks: int) -> None:
    values = [None if ratio is None else min(1.0, ratio["p"] * looks) for ratio in ratios]
    for ratio, corrected in zip(ratios, holm(values), strict=True):
        if ratio is not None and corrected is not None:
            ratio["holm"] = _short(corrected)


def _command(plan: LabPlan, cell: PlannedCell, seeds: int) -> str:
    """The command that runs this row again, beside the baseline."""
    group = cell.group
    words = ["chairlift lab run"]
    if cell.policy.name != BASELINE:
        words.append(f"--policies {cell.policy.name}")
    else:
        words.append(f"--policies {BASELINE}")
    words += [
        f"--traces {group.trace.file or group.trace.name}",
        f"--machines {group.machine.name}",
        f"--loads {group.load:g}",
        f"--memory {group.machine.memory:g}",
        f"--policy-share {cell.share:g}",
        f"--seeds {seeds}",
        f"--requests {plan.requests}",
    ]
    words += [f"--set {name}={value}" for name, value in plan.settings.items()]
    return " ".join(words)
