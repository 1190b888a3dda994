"""Runs the cells of a plan in parallel processes, with progress, and stops in time."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol

from chairlift.errors import ChairliftError
from chairlift_lab.laboratory.cell import CellTask, find_capacity, run_cell
from chairlift_lab.laboratory.plan import LabPlan, PlannedCell
from chairlift_lab.laboratory.racing import seeds_of_rows
from chairlift_lab.laboratory.state import CellResult, LabState

__all__ = ["LabProgress", "TaskHands", "processes", "run_plan"]

_AHEAD: Final = 2
"""Tasks in the hands of a worker. More would be lost at an interruption."""

Say = Callable[[str], None]


@dataclasses.dataclass(slots=True)
class LabProgress:
    """How far a run is."""

    total: int
    done: int = 0
    begun: float = dataclasses.field(default_factory=time.monotonic)
    new: int = 0

    def words(self) -> str:
        """Progress as one line, with an estimate of the remaining time."""
        text = f"{self.done:,} of {self.total:,} cells"
        if not self.new or self.done >= self.total:
            return text
        remaining = (time.monotonic() - self.begun) / self.new * (self.total - self.done)
        return f"{text}, about {remaining / 60:.0f} min left" if remaining >= 90 else f"{text}, {remaining:.0f} s left"


class TaskHands(Protocol):
    """Interface of the processes that run the tasks. Tests have their own."""

    def take(self, function: Callable[[Any], Any], tasks: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """(key, ``function(task)``) of each (key, task), in any order. Tasks may be left out for lack of time."""
        ...


def run_plan(plan: LabPlan, state: LabState, hands: TaskHands, *, say: Say) -> LabProgress:
    """Run what the state does not have yet: capacities, then baselines, then all other cells; with
    ``plan.stops_decided`` only those of rows that are not decided. The state is saved also if that is interrupted."""
    cells = [(cell, plan.key(cell)) for cell in plan.cells()]
    progress = LabProgress(len(cells))
    try:
        _find_rates(hands, plan, state, say)
        for begin, end in itertools.pairwise([0, *plan.looks, plan.seeds]):
            seeds = seeds_of_rows(plan, state)
            stage = [(cell, key) for cell, key in cells if begin <= cell.seed < end]
            wanted = [(cell, key) for cell, key in stage if cell.seed < seeds[cell.group.key, cell.row]]
            progress.total -= len(stage) - len(wanted)
            for baseline in (True, False):
                for key, result in hands.take(_result_of, _tasks(plan, state, wanted, baseline, progress)):
                    state.add(key, result)
                    progress.done += 1
                    progress.new += 1
                    say(progress.words())
    finally:
        state.save()
    return progress


@contextlib.contextmanager
def processes(workers: int, deadline: float = float("inf")) -> Iterator[TaskHands]:
    """So many processes that run tasks. ``deadline``: time on the monotonic clock at which no new task begins."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context, initializer=_quiet) as pool:
        try:
            yield _Processes(pool, workers, deadline)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _quiet() -> None:
    """A worker leaves Ctrl-C to the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _find_rates(hands: TaskHands, plan: LabPlan, state: LabState, say: Say) -> None:
    groups = {plan.rate_key(group): group for group in plan.groups()}
    missing = {key: group for key, group in groups.items() if key not in state.rates}
    tasks = ((key, plan.rate_task(group)) for key, group in missing.items())
    for number, (key, found) in enumerate(hands.take(find_capacity, tasks), 1):
        state.rates[key] = found
        state.save()
        say(f"capacities: {number} of {len(missing)}")


def _tasks(
    plan: LabPlan, state: LabState, cells: list[tuple[PlannedCell, str]], baseline: bool, progress: LabProgress
) -> Iterator[tuple[str, CellTask]]:
    """(key, task) of each cell that is still to be run. Cells that wait for a baseline that is missing are left out."""
    windows = {
        (cell.group.key, cell.seed): state.cells[key].window
        for cell, key in cells
        if cell.is_baseline and key in state.cells
    }
    for cell, key in cells:
        if cell.is_baseline != baseline:
            continue
        rates = state.rates.get(plan.rate_key(cell.group))
        window = windows.get((cell.group.key, cell.seed))
        if key in state.cells:
            progress.done += 1
        elif rates is not None and (baseline or window is not None):
            yield key, plan.cell_task(cell, rates, window)


def _result_of(task: CellTask) -> CellResult:
    """Run a cell in a worker. A policy that fails is a result, too."""
    try:
        return CellResult(*run_cell(task))
    except ChairliftError as error:
        return CellResult(error=str(error))
    except Exception as error:  # the policy may be anybody's code
        return CellResult(error=f"{type(error).__name__}: {error}")


class _Processes:
    """Gives tasks to the processes of a pool, a few ahead, and takes the results as they end."""

    def __init__(self, pool: concurrent.futures.Executor, workers: int, deadline: float) -> None:
        self._pool = pool
        self._most = workers * _AHEAD
        self._deadline = deadline

    def take(self, function: Callable[[Any], Any], tasks: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """(key, result) of each task. No task begins after the deadline."""
        waiting = iter(tasks)
        running: dict[concurrent.futures.Future[Any], str] = {}
        more = True
        while running or more:
            while more and len(running) < self._most:
                key, task = next(waiting, (None, None))
                more = key is not None and time.monotonic() < self._deadline
                if key is not None and more:
                    running[self._pool.submit(function, task)] = key
            done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                yield running.pop(future), future.result()
