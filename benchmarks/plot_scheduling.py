"""Draws the results that ``scheduling.py`` recorded: one chart per scenario, with the 95 % intervals. If several
records contain a scenario, the last record is drawn.

python benchmarks/plot_scheduling.py benchmarks/results/scheduling.json benchmarks/results/scheduling-15m.json \\
    --svg docs/scheduling.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from chairlift_lab.bench.plots import Figure, bars, lines, scatter, write_svg

Results = dict[str, dict[str, float]]


def interval(result: dict[str, float]) -> tuple[float, float]:
    return result["low"], result["high"]


def means(results: Results, names: Sequence[str], groups: Sequence[str], title: str, unit: str) -> Figure:
    """Chart of one bar per result, with its interval."""
    return bars(
        groups,
        {"mean": [results[name]["mean"] for name in names]},
        title=title,
        y_label=unit,
        intervals={"mean": [interval(results[name]) for name in names]},
    )


def priority(results: Results, title: str) -> Figure:
    names = ["alone p99 TTFT s", "overloaded p99 TTFT s", "bound s"]
    return means(results, names, ["alone", "5x overload", "bound"], f"{title} urgent work", "p99 TTFT, s")


def tenants(results: Results, title: str) -> Figure:
    names = ["alone p99 TTFT s", "fcfs p99 TTFT s", "fair p99 TTFT s"]
    return means(results, names, ["alone", "fcfs", "priority"], f"{title} small tenant beside a 10x one", "p99 TTFT, s")


def memory(results: Results, title: str) -> Figure:
    modes = ["recompute", "swap", "auto", "none"]
    peaks = {"peak 1.2x the KV cache": "", "3x": "hopeless "}
    return bars(
        modes,
        {peak: [results[f"{case}{mode} tok/s"]["mean"] for mode in modes] for peak, case in peaks.items()},
        title=f"{title} preemption",
        y_label="tokens/s",
        intervals={peak: [interval(results[f"{case}{mode} tok/s"]) for mode in modes] for peak, case in peaks.items()},
    )


def prompts(results: Results, title: str) -> Figure:
    modes = ["mixed", "prefill_first", "decode_first", "separate", "auto"]
    kinds = ["documents", "mixed", "bursts"]
    best = {kind: max(results[f"{kind} {mode} tok/s"]["mean"] for mode in modes[:-1]) for kind in kinds}
    shares = {mode: [results[f"{kind} {mode} tok/s"]["mean"] / best[kind] for kind in kinds] for mode in modes}
    return bars(
        kinds, shares, title=f"{title} prefill modes", y_label="throughput divided by that of the best fixed mode"
    )


def governor(results: Results, title: str) -> Figure:
    kinds = sorted({name.removesuffix(" rules tok/s") for name in results if name.endswith(" rules tok/s")})
    series: dict[str, list[tuple[float, float, str]]] = {"governor": [], "fixed rows": [], "fixed, > 2 % preempted": []}
    for place, kind in enumerate(kinds):
        best = results[f"{kind} rules tok/s"]["mean"] / results[f"{kind} rules / best fixed"]["mean"]
        series["governor"].append((place - 0.15, results[f"{kind} rules / best fixed"]["mean"], ""))
        for name in results:
            if name.startswith(kind) and name.endswith("rows tok/s"):
                healthy = results[name.replace("tok/s", "preempted")]["mean"] < 0.02
                point = (float(place), results[name]["mean"] / best, name.split()[-3])
                series["fixed rows" if healthy else "fixed, > 2 % preempted"].append(point)
    unit = "throughput divided by that of the best fixed number"
    return scatter(series, title=f"{title} governor and fixed rows", x_label="", y_label=unit, columns=kinds)


def deadlines(results: Results, title: str) -> Figure:
    loads = sorted({float(name.split()[0]) for name in results if name.endswith("fcfs")})
    kinds = ("fcfs", "deadline, downgrade", "deadline, drop")
    return lines(
        {kind: (loads, [results[f"{load} {kind}"]["mean"] for load in loads]) for kind in kinds},
        title=f"{title} deadlines",
        x_label="load",
        y_label="share of deadlines kept",
        intervals={kind: [interval(results[f"{load} {kind}"]) for load in loads] for kind in kinds},
    )


CHARTS: dict[str, Callable[[Results, str], Figure]] = {
    "a": priority,
    "b": tenants,
    "c": memory,
    "d": prompts,
    "e": governor,
    "f": deadlines,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--svg", type=Path, required=True)
    args = parser.parse_args()
    records = [json.loads(path.read_text()) for path in args.records]
    figures = []
    for name, draw in CHARTS.items():
        record = next((record for record in records[::-1] if name in record["scenarios"]), None)
        if record is not None:
            title = f"({name}) {record['model']}, {record['validity']}:"
            figures.append(draw(record["scenarios"][name], title))
    write_svg(args.svg, figures, columns=3)


if __name__ == "__main__":
    main()
