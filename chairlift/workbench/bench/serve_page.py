"""Runs as a page: latency CDFs, throughput over time, speed per user against the total."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from chairlift.workbench.bench import plots
from chairlift.workbench.bench.html_page import Block, Facts, Section, Table, Text, page
from chairlift.workbench.bench.serve_report import COMPARED, LABELS, sweep_rows, times_rows
from chairlift.workbench.bench.serve_result import Figures, Ratio, latencies, tokens_per_second
from chairlift.workbench.bench.serve_run import ServeRun

__all__ = ["serve_page"]

Results = Mapping[str, Sequence[tuple[ServeRun, Figures]]]
"""Runs by what tells them from the others: a rate, or a server, which has one for each round."""


def serve_page(
    results: Results, facts: Mapping[str, str], ratios: Mapping[str, Ratio], compared: Sequence[Sequence[str]]
) -> str:
    """The whole page. ``ratios``, and ``compared``, a header and rows made of them: of two servers side by side."""
    runs = [pair for pairs in results.values() for pair in pairs]
    sections = []
    if compared:
        sections.append(Section("Side by side", [Table(compared[0], compared[1:]), Text(COMPARED)]))
    else:
        table = sweep_rows([(label, pairs[0][1]) for label, pairs in results.items()])
        sections.append(Section("Throughput", [Table(table[0], table[1:], "rates per second, times in ms")]))
    if len(runs) > 1:
        sections.append(Section("Speed for each user, and in total", [_trade(results)]))
    sections.append(Section("Latency", list(_latency(results))))
    sections.append(Section("Over time", list(_over_time(results))))
    doubts = dict.fromkeys(doubt for run, figures in runs for doubt in figures.doubts(run))
    if doubts:
        sections.append(Section("What to know before believing it", [Text("\n\n".join(doubts))]))
    errors = [[kind, f"{count:,}", text] for _, figures in runs for kind, count, text in figures.errors]
    if errors:
        sections.append(Section("Failed requests", [Table(["kind", "requests", "one of the messages"], errors)]))
    sections.append(Section("Settings", [Facts(facts)]))
    lead = _compared_lead(ratios) if compared else _lead(results)
    return page(f"Serving {runs[0][0].server.model}", lead, sections)


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


def _compared_lead(ratios: Mapping[str, Ratio]) -> str:
    parts = []
    for key, words in (("output_throughput", "output tokens/s"), ("p50_ttft_ms", "TTFT"), ("p50_tpot_ms", "TPOT")):
        ratio = ratios.get(key)
        if ratio is not None:
            between = "" if ratio.low is None else f" ({ratio.low:.2f} to {ratio.high:.2f})"
            parts.append(f"{'median ' * key.startswith('p50')}{words} {ratio.ratio:.2f}{between}")
    return f"B over A: {', '.join(parts)}." if parts else "There is nothing to compare: a side answered no request."


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
            header, *rows = times_rows(figures)
            yield Table(header, rows, label if len(results) > 1 else "")


def _over_time(results: Results) -> Iterator[Block]:
    tokens, requests = {}, {}
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
    """Points are rates, or rounds of a server."""
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
