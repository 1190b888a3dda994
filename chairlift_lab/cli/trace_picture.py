"""Shows a trace as text on the terminal, and as a picture."""

from __future__ import annotations

import itertools
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from chairlift_lab.workload.summary import LengthFacts, summarise

if TYPE_CHECKING:
    from chairlift_lab.workload.trace import TracedRequest

__all__ = ["fact_lines", "histogram_lines", "write_picture"]

_MAX_BINS: Final = 16
_MAX_CLASSES: Final = 8
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
_DAY: Final = 86400.0
_STEPS: Final = (
    *(factor * 10.0**power for power in range(-6, 1) for factor in (1, 2, 5)),
    *(10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1800.0, 3600.0, 7200.0, 10800.0, 21600.0, 43200.0),
    *(factor * _DAY * 10**power for power in range(5) for factor in (1, 2, 5)),
)
"""Bin widths in seconds for histograms over time: round numbers in the units that people use."""


def fact_lines(trace: Sequence[TracedRequest], notes: Sequence[str] = ()) -> list[str]:
    """Facts about a trace, one per line, followed by ``notes``."""
    from chairlift_lab.bench.report import Facts, text

    facts = summarise(trace)
    rows = {"requests": f"{facts.requests:,}", "arrivals": "all at once"}
    if facts.sessions:
        turns = sum(bool(request.session) for request in trace) / facts.sessions
        rows["requests"] += f", among them {facts.sessions:,} chats of {turns:.1f} turns on average"
    if facts.rate is not None:
        rate = f"{facts.rate:.3g}" if facts.rate < 100 else f"{facts.rate:,.0f}"
        rows["arrivals"] = f"{rate} requests/s over {_duration(facts.seconds)}"
    if facts.burstiness is not None:
        chance = max(0.1, 2 / math.sqrt(facts.requests))  # two standard errors of a Poisson process
        kind = "steadier than" if facts.burstiness < 1 - chance else "burstier than"
        kind = "as in" if abs(facts.burstiness - 1) <= chance else kind
        rows["gaps"] = f"vary by {facts.burstiness:.2f} of their mean, {kind} a Poisson process, which has 1"
    rows |= {"prompts": _lengths(facts.prompts), "answers": _lengths(facts.outputs)}
    if facts.repeated is not None:
        rows["repeated"] = f"{facts.repeated:.1%} of the prompt tokens stand at the beginning of an earlier prompt"
    if facts.cancels:
        rows["cancels"] = f"{facts.cancels:,} clients leave early ({facts.cancels / facts.requests:.1%})"
    if len(facts.classes) > 1 or facts.classes[0][0].tenant or _class_words(facts.classes[0][0]) != "no class":
        shown = facts.classes[:_MAX_CLASSES]
        lines = [f"{count:,} ({count / facts.requests:.1%}): {_class_words(request)}" for request, count in shown]
        if more := len(facts.classes) - len(shown):
            lines.append(f"and {more:,} more")
        rows["classes"] = "\n".join(lines)
    if notes:
        rows["note"] = "\n".join(notes)
    return list(text(Facts(rows)))


def histogram_lines(trace: Sequence[TracedRequest]) -> list[str]:
    """Histograms of prompt lengths, output lengths and arrivals, as wide as the terminal. They are in ASCII if the
    terminal has no block characters."""
    lines: list[str] = []
    for name, lengths in (
        ("prompt lengths", [request.prompt_tokens for request in trace]),
        ("answer lengths", [request.output_tokens for request in trace]),
    ):
        lines += ["", f"{name}, in tokens: requests", *_bars(*_length_bins(lengths))]
    if trace[-1].arrival > trace[0].arrival:
        step, counts = _arrival_bins(trace)
        labels = [_clock(step * place, step) for place in range(len(counts))]
        lines += ["", f"arrivals, from each time for {_duration(step)}: requests", *_bars(labels, counts)]
    return lines


def write_picture(path: Path, name: str, trace: Sequence[TracedRequest]) -> None:
    """Write the histograms as an SVG file. Raises ConfigError if the file cannot be written."""
    from chairlift_lab.bench import plots

    lengths = {
        "prompts": [float(request.prompt_tokens) for request in trace],
        "answers": [float(request.output_tokens) for request in trace],
    }
    figures = [plots.histogram(lengths, title=f"{name}: lengths", x_label="tokens", log_x=True)]
    if trace[-1].arrival > trace[0].arrival:
        step, counts = _arrival_bins(trace, max_bins=120)
        edges = [step * place for place in range(len(counts) + 1)]
        rates = [count / step for count in counts]
        figures.append(
            plots.lines(
                {"requests/s": (edges, [*rates, rates[-1]])},
                title=f"{name}: arrivals",
                x_label="seconds from the start",
                y_label="requests/s",
                step=True,
            )
        )
    plots.write_svg(path, figures)


# --- bins ------------------------------------------------------------------------------------------------------------


def _length_bins(lengths: Sequence[int]) -> tuple[list[str], list[int]]:
    """(labels, counts) of bins for lengths. The upper end of a bin is at least twice its lower end."""
    for factor in (1, 2, 3, 4):
        bins = (np.array([length.bit_length() for length in lengths]) - 1) // factor
        low, high = int(bins.min()), int(bins.max())
        if high - low < _MAX_BINS:
            break
    counts = np.bincount(bins - low, minlength=high - low + 1)
    ends = [1 << factor * place for place in range(low, high + 2)]
    dash = "–" if _can_print("–") else "-"
    labels = [
        f"{begin:,}{dash}{end - 1:,}" if end - 1 > begin else f"{begin}" for begin, end in itertools.pairwise(ends)
    ]
    return labels, [int(count) for count in counts]


def _arrival_bins(trace: Sequence[TracedRequest], max_bins: int = _MAX_BINS) -> tuple[float, list[int]]:
    """(width of a bin in seconds, number of requests in each bin)."""
    first = trace[0].arrival
    seconds = trace[-1].arrival - first
    step = next((step for step in _STEPS if seconds < step * max_bins), _STEPS[-1])
    indices = ((np.array([request.arrival for request in trace]) - first) / step).astype(int)
    return step, [int(count) for count in np.bincount(np.minimum(indices, max_bins))]


def _bars(labels: Sequence[str], counts: Sequence[int]) -> list[str]:
    left, right = max(map(len, labels)), max(len(f"{count:,}") for count in counts)
    room = max(8, shutil.get_terminal_size().columns - left - right - 7)
    fine = _can_print(_EIGHTHS + "│")
    lines = []
    for label, count in zip(labels, counts, strict=True):
        eighths = max(round(8 * room * count / max(counts)), bool(count))
        whole, rest = divmod(eighths, 8)
        bar = "█" * whole + _EIGHTHS[rest].strip() if fine else "#" * max(whole, bool(count))
        lines.append(f"  {label:>{left}} {'│' if fine else '|'}{bar} {count:,}")
    return lines


def _can_print(text: str) -> bool:
    """Whether standard output can encode these characters."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


# --- words -----------------------------------------------------------------------------------------------------------


def _lengths(facts: LengthFacts) -> str:
    return (
        f"{facts.total:,} tokens; mean {facts.mean:,.0f}, p50 {facts.p50:,.0f}, p90 {facts.p90:,.0f},"
        f" p99 {facts.p99:,.0f}, longest {facts.most:,}"
    )


def _class_words(request: TracedRequest) -> str:
    words = [f"tenant {request.tenant}"] if request.tenant else []
    words += [f"priority {request.priority}"] if request.priority else []
    words += [f"tier {request.service_tier}"] if request.service_tier else []
    for name in ("ttft_ms", "tpot_ms", "deadline_ms"):
        limit = getattr(request, name)
        words += [] if limit is None else [f"{name.removesuffix('_ms')} {limit:g} ms"]
    return ", ".join(words) or "no class"


def _duration(seconds: float) -> str:
    """A duration as text in a suitable unit."""
    for unit, size in (("days", _DAY), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size or (seconds >= size and seconds % size == 0):
            return f"{seconds / size:.3g} {unit.removesuffix('s') if seconds == size else unit}"
    return f"{seconds:.3g} s"


def _clock(seconds: float, step: float) -> str:
    if step < 1:
        return f"{seconds:.6g} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}"
