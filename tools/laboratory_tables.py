"""Writes the tables of results into docs/laboratory.md, from a recorded run of ``chairlift lab``.

::

    python tools/laboratory_tables.py

The figures come from benchmarks/results/laboratory.json and laboratory-measured.json. Each table is between two
comments of the page. A test compares them with the page.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chairlift_lab.laboratory.table import is_sure, merit_of, signed
from tools.markdown import replaced, table

__all__ = ["RESULT", "main", "page"]

ROOT: Final = Path(__file__).resolve().parents[1]
PAGE: Final = ROOT / "docs" / "laboratory.md"
RESULT: Final = ROOT / "benchmarks" / "results" / "laboratory.json"
MEASURED: Final = ROOT / "benchmarks" / "results" / "laboratory-measured.json"
_MARGIN: Final = 0.03
"""Difference from 1 that the words "above" and "below" begin at."""


def _reference(row: Mapping[str, Any]) -> str:
    return str(row.get("reference", ""))


def _merits(record: Mapping[str, Any], reference: str, load: float) -> str:
    """Rows that have this reference x traces: the merit, and the number of seeds behind it where they are few."""
    groups = [group for group in record["groups"] if group["load"] == load and group["memory"] == 1]
    rows: dict[str, list[str]] = {}
    for group in groups:
        for row in group["rows"]:
            if _reference(row) == reference and (row.get("seeds") or row.get("error")):
                rows.setdefault(row["row"], []).append(_merit(row))
    lines = [(f"`{name}`", *cells) for name, cells in rows.items() if len(cells) == len(groups)]
    return table((f"goodput / `{reference}`", *(f"`{group['trace']}`" for group in groups)), lines)


def _merit(row: Mapping[str, Any]) -> str:
    if row.get("error"):
        return "failed"
    return f"{signed(row.get('merit'))} ({row['seeds']})" if row.get("seeds") else "-"


def _findings(record: Mapping[str, Any]) -> str:
    """One line for each idea: claim, and on which traces its better share is above or below its reference."""
    lines = []
    for policy in record["policies"][1:]:
        best = list(_best(record, policy["name"]))
        if not best:
            continue
        ratios = [ratio["ratio"] for _, ratio in best]
        wins = [_place(where, ratio) for where, ratio in best if ratio["ratio"] > 1 + _MARGIN]
        loses = [_place(where, ratio) for where, ratio in best if ratio["ratio"] < 1 - _MARGIN]
        found = f"{min(ratios):.2f} to {max(ratios):.2f}"
        claim = policy["claim"] or "-"
        lines.append((f"`{policy['name']}`", claim, found, ", ".join(wins) or "nowhere", ", ".join(loses) or "nowhere"))
    return table(("Idea", "Claim of its source", "Found: goodput / reference", "Above it", "Below it"), lines)


def _best(record: Mapping[str, Any], policy: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """(trace and load, merit of the better share) of a policy, for each group."""
    several = len({group["load"] for group in record["groups"]}) > 1
    for group in record["groups"]:
        merits = [merit_of(row) for row in group["rows"] if row["policy"] == policy and row.get("seeds")]
        known = [merit for merit in merits if merit is not None]
        if known:
            where = f"{group['trace']} at {group['load']:g}" if several else group["trace"]
            yield where, max(known, key=lambda merit: merit["ratio"])


def _place(where: str, ratio: Mapping[str, Any]) -> str:
    return f"{where} ({ratio['ratio']:.2f}{'*' if is_sure(ratio) else ''})"


def _measured(record: Mapping[str, Any]) -> str:
    """Measured rows beside the simulated values of the same seeds."""
    lines = []
    for group in record["groups"]:
        for row in group["rows"]:
            side = row.get("measured")
            if side is None or not side.get("seeds"):
                continue
            pairs = [
                f"{side['figures'][name] * scale:.3g} / {row['figures'][name] * scale:.3g}"
                for name, scale in (("goodput_strict", 1), ("ttft_p50", 1000), ("ttft_p99", 1000), ("tpot_p50", 1000))
            ]
            compared = [_interval(each["ratios"]["goodput_strict"], row) for each in (side, row)]
            merits = [_interval(each.get("merit"), row) for each in (side, row)]
            lines.append((f"`{group['trace']}`", f"`{row['row']}`", f"{side['seeds']}", *pairs, *compared, *merits))
    header = ("Trace", "Policy", "rounds", "goodput/s", "TTFT p50, ms", "p99", "TPOT p50, ms")
    ratios = ("/ `fcfs`, measured", "simulated", "/ reference, measured", "simulated")
    return table((*header, *ratios), lines)


def _interval(ratio: Mapping[str, Any] | None, row: Mapping[str, Any]) -> str:
    if row["baseline"] or ratio is None:
        return "1" if row["baseline"] else "-"
    high = "inf" if ratio["high"] is None else f"{ratio['high']:.2f}"
    return f"{ratio['ratio']:.2f} ({ratio['low']:.2f} to {high})"


def page() -> str:
    """The page with the current tables."""
    record = json.loads(RESULT.read_text(encoding="utf-8"))
    text = PAGE.read_text(encoding="utf-8")
    made = "made by tools/laboratory_tables.py"
    parts = {"findings": _findings(record), "measured": _measured(json.loads(MEASURED.read_text(encoding="utf-8")))}
    for load in sorted({group["load"] for group in record["groups"]}, reverse=True):
        parts[f"policies at {load:g}"] = _merits(record, "fcfs-targets", load)
        parts[f"settings at {load:g}"] = _merits(record, "fcfs", load)
    for name, part in parts.items():
        begin = f"<!-- {name}, {made} -->"
        if begin in text:
            text = replaced(text, begin, part)
    return text


def main() -> None:
    """Write the tables into the page."""
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
