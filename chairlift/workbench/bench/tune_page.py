"""What a tuning found out, as one HTML page to show to others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from chairlift.workbench.bench import plots
from chairlift.workbench.bench.html_page import Block, Facts, Section, Table, Text, page
from chairlift.workbench.bench.tune_report import Answer, Column, columns, comparison, duration, round_words, verdict
from chairlift.workbench.bench.tune_search import PREEMPTED, shortfall
from chairlift.workbench.bench.tune_state import Trial

__all__ = ["tune_page"]

_MOST_ROWS: Final = 30
_DEAR: Final = 3.0
_ALL: Final = """\
All at once means that every request is there from the start, so that the machine always has work: it shows how much
gets through. """
_USERS: Final = "Each user waits for an answer before the next request is sent: a slow server is asked less often. "
_ABOUT: Final = """\
Times of requests are read at the pace of the traffic where it has one. Where it has none, everybody waits
for everybody, and times say little more than throughput does.

Time to first token counts from when a request is sent. Time per token is the mean over the rest of its answer. p99
means that 99 of 100 requests were faster.

Static batches start together and end together: what most simple servers do. The best size for them was looked for too,
so that neither side is at a disadvantage."""


def tune_page(answer: Answer) -> str:
    """The whole document."""
    sides = columns(answer)
    sections = [
        Section("Side by side", list(_side_by_side(answer, sides))),
        Section("Cost against latency", list(_cost(answer, sides))),
        Section("Slots and preemption", list(_preemption(answer))),
        Section("What was tried", [_tried(answer)]),
        Section("How far to trust this", list(_trust(answer))),
    ]
    return page("What batching does for your traffic", verdict(answer), sections)


def _side_by_side(answer: Answer, sides: Sequence[Column]) -> Iterator[Block]:
    header, rows = comparison(answer, sides)
    yield Table(
        header, rows, caption="The number of slots (max_num_seqs) is in brackets; ~ is simulated. Times are p50 / p99."
    )
    names = [side.title for side in sides]
    yield plots.bars(
        names,
        {"output tokens per second": [side.full.output_tokens_per_second for side in sides]},
        title=f"Throughput, {answer.findings.traffic.crowd}",
        y_label="output tokens per second",
    )
    waits = [side.waits for side in sides]
    yield plots.bars(
        names,
        {"p50": [each.e2el_p50 for each in waits], "p99": [each.e2el_p99 for each in waits]},
        title=f"Whole request, {_pace(answer)}",
        y_label="seconds",
    )
    samples = {side.title: side.latencies for side in sides if side.latencies and side.role != "equal"}
    if samples:
        yield plots.cdf(samples, title=f"How long requests take, {_pace(answer)}", x_label="seconds, whole request")
    ratios = answer.findings.ratios
    if ratios:
        names_of = {
            "static_best": "chosen / best static",
            "default": "chosen / defaults",
            "equal": "continuous / static, as many slots",
        }
        yield Table(
            ["throughput", "ratio", "95 % interval"],
            [
                [label, f"{ratio.mean:.2f}", f"{ratio.low:.2f} to {ratio.high:.2f}" if ratio.rounds > 1 else "-"]
                for label, ratio in ((label, ratios[name]) for name, label in names_of.items())
            ],
            caption=f"Real runs side by side, {round_words(answer.findings.rounds)}",
        )
    about = (_ALL if answer.findings.traffic.users is None else _USERS) + _ABOUT
    yield Text("\n\n".join(" ".join(part.split()) for part in about.split("\n\n")))


def _pace(answer: Answer) -> str:
    pace = answer.findings.pace
    return answer.findings.traffic.crowd if pace is None else f"at {pace:.3g} requests per second"


def _cost(answer: Answer, sides: Sequence[Column]) -> Iterator[Block]:
    by_rate = answer.findings.by_rate
    tried = [trial for trial in answer.state if (trial.rate is not None) == by_rate and trial.figures.requests]
    points: dict[str, list[tuple[float, float, str]]] = {"simulated": [], "measured": []}
    for trial in tried:
        points["simulated" if trial.round is None else "measured"].append(_point(answer, trial))
    if by_rate:
        kept = [_point(answer, trial) for trial in tried if trial.round is None and _kept(trial)]
        points = {"breaks promises": points["simulated"], "keeps promises": kept, "measured": points["measured"]}
        dearest = max((cost for _, cost, _ in kept + points["measured"]), default=math.inf)
        points["breaks promises"] = [
            point for point in points["breaks promises"] if point not in set(kept) and point[1] <= _DEAR * dearest
        ]
    best = _front([point for name, series in points.items() for point in series if name != "breaks promises"])
    yield plots.scatter(
        {**points, "best for its latency": best},
        title=f"Cost of a million output tokens, at {answer.price:g} per hour",
        x_label="whole request, p99, seconds" if by_rate else "time per output token, p99, milliseconds",
        y_label="cost",
        connect={"best for its latency"},
        hollow={"simulated", "breaks promises", "keeps promises"},
    )
    yield Text(
        "Each outline is a setting in the simulator, each filled point a real run. Further left answers sooner, further"
        " down costs less; nothing that was tried lies to the left of and below the line."
        + (" Each point is at a rate of arrivals of its own. Dear ones that break promises are left out." * by_rate)
    )
    if any(side.cost(answer.price) for side in sides):
        yield plots.bars(
            [side.title for side in sides],
            {"cost": [side.cost(answer.price) or float("nan") for side in sides]},
            title="Cost side by side, at the highest rate that keeps promises" if by_rate else "Cost side by side",
            y_label="cost",
        )


def _point(answer: Answer, trial: Trial) -> tuple[float, float, str]:
    figures = trial.figures
    cost = answer.price / 3600 / figures.output_tokens_per_second * 1e6
    return (figures.tpot_p99 * 1000 if trial.rate is None else figures.e2el_p99, cost, "")


def _kept(trial: Trial) -> bool:
    return not shortfall(trial.figures)


def _front(points: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Points that no other beats in both (Pareto), by latency."""
    front: list[tuple[float, float, str]] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def _preemption(answer: Answer) -> Iterator[Block]:
    findings, chosen = answer.findings, answer.findings.settings["chosen"]
    rows, preempted, throughput = [], [], []
    for slots, figures in findings.by_slots:
        rows.append(float(slots))
        preempted.append(100 * figures.preemption_rate)
        throughput.append(figures.output_tokens_per_second)
    if findings.tight:
        limit = ([rows[0], rows[-1]], [100 * PREEMPTED] * 2) if rows else ([], [])
        yield plots.lines(
            {"preempted": (rows, preempted), "limit": limit},
            title=f"Preempted requests, {findings.traffic.crowd}",
            x_label="max_num_seqs",
            y_label="%",
        )
    yield plots.lines(
        {"output tokens per second": (rows, throughput)},
        title=f"Throughput, {findings.traffic.crowd}",
        x_label="max_num_seqs",
        y_label="output tokens per second",
    )
    yield Text(
        f"Simulated, with everything else as chosen; {chosen.max_num_seqs} slots were chosen. "
        + (
            "A preempted request gives its memory to others and is computed again, or waits in host memory. Above the"
            " limit, work is done twice."
            if findings.tight
            else "Nothing was preempted with any number of slots: there is memory for all of them, and how much of it"
            " is kept free does not matter."
        )
    )


def _tried(answer: Answer) -> Block:
    by_rate = answer.findings.by_rate
    trials = [trial for trial in answer.state if (trial.rate is not None) == by_rate and trial.figures.requests]
    best: dict[tuple[object, bool], Trial] = {}
    for trial in trials:  # of each setting the best simulation and the best real run
        key = (trial.setting, trial.round is None)
        if key not in best or _rank(trial) > _rank(best[key]):
            best[key] = trial
    # Where a setting makes no difference, the one that says least of it stands for all.
    plain = {(trial.figures, trial.rate): trial for trial in sorted(best.values(), key=_words, reverse=True)}
    ranked = sorted(plain.values(), key=_rank, reverse=True)
    rows = []
    for trial in ranked[:_MOST_ROWS]:
        figures = trial.figures
        rows.append(
            [
                trial.setting.describe(),
                "simulated" if trial.round is None else "measured",
                answer.findings.traffic.crowd if trial.rate is None else f"{trial.rate:.3g}",
                f"{figures.output_tokens_per_second:,.0f}",
                duration(figures.ttft_p99),
                duration(figures.tpot_p99),
                duration(figures.e2el_p99),
                f"{figures.preemption_rate:.1%}",
                "-" if figures.goodput is None else f"{figures.goodput:.1%}",
            ]
        )
    header = ["setting", "", "requests/s", "tokens/s", "TTFT p99", "TPOT p99", "E2EL p99", "preempted", "kept"]
    return Table(
        header,
        rows,
        caption=f"The best {len(rows)} of {len({trial.setting for trial in trials}):,} settings;"
        f" {len(answer.state.trials):,} runs in all",
    )


def _words(trial: Trial) -> int:
    return len(trial.setting.describe())


def _rank(trial: Trial) -> tuple[bool, float]:
    return (_kept(trial), trial.figures.output_tokens_per_second)


def _trust(answer: Answer) -> Iterator[Block]:
    findings, machine = answer.findings, answer.machine
    traffic = findings.traffic
    pace = traffic.crowd if traffic.rate is None else f"{traffic.rate:.3g} requests per second"
    deployment = answer.state.deployment
    facts = {
        "Traffic": answer.what,
        "Requests": f"{len(traffic.requests):,}, {pace}",
        "Tokens": f"{sum(each.prompt_tokens for each in traffic.requests):,} of prompts,"
        f" {sum(each.output_tokens for each in traffic.requests):,} of answers",
        "Promises": ", ".join(f"{name} {ms:g}" for name, ms in traffic.slo.items()) or "none given",
        "Model": answer.model,
        "Machine": f"{machine.cpu}, {machine.processors} processors, {machine.system}",
        "Busy with others": f"{machine.busy:.0%} at the start",
        "Simulator": deployment.validity if deployment is not None else "not fitted",
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
        " tokenizing were not part of it; chairlift bench serve measures a server with both. The figures hold for this"
        " model, this machine and traffic like this. Tune again when one of them changes."
    )
