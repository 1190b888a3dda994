"""Fits a machine to runs, and judges the fit on runs that were held back."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from chairlift.errors import ConfigError
from chairlift_lab.fitting.polish import polish
from chairlift_lab.fitting.reconstruct import recover_steps
from chairlift_lab.fitting.run import Run, TimedStep
from chairlift_lab.fitting.step_fit import StepErrors, StepFit, constant_model, fit_cost, step_errors
from chairlift_lab.fitting.validate import Ordering, SimulatedRun, compare, orderings
from chairlift_lab.replay.machines import Deployment

__all__ = ["CANDIDATES", "FitPlan", "FittedMachine", "HeldSteps", "fit_machine"]

CANDIDATES: Final = ("fit", "data sheet", "constant step")
"""Names of the machines that are compared on held-back runs: the fit and two baselines."""
_DEFAULT_BUDGET: Final = 2048


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitPlan:
    """What to fit, and what to test it on."""

    runs: Sequence[Run]
    held_back: Sequence[Run]
    sheet: Deployment
    """The model on a machine as its data sheet says: the prior of the fit, and a baseline."""
    name: str
    """Name of the fitted machine."""
    settings: Mapping[str, Any]
    """Settings of the engine in all runs, by name."""
    capture_sizes: tuple[int, ...] = ()
    polishes: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class HeldSteps:
    """Errors of each candidate on the steps of a run."""

    name: str
    errors: Mapping[str, StepErrors]
    """Name of a candidate -> its errors."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FittedMachine:
    """Result of a fit."""

    deployment: Deployment
    fit: StepFit
    recovered: Sequence[tuple[int, int] | None]
    """(recovered steps with a known time, all recovered steps) of each run of the fit; None for a run with logged
    steps."""
    compared: Mapping[str, Sequence[SimulatedRun]]
    """Candidate -> comparisons of the runs with requests. They are those that were held back, or the runs of the fit
    if none was."""
    steps: Sequence[HeldSteps]
    """The same for runs with logged steps."""
    orders: Sequence[Ordering]
    seen: bool
    """Whether the compared runs are those of the fit, because none was held back."""


def fit_machine(plan: FitPlan, progress: Callable[[int, float], None] | None = None) -> FittedMachine:
    """Fit a machine. ``progress`` is called as by :func:`~chairlift_lab.fitting.polish.polish`.

    Raises ConfigError for runs that cannot be fitted.
    """
    steps: list[TimedStep] = []
    unknown: dict[str, str] = {}
    recovered: list[tuple[int, int] | None] = []
    for run in plan.runs:
        if run.steps:
            steps += run.steps
            recovered.append(None)
        else:
            found = recover_steps(run.requests, _budget(plan, run))
            steps += found.steps
            recovered.append((len(found.steps), found.clusters))
        unknown |= run.unknown
    unknown |= _of_equal_lengths(plan.runs)
    fit = fit_cost(steps, plan.sheet.cost.prior, plan.capture_sizes, unknown)
    machine = dataclasses.replace(
        plan.sheet, machine=plan.name, cost=fit.cost, capture_sizes=plan.capture_sizes, reads_shared_once=False
    )
    with_requests = [run for run in plan.runs if run.requests]
    if plan.polishes and with_requests:
        machine = polish(with_requests, plan.settings, machine, progress)
    mean = statistics.fmean(seconds for _, seconds in steps)
    constant = constant_model(plan.sheet.cost.prior, mean)
    candidates = (machine, plan.sheet, dataclasses.replace(machine, cost=constant, capture_sizes=()))
    return _judged(plan, fit, recovered, dict(zip(CANDIDATES, candidates, strict=True)))


def _judged(
    plan: FitPlan,
    fit: StepFit,
    recovered: Sequence[tuple[int, int] | None],
    candidates: Mapping[str, Deployment],
) -> FittedMachine:
    runs = plan.held_back or plan.runs
    requests = [run for run in runs if run.requests]
    compared = {
        name: [compare(run, plan.settings, candidate) for run in requests] for name, candidate in candidates.items()
    }
    steps = [
        HeldSteps(
            run.name,
            {name: step_errors(each.cost, run.steps, each.capture_sizes) for name, each in candidates.items()},
        )
        for run in runs
        if run.steps
    ]
    machine = candidates["fit"]
    result = FittedMachine(
        deployment=machine,
        fit=fit,
        recovered=recovered,
        compared=compared,
        steps=steps,
        orders=orderings(requests, compared["fit"]),
        seen=not plan.held_back,
    )
    return dataclasses.replace(result, deployment=dataclasses.replace(machine, validity=_validity(plan, result)))


def _validity(plan: FitPlan, result: FittedMachine) -> str:
    """Words for the machine file: on what the machine was fitted, and its largest errors on held-back runs."""
    words = f"fitted to {len(plan.runs)} run{'s' * (len(plan.runs) != 1)}"
    if result.seen:
        return f"{words}, not tested on others"
    words += f"; on {len(plan.held_back)} held back"
    errors = [each.errors for each in result.compared["fit"]]
    for figure in ("ttft", "tpot"):
        for rank in ("p50", "p99"):
            found = [each[f"{figure} {rank}"] for each in errors if f"{figure} {rank}" in each]
            if found:
                words += f", {figure.upper()} {rank} {max(found, key=abs):+.0%}"
    if result.steps:
        worst = max((each.errors["fit"].total for each in result.steps), key=abs)
        words += f", time of all steps {worst:+.0%}"
    return words


def _of_equal_lengths(runs: Sequence[Run]) -> dict[str, str]:
    """Terms that requests of one length cannot determine -> why."""
    if not all(run.requests for run in runs):
        return {}
    lengths = {pair for run in runs for pair in run.lengths}
    if len(lengths) > 1:
        return {}
    prompt, output = lengths.pop()
    reason = (
        f"all requests have {prompt:,} prompt and {output:,} answer tokens, so positions are a multiple of rows;"
        " record a run with other lengths"
    )
    return {"context": reason, "pair": reason}


def _budget(plan: FitPlan, run: Run) -> int:
    budget = {**plan.settings, **run.settings}.get("max_num_batched_tokens", _DEFAULT_BUDGET)
    if type(budget) is not int or budget < 1:
        raise ConfigError(f"max_num_batched_tokens must be a whole number above 0, got {budget!r:.40}")
    return budget
