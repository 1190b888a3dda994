"""``bench offline --max-num-seqs 16,32,64``: compares several numbers of slots (rows of a batch) in one table, and
names the best."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from chairlift_lab.bench import plots
from chairlift_lab.bench.report import Block, Facts, Report, Section, Table, Text
from chairlift_lab.bench.serve_result import Figures, Stats
from chairlift_lab.bench.verdict import Ratio, disturbance

__all__ = ["Size", "best_words", "sizes_report", "sizes_table"]


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """A batching mode with a number of slots, and the results of one run per round."""

    batching: str
    slots: int
    runs: Sequence[Figures]

    @property
    def name(self) -> str:
        """Batching mode and number of slots, as shown in reports."""
        return f"{self.batching}, {self.slots} slots"

    @property
    def throughput(self) -> float:
        """Median over the rounds of the output tokens per second."""
        return statistics.median(run.output_throughput for run in self.runs)

    def median(self, time: str, part: str) -> float | None:
        """Median over the rounds of a measured time in ms. None if it was not measured.

        ``time`` is a key of :attr:`Figures.times`, such as ``ttft``. ``part`` is a field of :class:`Stats`, such as
        ``p99``.
        """
        found = [stats for run in self.runs if (stats := run.times[time]) is not None]
        return statistics.median(_part(stats, part) for stats in found) if found else None


def _part(stats: Stats, part: str) -> float:
    value: float = getattr(stats, part)
    return value


def _best(sizes: Sequence[Size], batching: str) -> Size | None:
    """Size with the highest measured throughput among the sizes of one batching mode without failed requests."""
    whole = [size for size in sizes if size.batching == batching and not any(run.failed for run in size.runs)]
    return max(whole, key=lambda size: size.throughput, default=None)


def sizes_table(sizes: Sequence[Size]) -> Table:
    """Table with one row for each size: medians over the rounds. ``*`` marks the fastest size of each batching mode."""
    best = [_best(sizes, batching) for batching in dict.fromkeys(size.batching for size in sizes)]
    goodput = any(run.goodput is not None for size in sizes for run in size.runs)
    rows = []
    for size in sizes:
        row = [size.name + (" *" if size in best else ""), f"{size.throughput:,.1f}"]
        for time, part in (("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"), ("e2el", "p99")):
            value = size.median(time, part)
            row.append("-" if value is None else f"{value:,.1f}")
        if goodput:
            row.append(f"{statistics.median(run.goodput or 0.0 for run in size.runs):.2f}")
        rates = [run.preemption_rate for run in size.runs if run.preemption_rate is not None]
        row += [f"{statistics.median(rates):.1%}" if rates else "-", f"{sum(run.failed for run in size.runs):,}"]
        rows.append(row)
    rounds = max((len(size.runs) for size in sizes), default=0)
    header = ["", "output tokens/s", "TTFT p50", "p99", "TPOT p50", "p99", "E2EL p99", *["goodput"] * goodput]
    caption = f"times in ms, medians of {rounds} round{'s' * (rounds != 1)}; * has the highest throughput of its kind"
    if any(size.batching == "static" for size in sizes):
        caption += "; a static batch delivers all tokens at its end, so it has no time per token"
    return Table([*header, "preempted", "failed"], rows, caption)


def best_words(sizes: Sequence[Size]) -> str:
    """Text that names the fastest size of each batching mode, the ratio of their throughputs, and the load of other
    programs. A size is called the best only if this may be claimed."""
    static = _best(sizes, "static")
    other = _best(sizes, "continuous")
    words = [_named(size, sizes) for size in (static, other) if size is not None]
    if static is not None and other is not None and len(static.runs) == len(other.runs):
        rivals = sum(size.batching == "continuous" for size in sizes)
        ours, theirs = ([run.throughput for run in size.runs] for size in (other, static))
        ratio = Ratio.of(ours, theirs, rivals)
        words.append(ratio.sentence("continuous batching", "throughput", "static batches").rstrip("."))
    if not words:
        return "no size answered every request"
    return "; ".join([*words, disturbance([run.busy for size in sizes for run in size.runs]).rstrip(".")])


def _named(size: Size, sizes: Sequence[Size]) -> str:
    """Text with the number of slots and the throughput of the fastest size of its batching mode."""
    text = f"{size.batching}: {size.slots} slots, {size.throughput:,.1f} output tokens/s"
    rivals = [each for each in sizes if each.batching == size.batching and each.slots != size.slots]
    ours = [run.throughput for run in size.runs]
    equal = []
    for rival in rivals:
        if len(rival.runs) == len(size.runs) and not any(run.failed for run in rival.runs):
            ratio = Ratio.of(ours, [run.throughput for run in rival.runs], len(rivals))
            if ratio.doubt:
                return f"fastest {text} (no claim: {ratio.doubt})"
            if not ratio.larger:
                equal.append(f"{rival.slots}")
    return f"best {text}" if not equal else f"fastest {text} ({', '.join(equal)} slots are as fast within the noise)"


def sizes_report(record: Mapping[str, Any], sizes: Sequence[Size], facts: Mapping[str, str]) -> Report:
    """HTML report with the table of sizes and charts."""

    def blocks() -> Iterator[Block]:
        yield sizes_table(sizes)
        yield plots.bars(
            [size.name for size in sizes],
            {"output tokens/s": [size.throughput for size in sizes]},
            title="Throughput",
            y_label="output tokens/s",
        )
        yield plots.bars(
            [size.name for size in sizes],
            {part: [size.median("e2el", part) or float("nan") for size in sizes] for part in ("p50", "p99")},
            title="Whole request",
            y_label="ms, less is better",
        )
        yield Text("All values are measured, in turns: each round runs every size once.")

    lead = best_words(sizes)
    return Report(
        record,
        "How many slots",
        f"{lead[:1].upper()}{lead[1:]}.",
        [Section("Sizes", blocks()), Section("Settings", [Facts(facts)])],
    )
