"""Measured values of the benchmarks with their bounds and verdicts, the table that shows them, and the JSON record.

A measurement is a generator of :class:`Figure`. A figure is met when the median over its rounds is within its bound.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from chairlift import __version__
from chairlift_lab.bench.machine import describe_machine

__all__ = ["Figure", "Measure", "at_least", "at_most", "context", "interleaved", "main", "missing", "peer", "ratios"]

ROOT = Path(__file__).parent.parent
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""Name of a clock -> function that returns its seconds. ``cpu`` counts the CPU seconds of all threads of this process,
so that other programs on the machine affect it less."""
PEERS = ("torch", "transformers", "trl", "datasets", "grain", "binpacking", "river", "torchdata", "numpy")


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity, with one value per round."""

    name: str
    values: tuple[float, ...] = ()
    """One value per round. Empty if the quantity could not be measured; ``note`` then has the reason."""
    bound: float | None = None
    sign: str = ""
    """``<=`` or ``>=``, the relation between the median and the bound. Empty for a figure without a bound."""
    unit: str = ""
    note: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool | None:
        """Whether the median is within the bound; None without a bound or without values."""
        if self.bound is None or not self.values:
            return None
        return self.median <= self.bound if self.sign == "<=" else self.median >= self.bound

    def row(self) -> str:
        """Line of the table for this figure."""
        demanded = "" if self.bound is None else f"{self.sign} {self.bound:g} {self.unit}"
        if not self.values:
            return f"  {self.name:58} {demanded:>14}   {self.note}"
        spread = f"{min(self.values):.4g} to {max(self.values):.4g}" if len(self.values) > 1 else ""
        verdict = {None: "", True: "met", False: "NOT MET"}[self.met]
        measured = f"{self.median:.4g} {self.unit}"
        return f"  {self.name:58} {demanded:>14}  {measured:>14}  {spread:22} {verdict:8}{self.note}".rstrip()


Measure = Callable[[argparse.Namespace], Iterator[Figure]]


def at_most(name: str, values: Sequence[float] | float, bound: float, unit: str = "", note: str = "") -> Figure:
    return Figure(name, _values(values), bound, "<=", unit, note)


def at_least(name: str, values: Sequence[float] | float, bound: float, unit: str = "", note: str = "") -> Figure:
    return Figure(name, _values(values), bound, ">=", unit, note)


def context(name: str, values: Sequence[float] | float, unit: str = "", note: str = "") -> Figure:
    """Create a figure that has no bound and is shown for context."""
    return Figure(name, _values(values), None, "", unit, note)


def _values(values: Sequence[float] | float) -> tuple[float, ...]:
    return tuple(values) if isinstance(values, Sequence) else (values,)


def peer(name: str) -> Any:
    """Import a package to compare with. Returns None if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def missing(name: str, package: str) -> Figure:
    """A figure without values, for a comparison whose package is not installed."""
    return Figure(name, note=f"{package}: not installed")


def interleaved(
    runs: Mapping[str, Callable[[], Any]],
    rounds: int,
    warm_up: bool = True,
    clock: str = "wall",
) -> dict[str, list[float]]:
    """Time the runs by one of ``CLOCKS``. Returns name of a run -> its seconds in each round. Each round executes all
    runs, in changing order, so that a slow minute of the machine affects all of them."""
    now = CLOCKS[clock]
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(-1 if warm_up else 0, rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            begin = now()
            runs[name]()
            if number >= 0:
                seconds[name].append(now() - begin)
    return seconds


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Value of ``over`` divided by the value of ``under``, per round."""
    return [a / b for a, b in zip(over, under, strict=True)]


def main(measures: Mapping[str, Measure], parser: argparse.ArgumentParser) -> None:
    """Run the measurements that ``--only`` names, print the table, and write it to the file of ``--json``. Exits with 1
    when a bound is missed."""
    parser.add_argument("--only", nargs="+", choices=measures, default=list(measures), metavar="ID")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="what interleaved runs are timed by: wall, for an idle machine, or cpu, the CPU seconds of this process",
    )
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # for generators that tests use, too
    print(f"  {'':58} {'demanded':>14}  {'measured':>14}  {'over the rounds':22}")
    results: dict[str, list[Figure]] = {}
    for name in args.only:
        print(f"{name}  {(measures[name].__doc__ or '').strip().splitlines()[0]}", flush=True)
        results[name] = []
        for figure in measures[name](args):
            results[name].append(figure)
            print(figure.row(), flush=True)
    if args.json is not None:
        _record(args.json, results)
    missed = [figure for figures in results.values() for figure in figures if figure.met is False]
    print(f"{len(missed)} bounds missed" if missed else "no bound missed")
    sys.exit(1 if missed else 0)


def _record(path: Path, results: Mapping[str, Sequence[Figure]]) -> None:
    """Write ``results`` to the file. Sections that were not measured in this run keep their earlier results."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    installed = {name: version for name in PEERS if (version := _version(name)) is not None}
    run = {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": commit,
        "chairlift": __version__,
        "python": platform.python_version(),
        "versions": installed,
        "load_average": round(os.getloadavg()[0], 2),
        "machine": dataclasses.asdict(describe_machine()),
    }
    record = json.loads(path.read_text()) if path.exists() else {"runs": [], "sections": {}}
    record["runs"].append(run)
    for name, figures in results.items():
        rows = [{**dataclasses.asdict(figure), "met": figure.met} for figure in figures]
        record["sections"][name] = {"run": len(record["runs"]) - 1, "figures": rows}
    kept = sorted({section["run"] for section in record["sections"].values()})
    record["runs"] = [record["runs"][number] for number in kept]
    for section in record["sections"].values():
        section["run"] = kept.index(section["run"])
    record["sections"] = dict(sorted(record["sections"].items()))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
