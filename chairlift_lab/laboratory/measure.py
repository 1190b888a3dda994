"""Measures the best policies and the default on the real engine, in turns, on the requests of the simulated cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from chairlift.engine.core import EngineCore
from chairlift.engine.input_processor import ModelLimits
from chairlift.errors import ChairliftError
from chairlift_lab.bench.offline import WARM_UP
from chairlift_lab.laboratory.cell import serve_cell
from chairlift_lab.laboratory.plan import LabGroup, LabPlan, PlannedCell
from chairlift_lab.laboratory.state import CellResult, LabState
from chairlift_lab.laboratory.statistics import PairedRatio
from chairlift_lab.replay.replay import serve_trace

__all__ = ["CONTROLS", "HERE", "best_rows", "measure"]

HERE: Final = "here"
"""Name of the machine on which the command runs, with the model that it loads."""
CONTROLS: Final = ("random", "oracle-srpt")
"""Policies that no server could use, or would want to. They are never among the best."""
_BEST: Final = 2

MakeCore = Callable[[Mapping[str, Any]], tuple[EngineCore, ModelLimits]]


def best_rows(plan: LabPlan, state: LabState, group: LabGroup) -> list[tuple[PlannedCell, ...]]:
    """The default, the control that knows the targets, and the two rows whose simulated goodput (strict targets) is
    highest, as their cells seed by seed."""
    rows: dict[str, list[PlannedCell]] = {}
    for cell in plan.cells():
        if cell.group.key == group.key:
            rows.setdefault(cell.row, []).append(cell)
    default = next(cells for cells in rows.values() if cells[0].is_baseline)
    theirs = [_goodput(plan, state, cell) for cell in default]
    scored: list[tuple[float, tuple[PlannedCell, ...]]] = []
    for cells in rows.values():
        policy = cells[0].policy
        if cells[0].is_reference or policy.name in CONTROLS or policy.simulated_only:
            continue
        ours = [_goodput(plan, state, cell) for cell in cells]
        # A row of a race may have fewer seeds than the default.
        pairs = [pair for pair in zip(ours, theirs, strict=True) if None not in pair]
        ratio = PairedRatio.of([mine for mine, _ in pairs], [other for _, other in pairs])
        if ratio is not None:
            scored.append((ratio.ratio, tuple(cells)))
    scored.sort(key=lambda each: -each[0])
    references = [tuple(cells) for cells in rows.values() if cells[0].is_reference and not cells[0].is_baseline]
    return [tuple(default), *references, *(cells for _, cells in scored[:_BEST])]


def _goodput(plan: LabPlan, state: LabState, cell: PlannedCell) -> float | None:
    result = state.cells.get(plan.key(cell))
    return None if result is None else result.goodput


def measure(
    plan: LabPlan,
    state: LabState,
    group: LabGroup,
    make_core: MakeCore,
    *,
    say: Callable[[str], None],
    out_of_time: Callable[[], bool] = lambda: False,
) -> None:
    """Measure the rows of :func:`best_rows`: in each round every row serves the requests of one seed, in changing
    order, so that a slow minute of the machine does not affect one of them only."""
    rows = best_rows(plan, state, group)
    rates = state.rates.get(plan.rate_key(group))
    if rates is None:
        return
    cores: dict[str, tuple[EngineCore, ModelLimits]] = {}
    try:
        for seed in range(plan.seeds):
            order = [(seed + place) % len(rows) for place in range(len(rows))]
            for place in order:
                cell = rows[place][seed]
                key = plan.key(cell)
                if key in state.measured:
                    continue
                if out_of_time():
                    return
                say(f"measuring {group.trace.name}: round {seed + 1} of {plan.seeds}, {cell.row}")
                if cell.row not in cores:
                    cores[cell.row] = _core_for(plan, group, cell, make_core)
                state.add(key, _measured(plan, state, cell, rates, cores[cell.row]), measured=True)
    finally:
        for core, _ in cores.values():
            core.shutdown()
        state.save()


def _core_for(plan: LabPlan, group: LabGroup, cell: PlannedCell, make_core: MakeCore) -> tuple[EngineCore, ModelLimits]:
    core, limits = make_core({**plan.settings, **cell.settings, "kv_cache_memory_bytes": group.machine.kv_bytes})
    serve_trace(core, WARM_UP, limits)
    return core, limits


def _measured(
    plan: LabPlan, state: LabState, cell: PlannedCell, rates: Any, made: tuple[EngineCore, ModelLimits]
) -> CellResult:
    core, limits = made
    core.kv.forget_all(())
    simulated = state.cells.get(plan.key(cell))
    task = plan.cell_task(cell, rates, None if simulated is None else simulated.window)
    budget = task.of.config(task.policy).scheduler.max_num_batched_tokens
    try:
        return CellResult(*serve_cell(core, limits, task.requests(), task, budget))
    except ChairliftError as error:
        return CellResult(error=str(error))
