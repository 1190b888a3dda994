"""The page and the printed summary of a run of the laboratory, both made from its record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from chairlift_lab.bench import plots
from chairlift_lab.bench.report import Block, Facts, Report, Section, Table, Text
from chairlift_lab.laboratory.table import (
    claim_facts,
    group_tables,
    is_sure,
    measured_table,
    merit_of,
    summary_tables,
    trace_table,
)

__all__ = ["lab_report", "printed_summary"]

_MARK: Final = (
    "Each number is a ratio to fcfs on the same requests, the geometric mean over the seeds. A star marks a difference"
    " that remains at 5 % after Holm's correction for all rows of the column. Numbers below 1 are losses. A row's"
    " reference is fcfs-targets for a policy, because every policy is told the targets, and fcfs for any other setting."
)
_METHOD: Final = (
    "Every policy serves the same requests of a seed. A ratio is taken within a seed, and its interval is that of"
    " Student's t over the seeds. Load is the rate divided by the highest rate that fcfs sustains on this trace and"
    " machine. Goodput is the number of requests per second that meet both targets, for TTFT and TPOT; the targets are"
    " 5 and 10 times the median of an idle machine, fixed before the run.\n\n"
    "Warm-up is cut where MSER says so for fcfs, and the last tenth of the arrivals is left out. Jain's index is taken"
    " over the service of tenants while at least two of them wait. No public trace names its tenants: each session was"
    " given one of eight, by 1/k. Jain's index rewards equal misery, so the largest slowdown (time divided by time"
    " alone) stands beside it. Wasted tokens were computed twice or dropped.\n\n"
    "The limit of a request is the length of its answer here, so rules that reserve for the limit know more than they"
    " would on a server."
)


def printed_summary(record: Mapping[str, Any], *, everything: bool = False) -> Iterator[Text | Facts | Table]:
    """What the command prints. ``everything``: all figures of all rows instead of the summary."""
    yield Facts(_facts(record))
    if everything:
        yield from group_tables(record)
    else:
        yield Text(_MARK)
        yield from summary_tables(record)
    table = measured_table(record)
    if table is not None:
        yield table
    yield claim_facts(record)


def lab_report(record: Mapping[str, Any]) -> Report:
    """The page of a run."""
    traces = len(record["traces"])
    title = f"{len(record['policies'])} batching policies on {traces} {'trace' if traces == 1 else 'traces'}"
    return Report(record, title=title, lead=_lead(record), sections=_sections(record))


def _facts(record: Mapping[str, Any]) -> dict[str, str]:
    raced = len(record.get("looks", [])) > 1
    machines = [
        f"{name}: {each['model']} on {each['machine']} ({each['validity']})"
        for name, each in record["machines"].items()
    ]
    return {
        "machines": "\n".join(machines),
        "traces": "\n".join(f"{trace['name']}: {trace['basis']}" for trace in record["traces"]),
        "cells": f"{record['requests']:,} requests and {'up to ' * raced}{record['seeds']} seeds each",
        "command": record["command"],
    }


def _lead(record: Mapping[str, Any]) -> str:
    """The answer in two sentences: what wins most often, and what never wins."""
    won: dict[str, int] = {}
    lost: dict[str, int] = {}
    for group in record["groups"]:
        for row in group["rows"]:
            ratio = merit_of(row)
            if ratio is None or row["baseline"]:
                continue
            name = row["row"]
            won[name] = won.get(name, 0) + (is_sure(ratio) and ratio["ratio"] > 1)
            lost[name] = lost.get(name, 0) + (is_sure(ratio) and ratio["ratio"] < 1)
    if not won:
        return "No cell has been run yet."
    best = max(won, key=lambda name: (won[name] - lost[name], won[name]))
    if won[best] <= 0:
        return f"Nothing beats its reference beyond doubt in {len(record['groups'])} comparisons."
    never = [name for name in won if not won[name]]
    text = f"{best} wins {won[best]} and loses {lost[best]} of {len(record['groups'])} comparisons with its reference."
    return f"{text} {len(never)} of {len(won)} rows win nowhere." if never else text


def _sections(record: Mapping[str, Any]) -> Iterator[Section]:
    yield Section("Where each policy wins", [Text(_MARK), *summary_tables(record), *_charts(record)])
    text = "What was found is goodput within 5 times the idle medians, against the reference, with the better share."
    yield Section("Claims and findings", [Text(text), claim_facts(record)])
    measured = measured_table(record)
    if measured is not None:
        text = "Each row: the median over the rounds as measured, and as simulated for the same requests."
        yield Section("Measured on the real engine", [Text(text), measured])
    yield Section("All figures", [Text("Medians over the seeds."), *group_tables(record)])
    yield Section("Traces: target and drawn", _traces(record))
    yield Section("Method", [Text(_METHOD), Facts(_facts(record))])


def _traces(record: Mapping[str, Any]) -> Iterator[Block]:
    for trace in record["traces"]:
        if trace["drawn"]:
            yield trace_table(trace)
            yield Text(f"Source: {trace['source']}. Licence: {trace['licence']}.")


def _charts(record: Mapping[str, Any]) -> Iterator[Block]:
    """A chart for each group: the ratio of each row, with its interval."""
    for group in record["groups"]:
        rows = [
            row
            for row in group["rows"]
            if not row["baseline"] and row.get("seeds") and row["ratios"]["goodput_strict"] is not None
        ]
        if not rows:
            continue
        ratios = [row["ratios"]["goodput_strict"] for row in rows]
        ends = [(ratio["low"], ratio["low"] if ratio["high"] is None else ratio["high"]) for ratio in ratios]
        yield plots.bars(
            [row["row"] for row in rows],
            {"goodput 5x / fcfs": [ratio["ratio"] for ratio in ratios]},
            title=f"{group['trace']}, {group['machine']}, load {group['load']:g}",
            y_label="",
            intervals={"goodput 5x / fcfs": ends},
        )
