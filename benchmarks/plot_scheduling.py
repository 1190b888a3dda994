"""Draws the results that ``scheduling.py`` recorded: one panel per scenario, with the 95 % intervals. If several
records contain a scenario, the last record is drawn.

pip install matplotlib
python benchmarks/plot_scheduling.py benchmarks/results/scheduling.json benchmarks/results/scheduling-15m.json \\
    --svg docs/scheduling.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

OURS, PLAIN, BOUND = "#1f6f8b", "#b8b8b8", "#d9822b"
Figures = dict[str, dict[str, float]]


def bars(axes: Any, figures: Figures, names: Sequence[str], labels: Sequence[str], colours: Sequence[str]) -> None:
    """Draw one bar per result, with its interval."""
    means = [figures[name]["mean"] for name in names]
    errors = [
        [max(0.0, figures[name]["mean"] - figures[name]["low"]) for name in names],
        [max(0.0, figures[name]["high"] - figures[name]["mean"]) for name in names],
    ]
    axes.bar(range(len(names)), means, yerr=errors, color=colours, capsize=3)
    axes.set_xticks(range(len(names)), labels, fontsize=8)


def priority(axes: Any, figures: Figures) -> None:
    bars(axes, figures, ["alone p99 TTFT s", "overloaded p99 TTFT s", "bound s"], ["alone", "5x overload", "bound"],
         [PLAIN, OURS, BOUND])  # fmt: skip
    axes.set(title="urgent work: p99 TTFT", ylabel="s")


def tenants(axes: Any, figures: Figures) -> None:
    bars(axes, figures, ["alone p99 TTFT s", "fcfs p99 TTFT s", "fair p99 TTFT s"], ["alone", "fcfs", "priority"],
         [PLAIN, BOUND, OURS])  # fmt: skip
    axes.set(title="small tenant beside a 10x one: p99 TTFT", ylabel="s")


def memory(axes: Any, figures: Figures) -> None:
    modes = ["recompute", "swap", "auto", "none"]
    names = [f"{case}{mode} tok/s" for case in ("", "hopeless ") for mode in modes]
    bars(axes, figures, names, [*modes, *modes], [OURS if mode == "auto" else PLAIN for mode in modes] * 2)
    axes.tick_params(axis="x", rotation=45)
    axes.set(title="preemption, peak 1.2x and 3x the KV cache", ylabel="tokens/s")


def prompts(axes: Any, figures: Figures) -> None:
    modes = ["mixed", "prefill_first", "decode_first", "separate", "auto"]
    kinds = ["documents", "mixed", "bursts"]
    best = {kind: max(figures[f"{kind} {mode} tok/s"]["mean"] for mode in modes[:-1]) for kind in kinds}
    for place, mode in enumerate(modes):
        shares = [figures[f"{kind} {mode} tok/s"]["mean"] / best[kind] for kind in kinds]
        at = [kind + (place - 2) * 0.16 for kind in range(len(kinds))]
        axes.bar(at, shares, 0.15, color=OURS if mode == "auto" else str(0.45 + 0.1 * place), label=mode)
    axes.set_xticks(range(len(kinds)), kinds, fontsize=8)
    axes.legend(fontsize=6, loc="lower right")
    axes.set(title="prefill modes: throughput over the best fixed", ylim=(0, 1.1))


def governor(axes: Any, figures: Figures) -> None:
    kinds = sorted({name.removesuffix(" rules tok/s") for name in figures if name.endswith(" rules tok/s")})
    for place, kind in enumerate(kinds):
        fixed = [name for name in figures if name.startswith(kind) and name.endswith("rows tok/s")]
        best = figures[f"{kind} rules tok/s"]["mean"] / figures[f"{kind} rules / best fixed"]["mean"]
        for name in fixed:
            healthy = figures[name.replace("tok/s", "preempted")]["mean"] < 0.02
            axes.plot(place, figures[name]["mean"] / best, "o", color=PLAIN if healthy else BOUND)
            axes.annotate(name.split()[-3], (place + 0.05, figures[name]["mean"] / best), fontsize=6)
        axes.plot(place - 0.15, figures[f"{kind} rules / best fixed"]["mean"], "D", color=OURS)
    axes.set_xticks(range(len(kinds)), kinds, fontsize=8)
    axes.set(title="governor (diamond) and fixed rows (orange: > 2 % preempted)", ylim=(0, None))


def deadlines(axes: Any, figures: Figures) -> None:
    loads = sorted({float(name.split()[0]) for name in figures if name.endswith("fcfs")})
    for what, colour in (("fcfs", PLAIN), ("deadline, downgrade", BOUND), ("deadline, drop", OURS)):
        rows = [figures[f"{load} {what}"] for load in loads]
        errors = [[row["mean"] - row["low"] for row in rows], [row["high"] - row["mean"] for row in rows]]
        axes.errorbar(loads, [row["mean"] for row in rows], yerr=errors, marker="o", color=colour, label=what)
    axes.legend(fontsize=7)
    axes.set(title="deadlines kept", xlabel="load", ylim=(0, 1.05))


PANELS: dict[str, Callable[[Any, Figures], None]] = {
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
    matplotlib.rcParams["axes.titlesize"] = 9
    matplotlib.rcParams["svg.hashsalt"] = "chairlift"  # so that the same record gives the same file
    figure, axes = plt.subplots(2, 3, figsize=(13, 7), layout="constrained")
    for (name, draw), place in zip(PANELS.items(), axes.flat, strict=True):
        for record in records[::-1]:
            if name in record["scenarios"]:
                draw(place, record["scenarios"][name])
                place.set_title(f"({name}) {place.get_title()}\n{record['model']}, {record['validity']}")
                break
    figure.savefig(args.svg, metadata={"Date": None})


if __name__ == "__main__":
    main()
