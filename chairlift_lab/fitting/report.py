"""Text about a fitted machine: its terms, and its errors on held-back runs beside two baselines."""

from __future__ import annotations

from typing import Any, Final

from chairlift_lab.bench.report import aligned
from chairlift_lab.fitting.fit import CANDIDATES, FitPlan, FittedMachine
from chairlift_lab.fitting.validate import FIGURES

__all__ = ["fit_lines", "fit_record"]

_TERMS: Final = {
    "row": "per decode row",
    "prompt": "per prompt token",
    "context": "per position that a row reads",
    "pair": "per position that a prompt token attends to",
}
_GOALS: Final = {"p50": 0.05, "p99": 0.15}
"""Rank -> size of an error that a fit should not exceed."""


def fit_lines(plan: FitPlan, result: FittedMachine) -> list[str]:
    """Lines of text about a fit."""
    lines = [*_run_lines(plan, result), "", *_term_lines(result), ""]
    if result.seen:
        lines += ["No run was held back: these are errors on the runs of the fit. --hold-back FILE tests the fit.", ""]
    else:
        lines += ["Errors on runs that the fit did not see (above 0: the simulation has the larger value):", ""]
    if result.compared["fit"]:
        lines += [*_comparison_lines(result), "", _goal_line(result)]
    if result.steps:
        lines += [*([""] if result.compared["fit"] else []), *_step_lines(result)]
    return lines + _order_lines(result)


def _run_lines(plan: FitPlan, result: FittedMachine) -> list[str]:
    lines = []
    pairs = [("fitted on", run, known) for run, known in zip(plan.runs, result.recovered, strict=True)]
    pairs += [("held back", run, None) for run in plan.held_back]
    for label, run, recovered in pairs:
        facts = [run.source]
        if run.requests:
            facts.append(f"{len(run.requests):,} requests")
        if run.steps:
            facts.append(f"{len(run.steps):,} steps")
        if recovered is not None:
            facts.append(f"{recovered[0]:,} of {recovered[1]:,} recovered steps have a known time")
        facts += [f"{name} {value}" for name, value in run.settings.items()]
        lines.append(f"{label}  {run.name}: {', '.join(facts)}")
        lines += [f"           note: {note}" for note in run.notes]
    return lines


def _term_lines(result: FittedMachine) -> list[str]:
    table = [["term", "fit", "data sheet", ""]]
    reasons = []
    for term in result.fit.terms:
        kept = "not identified" if term.reason else ""
        table.append([_TERMS[term.name], f"{term.seconds * 1e6:.4g} us", f"{term.sheet * 1e6:.4g} us", kept])
        reasons += [f"{_TERMS[term.name]}: not identified: {term.reason}"] if term.reason else []
    coefficients = result.fit.cost.coefficients
    table.insert(1, ["step without tokens", f"{coefficients[0] * 1e3:.4g} ms", "", ""])
    errors = result.fit.errors
    lines = [*aligned(table), *reasons]
    lines.append(
        f"{errors.steps:,} steps: half of the errors are within {errors.median:.1%}, nine of ten within"
        f" {errors.p90:.1%}; all steps together {errors.total:+.1%}"
    )
    if result.deployment.request_seconds:
        lines.append(f"client, network and front end: {result.deployment.request_seconds * 1e3:.1f} ms per request")
    return lines


def _comparison_lines(result: FittedMachine) -> list[str]:
    table = [["run", "", "measured", "simulated", *CANDIDATES]]
    for at, fit in enumerate(result.compared["fit"]):
        for figure in FIGURES:
            errors = [result.compared[name][at].errors.get(figure) for name in CANDIDATES]
            if errors[0] is None:
                continue
            cells = ["-" if error is None else f"{error:+.1%}" for error in errors]
            values = [_value(figure, each[figure]) for each in (fit.measured, fit.simulated)]
            table.append([fit.name if figure == FIGURES[0] else "", figure, *values, *cells])
    return aligned(table)


def _value(figure: str, value: float) -> str:
    return f"{value:,.1f}" if figure == "tokens/s" else f"{value * 1e3:,.1f} ms"


def _goal_line(result: FittedMachine) -> str:
    """How many of the errors are within the goals."""
    met = dict.fromkeys(_GOALS, 0)
    count = dict.fromkeys(_GOALS, 0)
    for each in result.compared["fit"]:
        for figure, error in each.errors.items():
            rank = figure.rpartition(" ")[2]
            if rank in _GOALS:
                count[rank] += 1
                met[rank] += abs(error) <= _GOALS[rank]
    parts = [f"{met[rank]} of {count[rank]} {rank} within {goal:.0%}" for rank, goal in _GOALS.items()]
    return f"fit: {', '.join(parts)}"


def _step_lines(result: FittedMachine) -> list[str]:
    table = [["run", "steps", *[f"{name}: {what}" for name in CANDIDATES for what in ("all", "median", "p90")]]]
    for each in result.steps:
        cells = []
        for name in CANDIDATES:
            errors = each.errors[name]
            cells += [f"{errors.total:+.1%}", f"{errors.median:.1%}", f"{errors.p90:.1%}"]
        table.append([each.name, f"{each.errors['fit'].steps:,}", *cells])
    return ["Errors of single steps, and of the time of all steps together:", *aligned(table)]


def _order_lines(result: FittedMachine) -> list[str]:
    if not result.orders:
        return []
    words = {"same": "same order", "other": "OTHER ORDER", "too close": "too close to tell"}
    table = [["second run / first run", "", "measured", "simulated", ""]]
    for each in result.orders:
        table.append(
            [
                f"{each.runs[1]} / {each.runs[0]}",
                each.figure,
                f"{each.measured:.3f}",
                f"{each.simulated:.3f}",
                words[each.verdict],
            ]
        )
    return ["", "Does the simulation order two settings as the machine did?", *aligned(table)]


def fit_record(plan: FitPlan, result: FittedMachine) -> dict[str, Any]:
    """The fit as data for JSON."""
    return {
        "machine": result.deployment.machine,
        "model": result.deployment.model,
        "validity": result.deployment.validity,
        "settings": dict(plan.settings),
        "runs": [_run_record(run.name, run.source, run.settings) for run in plan.runs],
        "held_back": [_run_record(run.name, run.source, run.settings) for run in plan.held_back],
        "request_seconds": result.deployment.request_seconds,
        "terms": [
            {"name": each.name, "seconds": each.seconds, "data_sheet": each.sheet, "not_identified": each.reason}
            for each in result.fit.terms
        ],
        "requests": [
            {
                "run": each.name,
                "measured": dict(each.measured),
                "simulated": dict(each.simulated),
                "errors": {name: result.compared[name][at].errors for name in CANDIDATES},
            }
            for at, each in enumerate(result.compared["fit"])
        ],
        "steps": [
            {
                "run": each.name,
                "errors": {
                    name: {"steps": found.steps, "total": found.total, "median": found.median, "p90": found.p90}
                    for name, found in each.errors.items()
                },
            }
            for each in result.steps
        ],
        "orders": [
            {
                "runs": each.runs,
                "figure": each.figure,
                "measured": each.measured,
                "simulated": each.simulated,
                "verdict": each.verdict,
            }
            for each in result.orders
        ],
    }


def _run_record(name: str, source: str, settings: Any) -> dict[str, Any]:
    return {"name": name, "source": source, "settings": dict(settings)}
