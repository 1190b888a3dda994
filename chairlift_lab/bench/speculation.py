"""``bench offline --compare speculation``: compares runs with and without draft tokens (speculative decoding).

Continuous and static batches are compared.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from chairlift_lab.bench import plots
from chairlift_lab.bench.report import Block, Facts, Report, Section, Table, Text
from chairlift_lab.bench.serve_result import Figures
from chairlift_lab.bench.verdict import Ratio, disturbance

__all__ = [
    "KINDS",
    "Drafted",
    "SpeculationSide",
    "sides_of",
    "speculation_report",
    "speculation_table",
    "speculation_words",
]

KINDS: Final = (
    ("continuous, with drafts", "continuous", True),
    ("static, with drafts", "static", True),
    ("continuous, without", "continuous", False),
    ("static, without", "static", False),
)
"""Kinds of runs that are compared: (name, batching mode, whether tokens are drafted)."""
_READ: Final = (
    "Accepted length is the number of tokens that a row with drafts yields in a step. It includes the one token that "
    "every row yields. The number of drafts depends on the cost of a step, so large batches may have no drafts. "
    "Answers are the same with and without drafts."
)


@dataclasses.dataclass(frozen=True, slots=True)
class Drafted:
    """Counts of draft tokens in one run."""

    rows: int
    """Number of decode rows that had drafts, over all steps."""
    drafts: int
    accepted: int

    @property
    def accepted_length(self) -> float | None:
        """Mean number of tokens that a row with drafts yielded in a step. None if there were no drafts."""
        return 1 + self.accepted / self.rows if self.rows else None


@dataclasses.dataclass(frozen=True, slots=True)
class SpeculationSide:
    """One side of the comparison: a kind of run from :data:`KINDS` and a number of slots (rows of a batch), with the
    results of one run per round."""

    kind: str
    slots: int
    runs: Sequence[tuple[Figures, Drafted]]

    @property
    def throughput(self) -> float:
        """Median over the rounds of the output tokens per second."""
        return statistics.median(figures.output_throughput for figures, _ in self.runs)

    def time(self, name: str, part: str) -> float | None:
        """Median over the rounds of a measured time in ms. None if it was not measured.

        ``name`` is a key of :attr:`Figures.times`, such as ``ttft``. ``part`` is a field of :class:`Stats`, such as
        ``p99``.
        """
        found = [getattr(stats, part) for figures, _ in self.runs if (stats := figures.times[name]) is not None]
        return statistics.median(found) if found else None

    @property
    def accepted_length(self) -> float | None:
        """Median of the accepted length over the rounds with drafts. None if no round had drafts."""
        found = [length for _, drafted in self.runs if (length := drafted.accepted_length) is not None]
        return statistics.median(found) if found else None

    def ratio(self, other: SpeculationSide) -> Ratio:
        """Throughput divided by the throughput of ``other``, in the rounds that both have."""
        pairs = [
            (mine.throughput, theirs.throughput) for (mine, _), (theirs, _) in zip(self.runs, other.runs, strict=False)
        ]
        return Ratio.of([mine for mine, _ in pairs], [theirs for _, theirs in pairs])


def sides_of(settings: Mapping[str, Any], sizes: Sequence[int]) -> list[tuple[str, int, dict[str, Any]]]:
    """One entry per side of the comparison: (kind, number of slots, settings of the engine). ``settings`` select the
    drafter; the default is n-grams."""
    drafter = settings.get("speculative_config") or '{"method": "ngram"}'
    found = []
    for slots in sizes:
        for kind, batching, drafts in KINDS:
            more = {"batching": batching, "max_num_seqs": slots, "speculative_config": drafter if drafts else ""}
            found.append((kind, slots, {**settings, **more}))
    return found


def speculation_table(sides: Sequence[SpeculationSide]) -> Table:
    """Table with one row for each side: medians over the rounds, and ratios to continuous batches without drafts."""
    plain = {side.slots: side for side in sides if side.kind == KINDS[2][0]}
    rows = []
    for side in sides:
        row = [f"{side.slots} slots, {side.kind}", f"{side.throughput:,.1f}"]
        row.append(f"{side.ratio(plain[side.slots]).ratio:.2f}" if side.slots in plain else "-")
        values = [side.time("tpot", "p50"), side.time("tpot", "p99"), side.time("e2el", "p50")]
        row += ["-" if value is None else f"{value:,.1f}" for value in values]
        length = side.accepted_length
        row += ["-" if length is None else f"{length:.2f}", f"{sum(figures.failed for figures, _ in side.runs):,}"]
        rows.append(row)
    rounds = max((len(side.runs) for side in sides), default=0)
    header = ["", "output tokens/s", "ratio", "TPOT p50", "p99", "E2EL p50", "accepted length", "failed"]
    caption = (
        f"times in ms, medians of {rounds} round{'s' * (rounds != 1)}; ratio: to continuous without drafts, of as many "
        "slots; a static batch delivers all tokens at its end, so it has no time per token"
    )
    return Table(header, rows, caption)


def speculation_words(sides: Sequence[SpeculationSide]) -> str:
    """Text that compares continuous batches with drafts with two other sides, for each number of slots."""
    by_name = {(side.kind, side.slots): side for side in sides if side.runs}
    words = []
    for slots in dict.fromkeys(side.slots for side in sides):
        with_drafts = by_name.get((KINDS[0][0], slots))
        others = [by_name.get((kind, slots)) for kind in (KINDS[2][0], KINDS[1][0])]
        if with_drafts is None or None in others:
            continue
        plain, static = (with_drafts.ratio(other) for other in others if other is not None)
        words += [
            plain.sentence(f"with {slots} slots, continuous batching with drafts", "throughput", "the same without"),
            static.sentence(f"with {slots} slots, it", "throughput", "static batches with drafts"),
        ]
    if not words:
        return "nothing was compared"
    return " ".join([*words, disturbance([figures.busy for side in sides for figures, _ in side.runs])])


def speculation_report(record: Mapping[str, Any], sides: Sequence[SpeculationSide], facts: Mapping[str, str]) -> Report:
    """HTML report with the table of all sides and a chart."""

    def blocks() -> Iterator[Block]:
        yield speculation_table(sides)
        yield Text(_READ)
        yield plots.bars(
            [f"{side.slots}, {side.kind}" for side in sides],
            {"output tokens/s": [side.throughput for side in sides]},
            title="Throughput",
            y_label="output tokens/s",
        )
        yield Text("All values are measured, in turns: each round runs every side once.")

    lead = speculation_words(sides)
    return Report(
        record,
        "What drafts gain",
        lead[:1].upper() + lead[1:],
        [Section("Drafts", blocks()), Section("Settings", [Facts(facts)])],
    )
