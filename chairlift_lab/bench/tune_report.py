"""Output of ``chairlift tune``: the recommendation, text for the terminal, an HTML page, and a file with the
settings."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from chairlift.config import BUNDLED_MODEL
from chairlift_lab.bench import plots
from chairlift_lab.bench.machine import HostMachine
from chairlift_lab.bench.report import Block, Facts, Report, Section, Table, Text
from chairlift_lab.bench.tune import REPEATS, Findings, capacity_of, claimed_rate
from chairlift_lab.bench.tune_measured import longest_run
from chairlift_lab.bench.tune_search import GOODPUT, PREEMPTED, shortfall
from chairlift_lab.bench.tune_state import Setting, State, StoredFigures, Trial
from chairlift_lab.bench.verdict import Ratio, disturbance, times

__all__ = ["Column", "TuneAnswer", "columns", "config_lines", "printed", "tune_report", "verdict"]

_MAX_ROWS: Final = 30
_DEAR: Final = 3.0
_ALL: Final = """\
All at once means that every request arrives at the start, so the machine always has work. This measures the maximum
throughput. """
_USERS: Final = "Each user waits for an answer before the next request is sent: a slow server gets fewer requests. "
_ABOUT: Final = """\
If the traffic has a rate, latencies are measured at this rate. Otherwise requests wait for each other, so the latencies
say little more than the throughput.

Time to first token is counted from the sending of a request. Time per token is the mean over the rest of its answer.
p99 means that 99 of 100 requests were faster.

The requests of a static batch start together and end together, as in most simple servers. "Best static" is the best
size that was measured."""
_SMALL: Final = 1.1
"""The report calls a gain small if the ratio of throughputs is below this number."""
_SHORT: Final = 30
_TITLES: Final = {
    "static": "static",
    "static_best": "best static",
    "static_plain": "best static",
    "equal": "as many slots",
    "default": "defaults",
    "other": "chosen",
    "chosen": "chosen",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TuneAnswer:
    """Everything that the report shows: the results of a tuning, the traffic, the fixed settings and the price."""

    findings: Findings
    state: State
    model: str
    what: str
    """Description of the traffic."""
    fixed: Mapping[str, Any]
    """Settings that the user gave, name -> value."""
    machine: HostMachine
    price: float
    """Price of the machine per hour."""
    command: str
    output: Path


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One column of the comparison table: a setting of the engine with its results."""

    role: str
    title: str
    setting: Setting
    full: StoredFigures
    """Results when all requests arrive at once: medians over real rounds, or the results of one real run or of a
    simulation."""
    paced: StoredFigures | None
    """Results at the request rate of the traffic. None if the traffic has no rate, or there was no such run."""
    full_measured: bool
    paced_measured: bool
    rate: float | None
    """Highest request rate per second at which the latency targets are met. None if no such rate is known."""
    rate_measured: bool
    """Whether a real run confirmed ``rate``."""
    tokens_per_second: float | None
    """Output tokens per second at ``rate``. If settings are not compared by rate: with all requests at once."""
    latencies: list[float]

    @property
    def waits(self) -> StoredFigures:
        """Results from which latencies are reported: at the request rate of the traffic if possible, otherwise with all
        requests at once."""
        return self.paced or self.full

    @property
    def waits_measured(self) -> bool:
        return self.paced_measured if self.paced else self.full_measured

    def cost(self, price: float) -> float | None:
        """Cost of a million output tokens, for a price of the machine per hour. None if the throughput is unknown."""
        return price / 3600 / self.tokens_per_second * 1e6 if self.tokens_per_second else None


def columns(answer: TuneAnswer) -> list[Column]:
    """The columns of the comparison. Each setting occurs once; the chosen setting is the last."""
    findings = answer.findings
    same_as = {"static_best": "static", "equal": "default", "other": "default"}
    shown = []
    for role, setting in ((role, findings.settings[role]) for role in _TITLES if role in findings.settings):
        others = [findings.settings[other] for other in (same_as.get(role), "chosen") if other and role != "chosen"]
        if setting not in others:
            shown.append(_column(answer, role, setting))
    return shown


def _column(answer: TuneAnswer, role: str, setting: Setting) -> Column:
    findings = answer.findings
    state = answer.state
    found = [state.find(setting, None, findings.full_count, number) for number in range(findings.rounds)]
    runs = [trial for trial in found if trial is not None]
    single = longest_run(state, setting)
    if runs:
        full = StoredFigures.medians([trial.figures for trial in runs])
    elif single is not None:
        full = single.figures
    else:
        full = _simulated(state, setting, None, findings)
    paced_run = state.find(setting, findings.pace, findings.paced_count, 0) if findings.pace is not None else None
    paced = None
    if findings.pace is not None and (paced_run or findings.trusted):
        paced = paced_run.figures if paced_run else _simulated(state, setting, findings.pace, findings)
    rate, measured, tokens = _rate_of(answer, role, setting) if findings.by_rate else (None, False, None)
    title = f"{_TITLES[role]} ({setting.max_num_seqs})"
    if role == "chosen" and setting == findings.settings["default"]:
        title = f"chosen = defaults ({setting.max_num_seqs})"
    if role == "static" and setting == findings.settings["static_best"]:
        title = f"best static ({setting.max_num_seqs})"
    if findings.drafts:
        title += ", drafts" if setting.drafts else ", no drafts"
    latencies = [] if findings.pace is not None else _latencies(runs)
    return Column(
        role=role,
        title=title,
        setting=setting,
        full=full,
        paced=paced,
        full_measured=bool(runs or single),
        paced_measured=paced_run is not None,
        rate=rate,
        rate_measured=measured,
        tokens_per_second=(tokens if findings.by_rate else full.output_tokens_per_second) or None,
        latencies=paced_run.latencies if paced_run else latencies,
    )


def _rate_of(answer: TuneAnswer, role: str, setting: Setting) -> tuple[float | None, bool, float | None]:
    """(highest rate that meets the targets, whether a real run confirmed it, output tokens per second at this rate)."""
    findings = answer.findings
    state = answer.state
    claim = claimed_rate(state, findings.traffic, setting)
    if claim is not None and (role == "chosen" or not findings.trusted):
        runs = [each for each in state if (each.setting, each.rate) == (setting, claim.arrivals)]
        tokens = [each.figures.output_tokens_per_second for each in runs if each.round is not None]
        return claim.rate, True, statistics.median(tokens)
    score = findings.scores[role]
    refuted = [each.rate for each in findings.refuted if each.setting == setting.describe()]
    if not findings.trusted or not score.keeps or score.rate is None or min(refuted, default=math.inf) <= score.rate:
        return None, False, None
    capacity = capacity_of(state, setting)
    share = 1.0 if capacity is None else min(1.0, capacity.low / score.rate)  # no rate is above the measured throughput
    return share * score.rate, False, share * score.value


def _latencies(runs: Sequence[Trial]) -> list[float]:
    return sorted(value for trial in runs for value in trial.latencies)


def _judged(answer: TuneAnswer, side: Column) -> tuple[StoredFigures, float | None, bool]:
    """(results to judge preemptions by, request rate of that run, whether the run was real).

    The run is the one at the highest rate that meets the latency targets, or otherwise that of :attr:`Column.waits`.
    The rate is None if all requests arrive at once.
    """
    if not answer.findings.by_rate:
        return side.full, None, side.full_measured
    claim = claimed_rate(answer.state, answer.findings.traffic, side.setting)
    rate = claim.arrivals if claim is not None and side.rate_measured else side.rate
    runs = [trial for trial in answer.state if trial.setting == side.setting and trial.rate == rate is not None]
    run = max(runs, key=lambda trial: (trial.round is not None, trial.count), default=None)
    if run is None or (run.round is None and not answer.findings.trusted):
        return side.waits, answer.findings.pace if side.paced else None, side.waits_measured
    return run.figures, rate, run.round is not None


def _preempted(answer: TuneAnswer, side: Column) -> str:
    figures, rate, measured = _judged(answer, side)
    where = answer.findings.traffic.crowd if rate is None else f"at {rate:.3g}/s"
    simulated = "" if measured else ", as simulated"
    return f"{figures.preemption_rate:.1%} of the requests are preempted, {where}{simulated}"


def _simulated(state: State, setting: Setting, rate: float | None, findings: Findings) -> StoredFigures:
    for count in (findings.paced_count, findings.full_count, findings.count):
        trial = state.find(setting, rate, count, None)
        if trial is not None:
            return trial.figures
    raise KeyError(setting)


# --- the recommendation ----------------------------------------------------------------------------------------------


def serve_command(answer: TuneAnswer) -> str:
    """Command line that starts a server with the chosen settings."""
    model = "" if answer.model == BUNDLED_MODEL else f"{shlex.quote(answer.model)} "
    return f"chairlift serve {model}--config {shlex.quote(str(answer.output / 'chairlift.yaml'))}"


def verdict(answer: TuneAnswer) -> str:
    """Recommended command with the reasons, in a few sentences. Results that were not measured are called simulated."""
    findings = answer.findings
    sides = {column.role: column for column in columns(answer)}
    chosen = sides["chosen"]
    statics = [sides[role] for role in ("static", "static_best") if role in sides]
    static = max(statics, key=lambda side: (side.full_measured, side.full.output_tokens_per_second))
    theirs = max(statics, key=lambda side: side.rate or 0.0)
    sentences = _gain_sentences(answer, chosen, static, theirs)
    if chosen.setting == findings.settings["default"]:
        sentences.append("No tried setting was shown to be better than the defaults.")
    sentences += _draft_sentences(findings)
    sentences += _promise_sentences(answer, chosen, static, theirs)
    judged, rate, _ = _judged(answer, chosen)
    others = [trial for trial in _shown(answer) if trial.rate == rate and trial.setting.batching == "continuous"]
    if min(each.preemption_rate for each in (judged, *(trial.figures for trial in others))) >= PREEMPTED:
        sentences.append(
            f"Warning: with this memory more than {PREEMPTED:.0%} of the requests are preempted; enlarge the KV cache"
            " (--kv-cache-memory-bytes), or send shorter requests."
        )
    if not findings.trusted:
        sentences.append(
            f"Nothing here is simulated: the error of the step model is {findings.fit_error or 0.0:.0%} (median) on"
            " this machine now."
        )
    real = [trial.busy for trial in answer.state if trial.round is not None]
    sentences.append(disturbance(real) or "All results are simulated, because there was no time for real runs.")
    return " ".join(sentences)


def _gain_sentences(answer: TuneAnswer, chosen: Column, static: Column, theirs: Column) -> list[str]:
    """Sentences that compare the chosen settings with static batches. ``static`` has the highest throughput of the
    static settings, and ``theirs`` meets the latency targets at the highest rate."""
    findings = answer.findings
    command = serve_command(answer)
    gain = findings.ratios.get("static_best")
    if gain is None:
        value = chosen.full.output_tokens_per_second / static.full.output_tokens_per_second
        simulated = not (chosen.full_measured and static.full_measured)
        words = f"as simulated, it has {value:.2f} times" if simulated else f"in one run each, it had {value:.2f} times"
        return [f"Run `{command}`: {words} the throughput of static batches. No real runs side by side confirm it."]
    if chosen.rate and theirs.rate:
        more = chosen.rate / theirs.rate
    elif chosen.rate:
        more = math.inf
    else:
        more = 1.0
    better = (static.waits.goodput or 0.0) < GOODPUT <= (chosen.waits.goodput or 0.0) or more >= _SMALL
    latency = _latency_words(findings)
    preempted = _preempted(answer, chosen)
    if gain.doubt:
        words = f"it had {times(gain)} the throughput of static batches at their best, which is no claim: {gain.doubt}"
        return [f"Run `{command}`: {'; '.join(filter(None, [words, latency, preempted]))}."]
    if better or (gain.larger and gain.ratio >= _SMALL):
        throughput = f"{times(gain)} the throughput of static batches at their best"
        return [f"Run `{command}`: {', and '.join(filter(None, [throughput, latency]))}; {preempted}."]
    how = "static batching is faster" if gain.smaller else "static batching is as good"
    why = _why_small(findings)
    return [
        f"For this traffic {how}: continuous batching gets {times(gain)} the throughput."
        + (f" {why}" if why else "")
        + (f" But its latency is lower: {latency}." if latency else "")
        + ("" if gain.smaller else " Both are suitable;")
        + f" `{command}` runs {'continuous batching' if gain.smaller else 'it'}."
    ]


def _latency_words(findings: Findings) -> str:
    """Text that compares the p99 latencies. Empty if it may not be claimed that the chosen setting is faster."""
    ratio = findings.latency
    if ratio is None or not ratio.smaller:
        return ""
    where = findings.traffic.crowd if findings.pace is None else f"at {findings.pace:.3g}/s"
    spread = f"{ratio.low:.0%} to {ratio.high:.0%} in {ratio.rounds} rounds"
    return f"its p99 latency is {ratio.ratio:.0%} of theirs ({spread}, {where})"


def _shown(answer: TuneAnswer) -> list[Trial]:
    """Runs whose results may be shown: all runs, or only real runs if the simulator is not trusted."""
    return [trial for trial in answer.state if trial.round is not None or answer.findings.trusted]


def _promise_sentences(answer: TuneAnswer, chosen: Column, static: Column, theirs: Column) -> list[str]:
    """Sentences about the latency targets. ``theirs`` is the static setting that meets the targets at the highest
    rate."""
    findings = answer.findings
    if not findings.traffic.has_promises:
        return []
    hopeless = findings.trusted and findings.scores["chosen"].rate is None
    if not findings.by_rate or (chosen.rate is None and (hopeless or not findings.refuted)):
        kept, others = (
            f"{side.waits.goodput or 0.0:.1%}{'' if side.waits_measured else ', as simulated'}"
            for side in (chosen, static)
        )
        words = f"{kept}, static batches for {others}."
        ours = [trial.figures for trial in _shown(answer) if trial.setting.batching == "continuous"]
        if any((figures.goodput or 0.0) >= GOODPUT for figures in ours):
            return [f"It meets the targets for {words}"]
        return [f"No setting meets the targets for 99 of 100 requests; this one meets them for {words}"]
    if chosen.rate is None and findings.met_once is not None:
        rate, runs = findings.met_once
        return [
            f"{runs} real run{'s' * (runs > 1)} met the targets at {rate:.3g} requests/s; {REPEATS} are needed to claim"
            " a rate."
        ]
    if chosen.rate is None:
        lowest = findings.refuted[-1]
        kept = "missed them" if lowest.goodput is None else f"met them for {lowest.goodput:.1%} of the requests"
        return [
            f"No real run confirmed a rate that meets the targets: at {lowest.rate:.3g} requests/s, a real run {kept}"
            f" and completed {lowest.completed:.3g}/s."
        ]
    others = f"static batches {f'up to {theirs.rate:.3g}' if theirs.rate else 'at no rate'}"
    others += "" if theirs.rate_measured or not findings.trusted else ", as simulated"
    others = others if findings.trusted or theirs.rate else "no real run showed a rate for static batches"
    claim = findings.confirmed
    says = ", as simulated; no real run confirmed it"
    if chosen.rate_measured and claim is not None:
        says = f", in each of {claim.runs} real runs of at least {claim.seconds:.2g} s"
    text = f"It meets the targets for 99 of 100 requests up to {chosen.rate:.3g} requests/s{says}; {others}."
    own = findings.traffic.rate
    if own is not None and own > 1.02 * chosen.rate:
        text += f" Your traffic arrives at {own:.3g} requests/s, which exceeds this machine's capacity: add machines."
    return [text]


def _draft_sentences(findings: Findings) -> list[str]:
    """Sentences about the gain of drafts (speculative decoding), if the user gave a drafter and runs were compared."""
    ratio = findings.ratios.get("drafts")
    static = findings.ratios.get("static_drafts")
    if ratio is None or static is None:
        return []
    off = not findings.settings["chosen"].drafts
    if off:
        lead = "Speculation off is best for this traffic" if ratio.smaller else "Drafts were not shown to be faster"
        words = f"{lead}: with drafts it gets {times(ratio)} the throughput"
    else:
        words = f"Drafts get {times(ratio)} the throughput of none"
        words += "" if ratio.larger else f", which is no claim: {ratio.doubt or 'that is within the noise'}"
    return [f"{words}; static batches get {times(static)} with drafts."]


def _why_small(findings: Findings) -> str:
    answers = [request.output_tokens for request in findings.traffic.requests]
    if max(answers) < _SHORT:
        return f"No answer is longer than {max(answers)} tokens, so no request waits long for another one."
    if max(answers) < 1.2 * min(answers):
        return "All answers have similar lengths, so the requests of a batch end together anyway."
    return ""


def _rounds(findings: Findings) -> str:
    return f"{findings.rounds} round" + "s" * (findings.rounds != 1)


# --- the terminal ----------------------------------------------------------------------------------------------------


def printed(answer: TuneAnswer) -> Iterator[Text | Table]:
    """Text for the terminal: table, notes and recommendation."""
    findings = answer.findings
    yield _comparison(answer, columns(answer))
    notes = list(findings.notes)
    if findings.rounds:
        crowd = findings.traffic.crowd
        rounds = f"{_rounds(findings)} side by side"
        notes.insert(0, f"{findings.full_count:,} requests, {crowd}, {rounds}; medians")
    if notes:
        yield Text("\n".join(notes))
    yield Text(f"{verdict(answer)}\n{answer.output} has chairlift.yaml, report.html, tune.json")


def _comparison(answer: TuneAnswer, sides: Sequence[Column]) -> Table:
    """Table that compares the settings, one column per setting."""
    findings = answer.findings
    pace = answer.findings.pace

    def row(name: str, cell: Any, *, of_pace: bool = False) -> list[str]:
        cells = []
        for side in sides:
            figures = side.waits if of_pace else side.full
            measured = side.waits_measured if of_pace else side.full_measured
            known = not (of_pace and pace is not None and side.paced is None)
            shown = cell(figures, side.setting) if known else "-"
            cells.append(("" if measured or shown == "-" else "~") + shown)
        return [name, *cells]

    crowd = findings.traffic.crowd
    at = crowd if pace is None else f"at {pace:.3g}/s"
    rows = [
        row(f"{crowd}: requests/s", lambda f, _: f"{f.requests_per_second:,.1f}"),
        row(f"{crowd}: output tokens/s", lambda f, _: f"{f.output_tokens_per_second:,.0f}"),
        row(f"{crowd}: preempted", lambda f, _: f"{f.preemption_rate:.1%}"),
        row(
            f"{crowd}: tokens of a row with drafts in a step",
            lambda f, _: "-" if f.accepted_length is None else f"{f.accepted_length:.2f}",
        ),
    ]
    for name, part in (("time to first token", "ttft"), ("time per token", "tpot"), ("whole request", "e2el")):
        rows.append(
            row(
                f"{at}: {name}",
                lambda f, setting, part=part: (
                    "-"
                    if part == "tpot" and setting.batching == "static"
                    else _both(getattr(f, part + "_p50"), getattr(f, part + "_p99"))
                ),
                of_pace=True,
            )
        )
    if pace is not None:
        rows.append(row(f"{at}: completed, requests/s", lambda f, _: f"{f.requests_per_second:,.3g}", of_pace=True))
        rows.append(row(f"{at}: preempted", lambda f, _: f"{f.preemption_rate:.1%}", of_pace=True))
    if findings.traffic.has_promises:
        rows.append(
            row(f"{at}: targets met", lambda f, _: "-" if f.goodput is None else f"{f.goodput:.1%}", of_pace=True)
        )
    rows = [row for row in rows if set(row[1:]) != {"-"}]  # rows without any value
    if findings.by_rate:
        highest = [("none" if side.rate is None else f"{_mark(answer, side)}{side.rate:.3g}") for side in sides]
        rows.append(["highest rate that meets the targets, /s", *highest])
    costs = [(side, side.cost(answer.price)) for side in sides]
    rows.append(
        [
            f"cost per million output tokens ({answer.price:g} an hour)",
            *("-" if cost is None else f"{_mark(answer, side)}{cost:.3g}" for side, cost in costs),
        ]
    )
    caption = "The number of slots (max_num_seqs) is in brackets; ~ is simulated. Times are p50 / p99."
    if any(side.setting.batching == "static" for side in sides):
        caption += " A static batch delivers all tokens at its end, so it has no time per token."
    return Table(["", *(side.title for side in sides)], rows, caption)


def _mark(answer: TuneAnswer, side: Column) -> str:
    """``~`` if :attr:`Column.tokens_per_second` and the rate of this column are simulated, otherwise empty."""
    measured = side.rate_measured if answer.findings.by_rate else side.full_measured
    return "" if measured else "~"


def _both(p50: float, p99: float) -> str:
    one = _duration(p50)
    other = _duration(p99)
    return f"{one.split()[0] if one.split()[1] == other.split()[1] else one} / {other}"


def _duration(seconds: float) -> str:
    """Text for a duration, in ms or s."""
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


# --- the page ---------------------------------------------------------------------------------------------------------


def tune_report(answer: TuneAnswer) -> Report:
    """Report with the HTML page and the record for tune.json."""
    lead = verdict(answer)
    record = {"verdict": lead, **answer.findings.to_dict()}
    return Report(record, "What batching does for your traffic", lead, _sections(answer))


def _sections(answer: TuneAnswer) -> Iterator[Section]:
    sides = columns(answer)
    yield Section("Side by side", _side_by_side(answer, sides))
    yield Section("Cost against latency", _cost(answer, sides))
    yield Section("Slots and preemption", _preemption(answer))
    yield Section("What was tried", [_tried(answer)])
    yield Section("How far to trust this", _trust(answer))


def _side_by_side(answer: TuneAnswer, sides: Sequence[Column]) -> Iterator[Block]:
    yield from _bars(
        [
            (side, {"output tokens per second": side.full.output_tokens_per_second}, side.full_measured)
            for side in sides
        ],
        title=f"Throughput, {answer.findings.traffic.crowd}",
        y_label="output tokens per second",
    )
    known = [side for side in sides if answer.findings.pace is None or side.paced is not None]
    yield from _bars(
        [(side, {"p50": side.waits.e2el_p50, "p99": side.waits.e2el_p99}, side.waits_measured) for side in known],
        title=f"Whole request, {_pace(answer)}",
        y_label="seconds",
    )
    samples = {side.title: side.latencies for side in sides if side.latencies and side.role != "equal"}
    if samples:
        yield plots.cdf(samples, title=f"How long requests take, {_pace(answer)}", x_label="seconds, whole request")
    yield _comparison(answer, sides)
    ratios = answer.findings.ratios
    if ratios:
        names_of = {
            "static_best": "chosen / best static",
            "default": "chosen / defaults",
            "equal": "continuous / static, as many slots",
            "drafts": "chosen with / without drafts",
            "static_drafts": "best static with / without drafts",
        }
        yield Table(
            ["throughput", "ratio", "95 % interval", "range of the rounds"],
            [
                [label, f"{ratio.ratio:.2f}", "-" if ratio.doubt else _span(ratio.low, ratio.high), _range(ratio)]
                for label, ratio in ((label, ratios[name]) for name, label in names_of.items() if name in ratios)
            ],
            caption=f"Real runs side by side, {_rounds(answer.findings)}",
        )
    about = (_ALL if answer.findings.traffic.users is None else _USERS) + _ABOUT
    yield Text("\n\n".join(" ".join(part.split()) for part in about.split("\n\n")))


def _range(ratio: Ratio) -> str:
    return _span(min(ratio.per_round), max(ratio.per_round))


def _span(low: float, high: float) -> str:
    return f"{low:.2f} to {high:.2f}"


def _bars(
    values: Sequence[tuple[Column, Mapping[str, float], bool]], *, title: str, y_label: str
) -> Iterator[plots.Figure]:
    """Bar charts of ``values``: (column, series -> value, whether the values were measured).

    Measured and simulated values are shown in separate charts.
    """
    for measured in (True, False):
        shown = [(side, series) for side, series, seen in values if seen == measured]
        if shown:
            yield plots.bars(
                [side.title for side, _ in shown],
                {name: [series[name] for _, series in shown] for name in shown[0][1]},
                title=title if measured else f"{title} (simulated)",
                y_label=y_label,
            )


def _pace(answer: TuneAnswer) -> str:
    pace = answer.findings.pace
    return answer.findings.traffic.crowd if pace is None else f"at {pace:.3g} requests per second"


def _cost(answer: TuneAnswer, sides: Sequence[Column]) -> Iterator[Block]:
    by_rate = answer.findings.by_rate
    tried = [
        trial
        for trial in _shown(answer)
        # Static batches deliver all tokens at once, so they have no time per token and are left out.
        if (trial.rate is not None) == by_rate
        and trial.figures.requests
        and (by_rate or trial.setting.batching != "static")
    ]
    measured = [_point(answer, trial) for trial in tried if trial.round is not None]
    simulated = [_point(answer, trial) for trial in tried if trial.round is None]
    points = {"simulated": simulated, "measured": measured}
    if by_rate:
        kept = [_point(answer, trial) for trial in tried if trial.round is None and not shortfall(trial.figures)]
        dearest = max((cost for _, cost, _ in kept + measured), default=math.inf)
        broken = [point for point in simulated if point not in set(kept) and point[1] <= _DEAR * dearest]
        points = {"simulated, misses targets": broken, "simulated, meets them": kept, "measured": measured}
        simulated = kept
    hollow = {name for name in points if name != "measured"}
    points = {name: series for name, series in points.items() if series}
    line = "best simulated" if simulated else "best measured"
    yield plots.scatter(
        {**points, line: _front(simulated or measured)},
        title=f"Cost of a million output tokens, at {answer.price:g} per hour",
        x_label="whole request, p99, seconds" if by_rate else "time per output token, p99, milliseconds",
        y_label="cost",
        connect={line},
        hollow=hollow,
    )
    yield Text(
        "Each outline is a simulated setting, and each filled point is a real run. Points further left have lower"
        f" latency, and points further down cost less. The line joins the {line} points."
        + (" Points have different rates of arrivals. Expensive points that miss the targets are left out." * by_rate)
        + (" Static batches, which have no time per token, are left out." * (not by_rate))
    )
    costs = [(side, cost) for side in sides if (cost := side.cost(answer.price)) is not None]
    yield from _bars(
        [(side, {"cost": cost}, side.rate_measured if by_rate else side.full_measured) for side, cost in costs],
        title="Cost side by side, at the highest rate that meets the targets" if by_rate else "Cost side by side",
        y_label="cost",
    )


def _point(answer: TuneAnswer, trial: Trial) -> tuple[float, float, str]:
    figures = trial.figures
    cost = answer.price / 3600 / figures.output_tokens_per_second * 1e6
    return (figures.tpot_p99 * 1000 if trial.rate is None else figures.e2el_p99, cost, "")


def _front(points: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Pareto front: the points for which no other point has both a lower latency and a lower cost, by latency."""
    front: list[tuple[float, float, str]] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def _preemption(answer: TuneAnswer) -> Iterator[Block]:
    findings = answer.findings
    chosen = answer.findings.settings["chosen"]
    how = "simulated" if findings.trusted else "measured"
    rows = [float(slots) for slots, _ in findings.by_slots]
    preempted = [100 * figures.preemption_rate for _, figures in findings.by_slots]
    throughput = [figures.output_tokens_per_second for _, figures in findings.by_slots]
    if findings.tight:
        limit = ([rows[0], rows[-1]], [100 * PREEMPTED] * 2) if rows else ([], [])
        yield plots.lines(
            {"preempted": (rows, preempted), "limit": limit},
            title=f"Preempted requests, {findings.traffic.crowd} ({how})",
            x_label="max_num_seqs",
            y_label="%",
        )
    yield plots.lines(
        {"output tokens per second": (rows, throughput)},
        title=f"Throughput, {findings.traffic.crowd} ({how})",
        x_label="max_num_seqs",
        y_label="output tokens per second",
    )
    yield Text(
        f"{how.capitalize()}, with everything else as chosen; {chosen.max_num_seqs} slots were chosen. "
        + (
            "A preempted request releases its memory, and is computed again or waits in host memory. Above the"
            " limit, too much work is done twice."
            if findings.tight
            else "No run preempted a request: there is enough memory, and the size of the reserve does not matter."
        )
    )


def _tried(answer: TuneAnswer) -> Block:
    by_rate = answer.findings.by_rate
    trials = [trial for trial in _shown(answer) if (trial.rate is not None) == by_rate and trial.figures.requests]
    best: dict[tuple[object, bool], Trial] = {}
    for trial in trials:  # keep the best simulation and the best real run of each setting
        key = (trial.setting, trial.round is None)
        if key not in best or _rank(trial) > _rank(best[key]):
            best[key] = trial
    # If several settings give equal results, only the setting with the shortest description is shown.
    plain = {
        (trial.figures, trial.rate): trial
        for trial in sorted(best.values(), key=lambda each: -len(each.setting.describe()))
    }
    ranked = sorted(plain.values(), key=_rank, reverse=True)
    rows = [_tried_row(answer, trial) for trial in ranked[:_MAX_ROWS]]
    header = ["setting", "", "requests/s", "tokens/s", "TTFT p99", "TPOT p99", "E2EL p99", "preempted", "targets met"]
    return Table(
        header,
        rows,
        caption=f"The best {len(rows)} of {len({trial.setting for trial in trials}):,} settings;"
        f" {len(_shown(answer)):,} runs in all; ~ is simulated",
    )


def _tried_row(answer: TuneAnswer, trial: Trial) -> list[str]:
    figures = trial.figures
    mark = "~" if trial.round is None else ""
    tpot = "-" if trial.setting.batching == "static" else mark + _duration(figures.tpot_p99)
    return [
        trial.setting.describe(),
        "simulated" if trial.round is None else "measured",
        answer.findings.traffic.crowd if trial.rate is None else f"{trial.rate:.3g}",
        f"{mark}{figures.output_tokens_per_second:,.0f}",
        mark + _duration(figures.ttft_p99),
        tpot,
        mark + _duration(figures.e2el_p99),
        f"{mark}{figures.preemption_rate:.1%}",
        "-" if figures.goodput is None else f"{mark}{figures.goodput:.1%}",
    ]


def _rank(trial: Trial) -> tuple[bool, float]:
    return (not shortfall(trial.figures), trial.figures.output_tokens_per_second)


def _trust(answer: TuneAnswer) -> Iterator[Block]:
    findings = answer.findings
    machine = answer.machine
    traffic = findings.traffic
    pace = traffic.crowd if traffic.rate is None else f"{traffic.rate:.3g} requests per second"
    facts = {
        "Traffic": answer.what,
        "Requests": f"{len(traffic.requests):,}, {pace}",
        "Tokens": f"{sum(each.prompt_tokens for each in traffic.requests):,} of prompts,"
        f" {sum(each.output_tokens for each in traffic.requests):,} of answers",
        "Targets": ", ".join(f"{name} {ms:g}" for name, ms in traffic.slo.items()) or "none given",
        "Model": answer.model,
        "Machine": f"{machine.cpu}, {machine.processors} processors, {machine.system}",
        "Load of other programs": f"{machine.busy:.0%} at the start. "
        + disturbance([trial.busy for trial in answer.state if trial.round is not None]),
        "Simulator": _simulator(answer),
        "Command": answer.command,
    }
    yield Facts(facts)
    if findings.accuracy:
        rows = [[findings.settings[role].describe(), f"{ratio:.2f}"] for role, ratio in findings.accuracy.items()]
        yield Table(
            ["setting", "simulated / measured throughput"], rows, caption="The simulator against the real engine"
        )
    for note in findings.notes:
        yield Text(note)
    yield Text(
        "Prompts were random tokens of the lengths of the traffic, and answers had exactly its lengths. HTTP and"
        " tokenizing were not part of it; chairlift bench serve measures a server with both. The results hold for this"
        " model, this machine and traffic like this. Tune again when one of them changes."
    )


def _simulator(answer: TuneAnswer) -> str:
    """Text about the accuracy of the simulator's cost model."""
    deployment = answer.state.deployment
    error = answer.findings.fit_error
    words = deployment.validity if deployment is not None else "not fitted"
    words += "" if error is None else f"; on this traffic half of the steps are within {error:.0%}"
    return words + ("" if answer.findings.trusted else ", so it was not used")


# --- files -----------------------------------------------------------------------------------------------------------


def config_lines(answer: TuneAnswer) -> list[str]:
    """Lines of chairlift.yaml: the chosen settings as YAML, with the reasons as comments."""
    findings = answer.findings
    setting = answer.findings.settings["chosen"]
    chosen = _column(answer, "chosen", setting)
    given = set(answer.fixed)
    reasons = {
        "max_num_seqs": f"slots: {_preempted(answer, chosen)}",
        "max_num_batched_tokens": "tokens of a step: lower keeps decoding smooth, higher speeds up prompts",
        "admission_watermark": "fraction of the KV cache that stays free when a request joins"
        if findings.tight
        else "share of the KV cache kept free; memory is plentiful here, so it does not matter",
        "prefill_mode": "how prompts and decodes share steps",
        "preemption_mode": "how requests are preempted" + ("" if findings.tight else "; no run needed it"),
        "cache_eviction": "which cached block is evicted next"
        + ("" if findings.traffic.has_sessions else "; searched for chats only"),
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
        if name == "speculative_config" and not setting.drafts:
            with_drafts = times(findings.ratios["drafts"]) if findings.ratios else "less"
            lines.append(f'{name}: ""  # given, and off: drafts get {with_drafts} the throughput')
        elif name not in reasons:
            lines.append(f"{name}: {json.dumps(value)}  # given")
    for name, reason in reasons.items():
        why = "given" if name in given else reason
        lines.append(f"{name}: {json.dumps(getattr(setting, name))}  # {why}")
    return lines
