"""What a tuning found out, for people: the verdict, a table on the terminal, and the settings as a file."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from chairlift.config import BUNDLED_MODEL
from chairlift.workbench.bench.machine import Machine
from chairlift.workbench.bench.report import table
from chairlift.workbench.bench.tune import Findings, Ratio
from chairlift.workbench.bench.tune_search import GOODPUT, PREEMPTED
from chairlift.workbench.bench.tune_state import Figures, Setting, State, Trial

__all__ = [
    "Answer",
    "Column",
    "columns",
    "comparison",
    "config_lines",
    "duration",
    "report_lines",
    "round_words",
    "serve_command",
    "verdict",
]

_SMALL: Final = 1.1
"""A gain in throughput below this is called small,"""
_UNSURE: Final = 1.25
"""and so is one below this whose interval reaches below that."""
_SHORT: Final = 30
_TITLES: Final = {
    "static": "static",
    "static_best": "best static",
    "equal": "as many slots",
    "default": "defaults",
    "chosen": "chosen",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Findings, and what they are about."""

    findings: Findings
    state: State
    model: str
    what: str
    """The traffic in words."""
    fixed: Mapping[str, Any]
    """Settings that were given."""
    machine: Machine
    price: float
    """Of the machine, per hour."""
    command: str
    output: Path


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One side of the comparison."""

    role: str
    title: str
    setting: Setting
    full: Figures
    """All requests at once: the medians of the real runs, or simulated."""
    paced: Figures | None
    """At the pace of the traffic."""
    full_measured: bool
    paced_measured: bool
    rate: float | None
    """Requests per second up to which promises are kept, simulated but for the chosen one; None where none is."""
    tokens_per_second: float | None
    """Output tokens that it may be asked for: at that rate, or all at once where nothing is promised."""
    latencies: list[float]

    @property
    def waits(self) -> Figures:
        """Where latencies are read from."""
        return self.paced or self.full

    @property
    def waits_measured(self) -> bool:
        return self.paced_measured if self.paced else self.full_measured

    def cost(self, price: float) -> float | None:
        """Of a million output tokens, for a price per hour."""
        return price / 3600 / self.tokens_per_second * 1e6 if self.tokens_per_second else None


def columns(answer: Answer) -> list[Column]:
    """The sides of the comparison, each setting once; the chosen one is the last."""
    findings = answer.findings
    same_as = {"static_best": "static", "equal": "default"}
    shown = []
    for role, setting in ((role, findings.settings[role]) for role in _TITLES):
        others = [findings.settings[other] for other in (same_as.get(role), "chosen") if other and role != "chosen"]
        if setting not in others:
            shown.append(_column(answer, role, setting))
    return shown


def _column(answer: Answer, role: str, setting: Setting) -> Column:
    findings, state = answer.findings, answer.state
    found = [state.find(setting, None, findings.full_count, number) for number in range(findings.rounds)]
    runs = [trial for trial in found if trial is not None]
    full = _median_figures([trial.figures for trial in runs]) if runs else _simulated(state, setting, None, findings)
    paced_run = state.find(setting, findings.pace, findings.paced_count, 0) if findings.pace is not None else None
    paced = None
    if findings.pace is not None:
        paced = paced_run.figures if paced_run else _simulated(state, setting, findings.pace, findings)
    score = findings.scores[role]
    rate, tokens = score.rate if score.keeps else None, full.output_tokens_per_second
    if findings.by_rate:
        if role == "chosen" and rate and findings.confirmed_rate:
            rate, tokens = findings.confirmed_rate, score.value * findings.confirmed_rate / rate
        else:
            tokens = score.value if score.keeps else 0.0
    title = f"{_TITLES[role]} ({setting.max_num_seqs})"
    if role == "chosen" and setting == findings.settings["default"]:
        title = f"chosen = defaults ({setting.max_num_seqs})"
    latencies = paced_run.latencies if paced_run else [] if findings.pace is not None else _latencies(runs)
    return Column(role, title, setting, full, paced, bool(runs), paced_run is not None, rate, tokens or None, latencies)


def _latencies(runs: Sequence[Trial]) -> list[float]:
    return sorted(value for trial in runs for value in trial.latencies)


def _median_figures(runs: Sequence[Figures]) -> Figures:
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(Figures):
        values = [getattr(run, field.name) for run in runs]
        fields[field.name] = None if None in values else statistics.median(values)
    return Figures(**fields)


def _judged(answer: Answer, side: Column) -> tuple[Figures, float | None]:
    """What it is judged by whether few are preempted, and at which rate: the highest that keeps promises, else that of
    ``waits``; None where all come at once.
    """
    if not answer.findings.by_rate:
        return side.full, None
    runs = [trial for trial in answer.state if trial.setting == side.setting and trial.rate == side.rate is not None]
    run = max(runs, key=lambda trial: trial.round is not None, default=None)
    return (side.waits, answer.findings.pace) if run is None else (run.figures, side.rate)


def _preempted(answer: Answer, side: Column) -> str:
    figures, rate = _judged(answer, side)
    where = answer.findings.traffic.crowd if rate is None else f"at {rate:.3g}/s"
    return f"{figures.preemption_rate:.1%} of the requests are preempted, {where}"


def _simulated(state: State, setting: Setting, rate: float | None, findings: Findings) -> Figures:
    for count in (findings.paced_count, findings.full_count, findings.count):
        trial = state.find(setting, rate, count, None)
        if trial is not None:
            return trial.figures
    raise KeyError(setting)


# --- in words --------------------------------------------------------------------------------------------------------


def serve_command(answer: Answer) -> str:
    """What to run."""
    model = "" if answer.model == BUNDLED_MODEL else f"{shlex.quote(answer.model)} "
    return f"chairlift serve {model}--config {shlex.quote(str(answer.output / 'chairlift.yaml'))}"


def verdict(answer: Answer) -> str:
    """What to run and why, in a few sentences."""
    findings, sides = answer.findings, {column.role: column for column in columns(answer)}
    chosen = sides["chosen"]
    statics = [sides[role] for role in ("static", "static_best") if role in sides]
    static = max(statics, key=lambda side: side.full.output_tokens_per_second)
    gain = findings.ratios.get("static_best")
    if gain is None:
        value = chosen.full.output_tokens_per_second / static.full.output_tokens_per_second
        gain = Ratio(value, value, value, 0)
    theirs = max((side.rate or 0.0 for side in statics), default=0.0)
    more = chosen.rate / theirs if chosen.rate and theirs else math.inf if chosen.rate else 1.0
    better = (static.waits.goodput or 0.0) < GOODPUT <= (chosen.waits.goodput or 0.0) or more >= _SMALL
    small = (gain.mean < _SMALL or (gain.low < _SMALL and gain.mean < _UNSURE)) and not better
    waits = chosen.waits.e2el_p99 / static.waits.e2el_p99 if static.waits.e2el_p99 else 1.0
    simulated = "" if chosen.waits_measured else ", as simulated"
    alike = chosen.waits_measured == static.waits_measured
    latency = f"its p99 latency is {waits:.0%} of theirs{simulated}" if waits < 0.95 and alike else ""
    command = serve_command(answer)
    if small:
        why = _why_small(findings)
        sentences = [
            f"For this traffic static batching is as good: continuous batching gets {_times(gain)} the throughput."
            + (f" {why}" if why else "")
            + (f" It answers sooner, though: {latency}." if latency else "")
            + f" Either will do; `{command}` runs it."
        ]
    else:
        words = [f"{_times(gain)} the throughput of static batches at their best", latency]
        words = [*filter(None, words), _preempted(answer, chosen)]
        sentences = [f"Run `{command}`: {', and '.join(words[:-1])}; {words[-1]}."]
    if chosen.setting == findings.settings["default"]:
        sentences.append("The defaults are as good as anything that was tried.")
    sentences += _promise_sentences(answer, chosen, static, theirs)
    judged, rate = _judged(answer, chosen)
    others = [trial for trial in answer.state if trial.rate == rate and trial.setting.batching == "continuous"]
    if min(each.preemption_rate for each in (judged, *(trial.figures for trial in others))) >= PREEMPTED:
        sentences.append(
            f"Warning: preemption cannot be held below {PREEMPTED:.0%} with this memory; give the KV cache more"
            " (--kv-cache-memory-bytes), or send shorter requests."
        )
    if not chosen.full_measured:
        sentences.append("All of this is simulated: there was no time for real runs.")
    return " ".join(sentences)


def _promise_sentences(answer: Answer, chosen: Column, static: Column, theirs: float) -> list[str]:
    """``theirs`` is the highest rate at which static batches keep the promises."""
    findings = answer.findings
    if not findings.traffic.has_promises:
        return []
    if not findings.by_rate or chosen.rate is None:
        kept = chosen.waits.goodput or 0.0
        ours = [trial.figures for trial in answer.state if trial.setting.batching == "continuous"]
        words = f"{kept:.1%}, static batches for {static.waits.goodput or 0.0:.1%}."
        if any((figures.goodput or 0.0) >= GOODPUT for figures in ours):
            return [f"It keeps the promises for {words}"]
        return [f"No setting keeps the promises for 99 of 100 requests; this one keeps them for {words}"]
    says = "" if findings.confirmed_rate else ", as simulated"
    others = f"static batches {f'up to {theirs:.3g}' if theirs else 'at no rate'}, as simulated"
    text = f"It keeps the promises for 99 of 100 requests up to {chosen.rate:.3g} requests/s{says}; {others}."
    own = findings.traffic.rate
    if own is not None and own > 1.02 * chosen.rate:
        text += f" Your traffic comes at {own:.3g}, which is more than this machine can do: add machines."
    return [text]


def _why_small(findings: Findings) -> str:
    answers = [request.output_tokens for request in findings.traffic.requests]
    if max(answers) < _SHORT:
        return f"No answer is longer than {max(answers)} tokens, so nobody waits long for another."
    if max(answers) < 1.2 * min(answers):
        return "All answers are about as long, so a batch ends as one anyway."
    return ""


def round_words(count: int) -> str:
    """So many rounds, in words."""
    return f"{count} round" + "s" * (count != 1)


def _times(ratio: Ratio) -> str:
    text = f"{ratio.mean:.2f} times" if ratio.mean < 2 else f"{ratio.mean:.1f} times"
    return f"{text} ({ratio.low:.2f} to {ratio.high:.2f})" if ratio.rounds > 1 else text


# --- the terminal ----------------------------------------------------------------------------------------------------


def report_lines(answer: Answer) -> list[str]:
    """Table, notes and verdict."""
    findings = answer.findings
    sides = columns(answer)
    header, rows = comparison(answer, sides)
    lines = ["", *table(header, rows), "", "Slots are in brackets; times are p50 / p99."]
    if any(cell.startswith("~") for row in rows for cell in row):
        lines.append("~ simulated; everything else was measured")
    if findings.rounds:
        crowd = findings.traffic.crowd
        lines.append(f"{findings.full_count:,} requests, {crowd}, {round_words(findings.rounds)} side by side; medians")
    lines += findings.notes
    names = ", ".join(("chairlift.yaml", "report.html", "tune.json"))
    return [*lines, "", verdict(answer), f"{answer.output} has {names}"]


def comparison(answer: Answer, sides: Sequence[Column]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table of all sides."""
    findings, pace = answer.findings, answer.findings.pace

    def row(name: str, cell: Any, *, of_pace: bool = False) -> list[str]:
        cells = []
        for side in sides:
            figures = side.waits if of_pace else side.full
            measured = side.waits_measured if of_pace else side.full_measured
            cells.append(("" if measured else "~") + cell(figures))
        return [name, *cells]

    crowd = findings.traffic.crowd
    at = crowd if pace is None else f"at {pace:.3g}/s"
    rows = [
        row(f"{crowd}: requests/s", lambda f: f"{f.requests_per_second:,.1f}"),
        row(f"{crowd}: output tokens/s", lambda f: f"{f.output_tokens_per_second:,.0f}"),
        row(f"{crowd}: preempted", lambda f: f"{f.preemption_rate:.1%}"),
    ]
    for name, part in (("time to first token", "ttft"), ("time per token", "tpot"), ("whole request", "e2el")):
        rows.append(
            row(
                f"{at}: {name}",
                lambda f, part=part: _both(getattr(f, part + "_p50"), getattr(f, part + "_p99")),
                of_pace=True,
            )
        )
    if pace is not None:
        rows.append(row(f"{at}: preempted", lambda f: f"{f.preemption_rate:.1%}", of_pace=True))
    if findings.traffic.has_promises:
        rows.append(
            row(f"{at}: promises kept", lambda f: "-" if f.goodput is None else f"{f.goodput:.1%}", of_pace=True)
        )
    if findings.by_rate:
        highest = [("none" if side.rate is None else f"{_mark(answer, side)}{side.rate:.3g}") for side in sides]
        rows.append(["highest rate that keeps promises, /s", *highest])
    costs = [(side, side.cost(answer.price)) for side in sides]
    rows.append(
        [
            f"cost per million output tokens ({answer.price:g} an hour)",
            *("-" if cost is None else f"{_mark(answer, side)}{cost:.3g}" for side, cost in costs),
        ]
    )
    return ["", *(side.title for side in sides)], rows


def _mark(answer: Answer, side: Column) -> str:
    """Of what follows from :attr:`Column.tokens_per_second` or the rate."""
    confirmed = side.role == "chosen" and answer.findings.confirmed_rate
    return "" if (confirmed if answer.findings.by_rate else side.full_measured) else "~"


def _both(half: float, most: float) -> str:
    one, other = duration(half), duration(most)
    return f"{one.split()[0] if one.split()[1] == other.split()[1] else one} / {other}"


def duration(seconds: float) -> str:
    """In the unit that people would say it in."""
    return (
        f"{seconds * 1000:.3g} ms"
        if seconds < 0.9995
        else f"{seconds:.3g} s"
        if seconds < 1000
        else f"{seconds:,.0f} s"
    )


# --- files -----------------------------------------------------------------------------------------------------------


def config_lines(answer: Answer) -> list[str]:
    """The chosen settings as YAML, with the reasons."""
    findings, setting = answer.findings, answer.findings.settings["chosen"]
    chosen = _column(answer, "chosen", setting)
    given = set(answer.fixed)
    reasons = {
        "max_num_seqs": f"slots: {_preempted(answer, chosen)}",
        "max_num_batched_tokens": "tokens of a step: lower keeps answers smooth, higher speeds prompts up",
        "admission_watermark": "share of the KV cache kept free when a request joins"
        if findings.tight
        else "share of the KV cache kept free; memory is plentiful here, so it does not matter",
        "prefill_mode": "how prompts share steps with answers",
        "preemption_mode": "what happens when memory runs out" + ("" if findings.tight else "; it did not, in any run"),
    }
    lines = [
        "# Written by chairlift tune.",
        f"# traffic: {' '.join(answer.what.split())}",
        f"# machine: {answer.machine.cpu}, {answer.machine.processors} processors",
        f"# made by: {' '.join(answer.command.split())}",
        "",
    ]
    if answer.model != BUNDLED_MODEL:
        lines.append(f"model: {json.dumps(answer.model)}")
    for name, value in answer.fixed.items():
        if name not in reasons:
            lines.append(f"{name}: {json.dumps(value)}  # given")
    for name, reason in reasons.items():
        why = "given" if name in given else reason
        lines.append(f"{name}: {json.dumps(getattr(setting, name))}  # {why}")
    return lines
