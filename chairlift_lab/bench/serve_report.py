"""Output of ``bench serve``: a JSON record with vLLM's keys, text for the terminal, and an HTML page.

The page has charts of the latency distributions, of the throughput over time, and of the speed that each user sees
against the total throughput.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from chairlift_lab.bench import plots
from chairlift_lab.bench.report import Block, Facts, Report, Section, Table, Text
from chairlift_lab.bench.serve_result import Figures, Stats, latencies, tokens_per_second
from chairlift_lab.bench.serve_run import ServeRun
from chairlift_lab.bench.verdict import LEVEL, MIN_ROUNDS, MIN_SECONDS, Ratio, disturbance

__all__ = ["COMPARED", "compared_table", "compared_words", "run_blocks", "serve_record", "serve_report", "sweep_table"]

LABELS: Final = {
    "ttft": "time to first token (TTFT)",
    "tpot": "time per output token (TPOT)",
    "itl": "between tokens (ITL)",
    "e2el": "whole request (E2EL)",
    "queueing": "until it begins",
    "server_queue": "in the queue, reported by the server",
}
"""Name of a measured time -> description for reports."""
_COMPARED_LABELS: Final = {
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "total_token_throughput": "tokens/s",
    "request_goodput": "goodput, requests/s",
}
COMPARED: Final = (
    f"A and B are medians over the rounds. B / A is the median of the ratio in each round. The {LEVEL:.0%} interval "
    "is that of the median, whatever the noise looks like. If it does not contain 1, the difference is unlikely to be "
    f"chance. An interval needs {MIN_ROUNDS} rounds of at least {MIN_SECONDS:g} s; with fewer, nothing is claimed."
)
"""Text under the table of :func:`compared_table`, which explains how the ratios and intervals are computed."""
_STATS: Final = ("mean", "std", "p50", "p90", "p99")


def serve_record(run: ServeRun, figures: Figures, settings: Mapping[str, Any]) -> dict[str, Any]:
    """JSON record of one run.

    The keys are those of the file that ``vllm bench serve --save-result --save-detailed`` writes, without the texts.
    Lists have one entry per request; a failed request has 0 or an empty list. ``settings``, and values without a key in
    vLLM, are stored under ``chairlift``. ``settings`` must include ``request_rate`` and ``burstiness``.
    """
    record: dict[str, Any] = {
        "date": run.date.strftime("%Y%m%d-%H%M%S"),
        "backend": run.server.backend,
        "label": settings.get("label"),
        "model_id": run.server.model,
        "tokenizer_id": run.server.model,
        "num_prompts": len(run.load.requests),
        "request_rate": settings["request_rate"],
        "burstiness": settings["burstiness"],
        "max_concurrency": run.load.max_concurrency,
        "duration": run.seconds,
        "completed": figures.completed,
        "failed": figures.failed,
        "total_input_tokens": figures.input_tokens,
        "total_output_tokens": figures.output_tokens,
        "request_throughput": figures.request_throughput,
        "request_goodput": figures.goodput,
        "output_throughput": figures.output_throughput,
        "total_token_throughput": figures.total_token_throughput,
        "max_output_tokens_per_s": figures.max_output_tokens_per_s,
        "max_concurrent_requests": figures.max_concurrent_requests,
    }
    for name in ("ttft", "tpot", "itl", "e2el"):
        record |= _spelled(name, figures.times[name])
    done = [each.status == "completed" for each in run.outcomes]
    pairs = list(zip(run.outcomes, done, strict=True))
    return record | {
        "input_lens": [each.prompt_tokens for each in run.outcomes],
        "output_lens": [each.output_tokens if ok else 0 for each, ok in pairs],
        "ttfts": [round(each.ttft, 6) if ok else 0.0 for each, ok in pairs],
        "itls": [[round(gap, 6) for gap in each.itls] if ok else [] for each, ok in pairs],
        "start_times": [round(each.start - run.begin, 6) if each.start else 0.0 for each in run.outcomes],
        "errors": ["" if ok else f"{each.kind or each.status}: {each.message}".strip(": ") for each, ok in pairs],
        "chairlift": dict(settings) | _own(run, figures),
    }


def _own(run: ServeRun, figures: Figures) -> dict[str, Any]:
    return {
        "url": run.server.url,
        "owned_by": run.server.owner,
        "dialect": dataclasses.asdict(run.server.dialect),
        "loop": "open" if run.load.max_concurrency is None else "closed",
        "cancelled": figures.cancelled,
        "unfinished": figures.unfinished,
        "interrupted": run.interrupted,
        "good_requests": figures.good if figures.goodput is not None else None,
        "shorter_answers": figures.shorter,
        "cached_tokens": figures.cached_tokens,
        "preemption_rate": figures.preemption_rate,
        "itl_between": "tokens" if figures.counted else "events",
        "errors_by_kind": [{"kind": kind, "count": count, "example": text} for kind, count, text in figures.errors],
        **_spelled("queueing", figures.times["queueing"]),
        **_spelled("server_queue", figures.times["server_queue"]),
        "client": {**_spelled("lateness", figures.lateness), "cpu_share": run.cpu_share},
        "busy": run.busy,
        "collective_share": run.collective_share,
        "doubts": list(figures.doubts(run)),
        "e2els": [round(each.e2el, 6) if each.status == "completed" else 0.0 for each in run.outcomes],
    }


def _spelled(name: str, stats: Stats | None) -> dict[str, float | None]:
    fields = [field.name for field in dataclasses.fields(Stats)]
    return {f"{field}_{name}_ms": None if stats is None else getattr(stats, field) for field in fields}


# --- text for the terminal -------------------------------------------------------------------------------------------


def run_blocks(run: ServeRun, figures: Figures, slo: Mapping[str, float]) -> Iterator[Text | Facts | Table]:
    """Report of one run: facts, a table of times, failures and warnings. ``slo``: limits in ms by name."""
    yield Facts(dict(_run_facts(figures, slo)))
    if figures.completed:
        yield times_table(figures)
    if figures.errors:
        yield Facts({"failed": "\n".join(f"{count:,} x {kind}: {text}" for kind, count, text in figures.errors)})
    if doubts := list(figures.doubts(run)):
        yield Text("\n".join(f"note: {doubt}" for doubt in doubts))


def _run_facts(figures: Figures, slo: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    failed = f"{figures.failed:,} failed" + (f", {figures.cancelled:,} cancelled" if figures.cancelled else "")
    yield "requests", f"{figures.completed:,} completed, {failed}, in {figures.seconds:.2f} s"
    cached = ""
    if figures.cached_tokens is not None and figures.input_tokens:
        cached = f" ({figures.cached_tokens / figures.input_tokens:.0%} from the prefix cache)"
    yield "tokens", f"{figures.input_tokens:,} of prompts{cached}, {figures.output_tokens:,} of answers"
    yield (
        "throughput",
        f"{figures.request_throughput:.2f} requests/s, {figures.output_throughput:,.1f} output tokens/s,"
        f" with prompts {figures.total_token_throughput:,.1f}",
    )
    if figures.goodput is not None:
        sent = figures.completed + figures.failed
        limits = ", ".join(f"{name.upper()} {limit:g} ms" for name, limit in slo.items())
        share = f"{figures.good / sent:.1%} of the requests" if sent else "no request"
        yield "goodput", f"{figures.goodput:.2f} requests/s: {share} met {limits}"
    requests = figures.max_concurrent_requests
    tokens = figures.max_output_tokens_per_s
    yield "at its peak", f"{requests:,} concurrent requests, {tokens:,.0f} output tokens in one second"
    if figures.preemption_rate is not None:
        yield "preempted", f"{figures.preemption_rate:.1%} of the requests"
    if figures.collective_share is not None:
        yield "processes", f"waited for each other for {figures.collective_share:.1%} of the time of the last steps"
    if figures.cpu_share is not None:
        late = "" if figures.lateness is None else f", {figures.lateness.p99:.1f} ms late at the 99th percentile"
        yield "client", f"{figures.cpu_share:.0%} of a processor{late}"


def times_table(figures: Figures, caption: str = "") -> Table:
    """Table with one row for each measured time, in ms."""
    rows = []
    for name, label in LABELS.items():
        stats = figures.times[name]
        if stats is None and name in ("tpot", "itl") and figures.whole:
            rows.append([label, *["-"] * len(_STATS)])
        if stats is not None:
            between = "between events (ITL, as vLLM's)" if name == "itl" and not figures.counted else label
            rows.append([between, *(f"{getattr(stats, stat):,.1f}" for stat in _STATS)])
    return Table(["ms", *_STATS], rows, caption)


def sweep_table(runs: Iterable[tuple[str, Figures]]) -> Table:
    """Table with one row for each request rate. ``runs`` has one entry per rate: (label of the rate, results of the
    run)."""
    times = ("TTFT p50", "p99", "TPOT p50", "p99")
    header = ["rate", "requests/s", "output tokens/s", "goodput", *times, "preempted", "failed"]
    rows = []
    for label, figures in runs:
        row = [label, f"{figures.request_throughput:.2f}", f"{figures.output_throughput:,.1f}"]
        row.append("" if figures.goodput is None else f"{figures.goodput:.2f}")
        for stats in (figures.times["ttft"], figures.times["tpot"]):
            row += ["-", "-"] if stats is None else [f"{stats.p50:,.1f}", f"{stats.p99:,.1f}"]
        row.append("" if figures.preemption_rate is None else f"{figures.preemption_rate:.1%}")
        rows.append([*row, f"{figures.failed:,}"])
    return Table(header, rows, "rates per second, times in ms")


def compared_table(
    ratios: Mapping[str, Ratio], first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]
) -> Table:
    """Table with one row for each compared value: the median of each server over the rounds, their ratio, and its
    spread.

    ``first`` and ``second`` are the records of the two servers, one per round.
    """
    rows = []
    for key, ratio in ratios.items():
        medians = [statistics.median(record[key] for record in records) for records in (first, second)]
        between = "-" if ratio.doubt else f"{ratio.low:.3f} to {ratio.high:.3f}"
        rows.append(
            [
                _COMPARED_LABELS.get(key) or _time_label(key),
                *(f"{median:,.2f}" for median in medians),
                f"{ratio.ratio:.3f}",
                between,
                f"{min(ratio.per_round):.3f}",
                f"{max(ratio.per_round):.3f}",
            ]
        )
    return Table(["", "A", "B", "B / A", "95 % interval", "rounds from", "to"], rows, f"B over A, {len(first)} rounds")


def compared_words(ratios: Mapping[str, Ratio], busy: Sequence[float]) -> str:
    """Verdict of a comparison: what may be claimed about throughput and latencies, and the load of other programs.
    ``busy`` has its share of the machine for each run."""
    names = (("output_throughput", "throughput"), ("p50_ttft_ms", "median TTFT"), ("p50_tpot_ms", "median TPOT"))
    sentences = [ratios[key].sentence("B", name, "A") for key, name in names if key in ratios]
    if not sentences:
        return "There is nothing to compare: a side answered no request."
    return " ".join([*sentences, disturbance(busy)])


def _busy(record: Mapping[str, Any]) -> list[float]:
    return [run["chairlift"]["busy"] for runs in record["runs"].values() for run in runs]


def _time_label(key: str) -> str:
    stat, name, _ = key.split("_")
    return f"{name.upper()} {stat}, ms"


# --- the page ---------------------------------------------------------------------------------------------------------

Results = Mapping[str, Sequence[tuple[ServeRun, Figures]]]
"""Label of a request rate or of a server -> its runs. A server that is compared has one run per round."""


def serve_report(
    record: Mapping[str, Any],
    results: Results,
    facts: Mapping[str, str],
    ratios: Mapping[str, Ratio],
    compared: Table | None,
) -> Report:
    """Report of all runs. ``ratios`` and their table ``compared`` are given only when two servers were compared."""
    (run, _), *_ = next(iter(results.values()))
    lead = _lead(results) if compared is None else compared_words(ratios, _busy(record))
    return Report(record, f"Serving {run.server.model}", lead, _sections(results, facts, compared))


def _sections(results: Results, facts: Mapping[str, str], compared: Table | None) -> Iterator[Section]:
    runs = [pair for pairs in results.values() for pair in pairs]
    if compared is not None:
        yield Section("Side by side", [dataclasses.replace(compared, caption=""), Text(COMPARED)])
    else:
        yield Section("Throughput", [sweep_table((label, pairs[0][1]) for label, pairs in results.items())])
    if len(runs) > 1:
        yield Section("Speed for each user, and in total", [_trade(results)])
    yield Section("Latency", _latency(results))
    yield Section("Over time", _over_time(results))
    if doubts := dict.fromkeys(doubt for run, figures in runs for doubt in figures.doubts(run)):
        yield Section("Warnings", [Text("\n\n".join(doubts))])
    if errors := [[kind, f"{count:,}", text] for _, figures in runs for kind, count, text in figures.errors]:
        yield Section("Failed requests", [Table(["kind", "requests", "one of the messages"], errors)])
    yield Section("Settings", [Facts(facts)])


def _lead(results: Results) -> str:
    pairs = [(label, figures) for label, ((_, figures), *_) in results.items()]
    sentences = []
    for label, figures in pairs if len(pairs) < 3 else (pairs[0], pairs[-1]):
        ttft = figures.times["ttft"]
        if ttft is None:
            continue
        sentences.append(
            ("" if len(results) == 1 else f"At {label}: ")
            + f"{figures.request_throughput:.2f} requests and {figures.output_throughput:,.0f} output tokens per second"
            f". Half of the requests had their first token within {ttft.p50:,.0f} ms, 99 % within {ttft.p99:,.0f} ms."
        )
    return "\n\n".join(sentences) or "No request was answered."


def _latency(results: Results) -> Iterator[Block]:
    samples = {
        label: {name: [value * 1000 for run, _ in pairs for value in latencies(run)[name]] for name in LABELS}
        for label, pairs in results.items()
    }
    for name in ("ttft", "tpot", "itl", "e2el"):
        series = {label: values[name] for label, values in samples.items() if values[name]}
        if series:
            title = LABELS[name][0].upper() + LABELS[name][1:]
            yield plots.cdf(series, title=title, x_label="ms")
    for label, ((_, figures), *others) in results.items():
        if figures.completed and not others:
            yield times_table(figures, label if len(results) > 1 else "")


def _over_time(results: Results) -> Iterator[Block]:
    tokens = {}
    requests = {}
    for label, pairs in results.items():
        run = pairs[0][0]
        bins = tokens_per_second(run)
        seconds = [float(second) for second in range(len(bins))]
        ends = [each.end - run.begin for each in run.outcomes if each.status == "completed"]
        tokens[label] = (seconds, [float(count) for count in bins])
        requests[label] = (seconds, np.bincount(np.asarray(ends, int), minlength=len(bins)).astype(float).tolist())
    x_label = "seconds since the first request"
    yield plots.lines(tokens, title="Output tokens per second", x_label=x_label, y_label="tokens/s", step=True)
    yield plots.lines(requests, title="Requests answered per second", x_label=x_label, y_label="requests/s", step=True)


def _trade(results: Results) -> plots.Figure:
    """Scatter chart of the speed for each user against the total throughput. A point is one request rate or, when
    servers are compared, one run of a server."""
    points: dict[str, list[tuple[float, float, str]]] = {}
    rounds = any(len(pairs) > 1 for pairs in results.values())
    for label, pairs in results.items():
        for number, (_, figures) in enumerate(pairs, 1):
            tpot = figures.times["tpot"]
            if tpot is not None and tpot.mean > 0:
                point = (1000 / tpot.mean, figures.output_throughput, f"round {number}" if rounds else label)
                points.setdefault(label if rounds else "rates", []).append(point)
    return plots.scatter(
        points,
        title="Up and to the right is better",
        x_label="tokens/s that each user sees (1 / mean TPOT)",
        y_label="output tokens/s in total",
        connect=not rounds,
    )
