"""Tables of a record of the laboratory: the summary, the rows of a group, the claims, and what was measured."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from typing import Any, Final

from chairlift_lab.bench.report import Facts, Table

__all__ = [
    "claim_facts",
    "group_tables",
    "is_sure",
    "measured_table",
    "merit_of",
    "signed",
    "summary_tables",
    "trace_table",
    "verdict_of",
]

_SURE: Final = 0.05
"""Holm's corrected p value below which a difference is marked."""
_COLUMNS: Final = (
    ("goodput_strict", "goodput 5x"),
    ("goodput_loose", "goodput 10x"),
    ("requests_per_second", "requests/s"),
    ("output_tokens_per_second", "tokens/s"),
    ("ttft_p50", "TTFT p50"),
    ("ttft_p99", "p99"),
    ("tpot_p50", "TPOT p50"),
    ("tpot_p99", "p99"),
    ("worst_wait", "worst wait"),
    ("jain", "Jain"),
    ("worst_slowdown", "worst slowdown"),
    ("preemptions", "preemptions"),
    ("wasted_tokens", "wasted tokens"),
    ("cached_share", "cached"),
)
_TIMES: Final = {"ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "worst_wait"}


def signed(ratio: Mapping[str, Any] | None) -> str:
    """A ratio as text. A star marks a difference that remains after the correction for many rows."""
    if ratio is None:
        return "-"
    return f"{ratio['ratio']:.2f}{'*' if is_sure(ratio) else ''}"


def is_sure(ratio: Mapping[str, Any]) -> bool:
    return float(ratio.get("holm", 1.0)) < _SURE


def summary_tables(record: Mapping[str, Any], figure: str = "goodput_strict") -> Iterator[Table]:
    """For each machine, memory and load: policies x traces, the ratio of ``figure`` to the baseline's."""
    tables: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    traces: dict[tuple[Any, ...], list[str]] = collections.defaultdict(list)
    for group in record["groups"]:
        key = (group["machine"], group["memory"], group["load"])
        traces[key].append(group["trace"])
        for row in group["rows"]:
            tables.setdefault(key, {}).setdefault(row["row"], {})[group["trace"]] = row
    for key, rows in tables.items():
        machine, memory, load = key
        lines = [
            [name, *(_cell(by_trace.get(trace), figure) for trace in traces[key])] for name, by_trace in rows.items()
        ]
        caption = f"{machine}, load {load:g}" + ("" if memory == 1 else f", {memory:.0%} of the memory")
        yield Table(["goodput 5x / fcfs", *traces[key]], lines, caption)
        merits = [
            [name, *(_cell(by_trace.get(trace)) for trace in traces[key])]
            for name, by_trace in rows.items()
            if any("merit" in row for row in by_trace.values())
        ]
        if merits:
            yield Table(["goodput 5x / reference", *traces[key]], merits, caption)


def _cell(row: Mapping[str, Any] | None, figure: str = "") -> str:
    """The ratio of a figure to the baseline's, or without a figure the row's merit."""
    if row is None or (not row.get("seeds") and not row.get("error")):
        return ""
    if row.get("error"):
        return "failed"
    return signed(row["ratios"].get(figure) if figure else row.get("merit"))


def merit_of(row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Ratio of the strict goodput of a row to that of its reference. Without a reference: to the baseline."""
    ratio: Mapping[str, Any] | None = row.get("merit") or (row.get("ratios") or {}).get("goodput_strict")
    return ratio


def group_tables(record: Mapping[str, Any]) -> Iterator[Table]:
    """For each group: all figures of all rows."""
    for group in record["groups"]:
        lines = [_line(row) for row in group["rows"] if row.get("seeds") or row.get("error")]
        memory = "" if group["memory"] == 1 else f", {group['memory']:.0%} of the memory"
        scale = "" if group["length_scale"] == 1 else f", lengths x {group['length_scale']:g}"
        caption = (
            f"{group['trace']} on {group['machine']}{memory}, load {group['load']:g} ({group['rate']:g} requests/s"
            f"{scale}); 5x / 10x: {group['target_words']}"
        )
        yield Table(["policy", *(label for _, label in _COLUMNS), "command"], lines, caption)


def _line(row: Mapping[str, Any]) -> list[str]:
    if row.get("error"):
        return [row["row"], f"failed: {row['error']:.80}", *[""] * (len(_COLUMNS) - 1), row["command"]]
    return [row["row"], *(_value(row, name) for name, _ in _COLUMNS), row["command"]]


def _value(side: Mapping[str, Any], name: str) -> str:
    value = side["figures"].get(name)
    if value is None:
        return "-"
    text = _seconds(value) if name in _TIMES else f"{value:,.4g}"
    if name == "cached_share":
        text = f"{value:.0%}"
    ratio = side.get("ratios", {}).get(name)
    return f"{text}*" if ratio is not None and is_sure(ratio) else text


def _seconds(value: float) -> str:
    return f"{value * 1000:,.3g} ms" if value < 1 else f"{value:,.3g} s"


def measured_table(record: Mapping[str, Any]) -> Table | None:
    """Measured rows, each with the simulated value of the same seeds. None if nothing was measured."""
    lines = []
    for group in record["groups"]:
        for row in group["rows"]:
            side = row.get("measured")
            if side is None or not side.get("seeds"):
                continue
            line = [f"{group['trace']}, load {group['load']:g}: {row['row']}", f"{side['seeds']}"]
            for name in ("goodput_strict", "output_tokens_per_second", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99"):
                line.append(
                    f"{_value({'figures': side['figures']}, name)} / {_value({'figures': row['figures']}, name)}"
                )
            ratio = side["ratios"]["goodput_strict"]
            line.append("" if row["baseline"] else _interval(ratio))
            line.append("" if row["baseline"] else signed(row["ratios"]["goodput_strict"]))
            lines.append(line)
    if not lines:
        return None
    header = [
        "measured / simulated",
        "rounds",
        "goodput 5x",
        "tokens/s",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "TPOT p99",
    ]
    return Table([*header, "goodput / fcfs, measured", "simulated"], lines)


def _interval(ratio: Mapping[str, Any] | None) -> str:
    if ratio is None:
        return "-"
    high = "inf" if ratio["high"] is None else f"{ratio['high']:.2f}"
    return f"{ratio['ratio']:.2f} ({ratio['low']:.2f} to {high})"


def claim_facts(record: Mapping[str, Any]) -> Facts:
    """For each policy: source, claim, and what was found."""
    facts = {}
    for policy in record["policies"]:
        found = verdict_of(record, policy["name"])
        claim = f"claim: {policy['claim']}\n" if policy["claim"] else ""
        facts[policy["name"]] = f"{policy['source']}\n{claim}found: {found}"
    return Facts(facts)


def verdict_of(record: Mapping[str, Any], policy: str) -> str:
    """What was found for a policy against its reference, with its better share: groups won, groups lost, the best and
    the worst."""
    found: list[tuple[float, bool, str]] = []
    failed = 0
    for group in record["groups"]:
        rows = [row for row in group["rows"] if row["policy"] == policy]
        failed += any(row.get("error") for row in rows)
        ratios = [merit_of(row) for row in rows if row.get("seeds")]
        known = [ratio for ratio in ratios if ratio is not None]
        if known:
            better = max(known, key=lambda ratio: ratio["ratio"])
            found.append((better["ratio"], is_sure(better), f"{group['trace']}, load {group['load']:g}"))
    if policy == record["policies"][0]["name"]:
        return "the baseline"
    if not found:
        return f"failed in {failed} groups" if failed else "not run"
    won = sum(sure and ratio > 1 for ratio, sure, _ in found)
    lost = sum(sure and ratio < 1 for ratio, sure, _ in found)
    best, worst = max(found), min(found)
    text = (
        f"wins {won}, loses {lost} of {len(found)}; best {best[0]:.2f} ({best[2]}), worst {worst[0]:.2f} ({worst[2]})"
    )
    return f"{text}; failed in {failed}" if failed else text


def trace_table(trace: Mapping[str, Any]) -> Table:
    """Targets of a trace beside 2,000 drawn requests."""
    lines = [[name, f"{target:,.4g}", f"{drawn:,.4g}"] for name, target, drawn in trace["drawn"]]
    return Table([trace["name"], "target", "drawn"], lines, f"{trace['title']} ({trace['basis']})")
