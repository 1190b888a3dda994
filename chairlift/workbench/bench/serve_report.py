"""Runs as JSON with vLLM's keys, and as lines for a terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from chairlift.workbench.bench.serve_result import Figures, Ratio, Stats
from chairlift.workbench.bench.serve_run import ServeRun

__all__ = ["COMPARED", "LABELS", "aligned", "compared_rows", "run_lines", "serve_record", "sweep_rows", "times_rows"]

LABELS: Final = {
    "ttft": "time to first token (TTFT)",
    "tpot": "time per output token (TPOT)",
    "itl": "between tokens (ITL)",
    "e2el": "whole request (E2EL)",
    "queueing": "until it begins",
    "server_queue": "in the queue, as the server says",
}
"""What the times are, in words."""
_COMPARED_LABELS: Final = {
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "total_token_throughput": "tokens/s",
    "request_goodput": "goodput, requests/s",
}
COMPARED: Final = (
    "A and B are means over the rounds. B / A is the geometric mean of the ratio in each round. The 95 % interval "
    "comes from drawing rounds again and again with replacement (bootstrap); where it does not contain 1, the "
    "difference is unlikely to be chance. With fewer than five rounds it is hardly more than the smallest and "
    "the largest ratio."
)
"""How to read :func:`compared_rows`."""
_STATS: Final = ("mean", "std", "p50", "p90", "p99")


def serve_record(run: ServeRun, figures: Figures, settings: Mapping[str, Any]) -> dict[str, Any]:
    """One run as plain data.

    The keys are those of the file that ``vllm bench serve --save-result --save-detailed`` writes, without the texts.
    Lists have an entry per request, which is 0 for what a failed one has not. What vLLM has no key for is under
    ``chairlift``, with ``settings``: ``request_rate`` and ``burstiness`` must be among them.
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
        "itl_between": "tokens" if figures.counted else "chunks",
        "errors_by_kind": [{"kind": kind, "count": count, "example": text} for kind, count, text in figures.errors],
        **_spelled("queueing", figures.times["queueing"]),
        **_spelled("server_queue", figures.times["server_queue"]),
        "client": {**_spelled("lateness", figures.lateness), "cpu_share": run.cpu_share},
        "doubts": list(figures.doubts(run)),
        "e2els": [round(each.e2el, 6) if each.status == "completed" else 0.0 for each in run.outcomes],
    }


def _spelled(name: str, stats: Stats | None) -> dict[str, float | None]:
    fields = [field.name for field in dataclasses.fields(Stats)]
    return {f"{field}_{name}_ms": None if stats is None else getattr(stats, field) for field in fields}


# --- for people ------------------------------------------------------------------------------------------------------


def run_lines(run: ServeRun, figures: Figures, slo: Mapping[str, float]) -> Iterator[str]:
    """A run in words and a table."""
    failed = f"{figures.failed:,} failed" + (f", {figures.cancelled:,} cancelled" if figures.cancelled else "")
    yield f"requests       {figures.completed:,} completed, {failed}, in {figures.seconds:.2f} s"
    cached = ""
    if figures.cached_tokens is not None and figures.input_tokens:
        cached = f" ({figures.cached_tokens / figures.input_tokens:.0%} from the prefix cache)"
    yield f"tokens         {figures.input_tokens:,} of prompts{cached}, {figures.output_tokens:,} of answers"
    yield (
        f"throughput     {figures.request_throughput:.2f} requests/s, {figures.output_throughput:,.1f} output tokens/s,"
        f" with prompts {figures.total_token_throughput:,.1f}"
    )
    if figures.goodput is not None:
        sent = figures.completed + figures.failed
        limits = ", ".join(f"{name.upper()} {limit:g} ms" for name, limit in slo.items())
        share = f"{figures.good / sent:.1%} of the requests" if sent else "no request"
        yield f"goodput        {figures.goodput:.2f} requests/s: {share} kept {limits}"
    yield (
        f"at its peak    {figures.max_concurrent_requests:,} requests at once, "
        f"{figures.max_output_tokens_per_s:,.0f} output tokens in one second"
    )
    if figures.preemption_rate is not None:
        yield f"preempted      {figures.preemption_rate:.1%} of the requests"
    if figures.cpu_share is not None:
        late = "" if figures.lateness is None else f", {figures.lateness.p99:.1f} ms late at the 99th percentile"
        yield f"client         {figures.cpu_share:.0%} of a processor{late}"
    if figures.completed:
        yield ""
        yield from aligned(times_rows(figures))
    if figures.errors:
        yield ""
        yield from (f"failed         {count:,} x {kind}: {message}" for kind, count, message in figures.errors)
    doubts = list(figures.doubts(run))
    if doubts:
        yield ""
        yield from (f"note: {doubt}" for doubt in doubts)


def times_rows(figures: Figures) -> list[list[str]]:
    """A header, and a row for each time that was measured, in ms."""
    table = [["ms", *_STATS]]
    for name, label in LABELS.items():
        stats = figures.times[name]
        if stats is not None:
            between = "between chunks" if name == "itl" and not figures.counted else label
            table.append([between, *(f"{getattr(stats, stat):,.1f}" for stat in _STATS)])
    return table


def sweep_rows(runs: Sequence[tuple[str, Figures]]) -> list[list[str]]:
    """A header, and a row for each rate."""
    times = ("TTFT p50", "p99", "TPOT p50", "p99")
    table = [["rate", "requests/s", "output tokens/s", "goodput", *times, "preempted", "failed"]]
    for label, figures in runs:
        row = [label, f"{figures.request_throughput:.2f}", f"{figures.output_throughput:,.1f}"]
        row.append("" if figures.goodput is None else f"{figures.goodput:.2f}")
        for stats in (figures.times["ttft"], figures.times["tpot"]):
            row += ["", ""] if stats is None else [f"{stats.p50:,.1f}", f"{stats.p99:,.1f}"]
        row.append("" if figures.preemption_rate is None else f"{figures.preemption_rate:.1%}")
        table.append([*row, f"{figures.failed:,}"])
    return table


def compared_rows(
    ratios: Mapping[str, Ratio], first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
    """A header, and a row for each figure: the mean of each server over the rounds, ratio, interval and spread."""
    table = [["", "A", "B", "B / A", "95 % interval", "rounds from", "to"]]
    for key, ratio in ratios.items():
        means = [sum(record[key] for record in records) / len(records) for records in (first, second)]
        between = "" if ratio.low is None else f"{ratio.low:.3f} to {ratio.high:.3f}"
        table.append(
            [
                _COMPARED_LABELS.get(key) or _time_label(key),
                *(f"{mean:,.2f}" for mean in means),
                f"{ratio.ratio:.3f}",
                between,
                f"{min(ratio.per_round):.3f}",
                f"{max(ratio.per_round):.3f}",
            ]
        )
    return table


def _time_label(key: str) -> str:
    stat, name, _ = key.split("_")
    return f"{name.upper()} {stat}, ms"


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for first, *others in table:
        cells = [first.ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return lines
