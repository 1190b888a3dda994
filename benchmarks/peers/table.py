r"""The table of Chairlift and other engines on the CPU: 16, 8 and 4 bits, 1 to 64 requests, long and short prompts.

    python benchmarks/peers/table.py --cache DIR --install
    python benchmarks/peers/table.py --cache DIR --cells q05-16-1-512 q05-4-1-512
    python benchmarks/peers/table.py --cache DIR --minutes 60
    python benchmarks/peers/table.py --render

DIR holds an environment for each engine (``--install`` makes those that are missing), the models with random weights,
and their conversions. A cell is named SHAPE-BITS-REQUESTS-PROMPT. Its engines are child processes that take turns: each
is stopped while another computes. A cell has three rounds or more (one for a rival that is far behind), and the
machine's limits are measured before and after each turn. Finished cells are saved at once in results/PROCESSOR.json, so
an interrupted run continues where it was; a cell that is there is measured again only with ``--again``. An engine that
cannot be installed or started is recorded with the reason.

All requests of a cell arrive at once. Prompts have a log-normal distribution around PROMPT tokens, and answers one
around 64 tokens: the lengths are its quantiles, so a cell has the same requests everywhere. Decoding is greedy, the end
of sequence is ignored, and there is no prefix caching. The docstring of each ``run_ENGINE.py`` describes the settings
of the engine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import math
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import run_chairlift
import run_ik_llama_cpp
import run_llama_cpp
import run_openvino
import run_vllm
import torch
from compare import HERE, hardware
from protocol import Child, Place, Requests, Unsupported

sys.path.insert(0, str(HERE.parents[1]))

from benchmarks.floor import floor_seconds, model_cost
from benchmarks.make_random_model import SHAPES as CONFIGS
from chairlift.kernels.cpu.library import ThreadPool
from chairlift_lab.bench.limits import LimitsNow
from chairlift_lab.bench.machine import describe_machine
from tools.markdown import replaced, table

RESULTS = HERE / "results"
README = HERE.parent / "README.md"
BEGIN = "<!-- made by benchmarks/peers/table.py --render -->"
OURS = "chairlift"
ENGINES: dict[str, ModuleType] = {
    OURS: run_chairlift,
    "vllm": run_vllm,
    "openvino": run_openvino,
    "llama_cpp": run_llama_cpp,
    "ik_llama_cpp": run_ik_llama_cpp,
}
"""Name of an engine, of its environment below DIR and of its setup script -> its adapter."""
TITLES = {"vllm": "vLLM", "openvino": "OpenVINO GenAI", "llama_cpp": "llama.cpp", "ik_llama_cpp": "ik_llama.cpp"}
SHAPES = {"q05": "qwen2.5-0.5b", "s135": "smollm-135m"}
BITS = (16, 8, 4)
WEIGHT_BYTES = {16: 2.0, 8: 1 + 2 / 32, 4: 0.5 + 2 / 32}
"""Bits -> bytes of a weight, with a scale of 16 bits for each 32 weights."""
ANSWER = 64
"""Median number of output tokens."""
ROUNDS = (3, 7)
"""Least and most rounds of a cell. Cells with short turns have more."""
LONG = 15.0
"""A cell ends after the least number of rounds if each engine has computed for this many seconds."""
FAR_BEHIND = 2.0
"""A rival that takes this many times as long as the best rival in a cell's first round has no further turns in it."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of the table: a model's shape and precision, and a number of requests."""

    shape: str
    bits: int
    requests: int
    prompt: int

    @property
    def name(self) -> str:
        return f"{self.shape}-{self.bits}-{self.requests}-{self.prompt}"

    @property
    def group(self) -> tuple[str, int, int]:
        """Cells of one group share started engines."""
        return self.shape, self.bits, self.prompt

    def draw(self) -> Requests:
        """The requests: the same on every machine."""
        rng = random.Random(self.requests * self.prompt)
        prompts, answers = quantiles(self.requests, self.prompt, 0.4), quantiles(self.requests, ANSWER, 0.6)
        rng.shuffle(answers)
        return [
            ([rng.randrange(1_000, 30_000) for _ in range(length)], count)
            for length, count in zip(prompts, answers, strict=True)
        ]

    @property
    def longest(self) -> int:
        return max(len(prompt) + count for prompt, count in self.draw())


def quantiles(count: int, median: int, sigma: float) -> list[int]:
    """``count`` quantiles of a log-normal distribution, rounded; one is the median."""
    normal = statistics.NormalDist()
    return [round(median * math.exp(sigma * normal.inv_cdf((i + 0.5) / count))) for i in range(count)]


def every_cell() -> list[Cell]:
    """All cells, those first that say the most per minute: few requests and the larger model. 64 prompts of 2,048 take
    longer than all other cells together, so they are last."""
    cells = [
        Cell(shape, bits, requests, prompt)
        for shape in SHAPES
        for bits in BITS
        for requests in (1, 4, 16, 64)
        for prompt in (512, 2048)
    ]
    return sorted(cells, key=lambda cell: cell.requests * cell.prompt > 64 * 1024)


# -- measuring ---------------------------------------------------------------------------------------------------------


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name of this kind of processor: vendor, family and model, such as "amd-25-17"."""
    fields: dict[str, str] = {}
    for line in cpuinfo.read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    vendor = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}.get(fields.get("vendor_id", ""), "other")
    return f"{vendor}-{fields.get('cpu family', '0')}-{fields.get('model', '0')}"


def limits_now(bits: int) -> LimitsNow:
    machine = describe_machine()
    dtype = torch.bfloat16 if bits == 16 else torch.int8
    return LimitsNow(ThreadPool(machine.processors), machine, machine.isas[-1], dtype)


def install(cache: Path) -> None:
    """Make the environments and models that are missing. What fails is told, and left out."""
    for name in ENGINES:
        if name == OURS or (cache / name / "bin" / "python").exists():
            continue
        log = cache / f"{name}-install.log"
        with log.open("wb") as messages:
            script = ["sh", str(HERE / f"setup_{name}.sh"), str(cache / name), sys.executable]
            code = subprocess.run(script, stdout=messages, stderr=messages, check=False).returncode
        if code:
            shutil.rmtree(cache / name, ignore_errors=True)
            print(f"{name} could not be installed; its messages are in {log}", flush=True)
    for shape, published in SHAPES.items():
        if not (cache / "models" / shape).exists():
            script = [sys.executable, str(HERE.parent / "make_random_model.py"), str(cache / "models" / shape)]
            subprocess.run([*script, "--shape", published], check=True)


@contextlib.contextmanager
def started(names: Sequence[str], cells: Sequence[Cell], cache: Path, reasons: dict[str, str]) -> Iterator[list[Child]]:
    """The engines of one group of cells, stopped. An engine that does not start is added to ``reasons``."""
    first, children = cells[0], list[Child]()
    work = cache / "work"
    work.mkdir(exist_ok=True)
    rows, longest = max(cell.requests for cell in cells), max(cell.longest for cell in cells)
    try:
        for name in names:
            print(f"{first.shape}, {first.bits} bits: starting {name}", flush=True)
            place = Place(cache / name, cache / "models" / first.shape, work, rows, -(-longest // 64) * 64)
            try:
                if name != OURS and not (cache / name / "bin" / "python").exists():
                    raise Unsupported("it is not installed")
                command = ENGINES[name].command(place, first.bits)
                children.append(Child(name, command, work / f"{name}.log"))
            except (Unsupported, SystemExit) as reason:
                reasons[f"{name} {first.bits} bits"] = str(reason)
                print(f"{name} is left out: {reason}", flush=True)
        yield children
    finally:
        for child in children:
            child.kill()


def measure(
    cell: Cell, children: list[Child], limits: LimitsNow, cache: Path, reasons: dict[str, str]
) -> dict[str, list[dict[str, float]]]:
    """Engine -> results of its turns. The order of the engines alternates. A rival that ends in a turn is added to
    ``reasons``, and leaves ``children``. One that is FAR_BEHIND keeps the result of its only turn."""
    requests = cache / "work" / "requests.json"
    requests.write_text(json.dumps(cell.draw()))
    turns: dict[str, list[dict[str, float]]] = {child.name: [] for child in children}
    least, most = ROUNDS
    before, number = limits(), 0
    while number < least or (number < most and sum(turn["seconds"] for turn in turns[OURS]) < LONG):
        behind = far_behind(turns) if number else ()
        for child in list(children if number % 2 else reversed(children)):
            if child.name in behind:
                continue
            try:
                turn = child.run(requests)
            except (SystemExit, BrokenPipeError) as reason:
                if child.name == OURS:
                    raise
                reasons[f"{child.name} {cell.bits} bits"] = f"{reason}, in cell {cell.name}"
                print(f"{child.name} is left out: {reason}", flush=True)
                children.remove(child)
                child.kill()
                del turns[child.name]
                continue
            print(f"{cell.name}, round {number + 1}: {child.name} {turn['seconds']:.2f} s", flush=True)
            after = limits()
            turn["bandwidth"] = (before.bandwidth + after.bandwidth) / 2
            turn["peak"] = (before.peak + after.peak) / 2
            before = after
            turns[child.name].append({name: float(f"{value:.5g}") for name, value in turn.items()})
        number += 1
    return turns


def far_behind(turns: dict[str, list[dict[str, float]]]) -> list[str]:
    """Rivals whose first turn of a cell took FAR_BEHIND times as long as that of the best rival."""
    first = {name: each[0]["seconds"] for name, each in turns.items() if name != OURS and each}
    return [name for name, seconds in first.items() if seconds > FAR_BEHIND * min(first.values())]


def run(cells: Sequence[Cell], names: Sequence[str], cache: Path, file: Path, until: float) -> None:
    """Measure cells until a time (``time.monotonic``), and save each when it is done."""
    record: dict[str, Any] = {"cells": {}, "engines": {}, "left_out": {}}
    if file.exists():
        record = json.loads(file.read_text())
    record["hardware"] = hardware()
    for group in dict.fromkeys(cell.group for cell in cells):
        if time.monotonic() > until:
            return
        members = [cell for cell in cells if cell.group == group]
        with started(names, members, cache, record["left_out"]) as children:
            if OURS not in [child.name for child in children]:
                raise SystemExit(f"Chairlift did not start; see {cache / 'work'}")
            limits = limits_now(group[1])
            for child in children:
                record["engines"][f"{child.name} {group[1]} bits"] = child.about
                record["left_out"].pop(f"{child.name} {group[1]} bits", None)
            for cell in members:
                if time.monotonic() > until:
                    return
                turns = measure(cell, children, limits, cache, record["left_out"])
                entry = {"date": datetime.date.today().isoformat(), "commit": commit(), "turns": turns}
                record["cells"][cell.name] = entry
                file.parent.mkdir(exist_ok=True)
                file.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
                print(cell.name, *summary(cell, turns)[2:], sep="  ", flush=True)


def commit() -> str:
    head = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(head, cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()


# -- the table ---------------------------------------------------------------------------------------------------------


def share_of_floor(cell: Cell, turn: dict[str, float]) -> float:
    """Minimum time of a turn's requests at the limits around it, divided by the time that was taken."""
    size = WEIGHT_BYTES[cell.bits]
    cost = model_cost(CONFIGS[SHAPES[cell.shape]])
    peak_at_16 = turn["peak"] * size / 2  # the formula multiplies by 2 / size; the peak is of these operands
    return floor_seconds(cell.draw(), *cost, turn["bandwidth"], peak_at_16, size) / turn["seconds"]


def summary(cell: Cell, turns: dict[str, list[dict[str, float]]]) -> tuple[str, ...]:
    """A row of the table: requests, prompt, output tokens/s of each engine, ratio to the best rival with its range, and
    the share of the floor."""
    tokens = sum(count for _, count in cell.draw())
    medians = {name: statistics.median(turn["seconds"] for turn in each) for name, each in turns.items()}
    rates = [f"{tokens / medians[name]:,.3g}" if name in medians else "-" for name in ENGINES]
    rivals = {name: seconds for name, seconds in medians.items() if name != OURS}
    ratio = "-"
    if rivals:
        best = min(rivals, key=lambda name: rivals[name])
        rounds = [b["seconds"] / a["seconds"] for a, b in zip(turns[OURS], turns[best], strict=True)]
        value = rivals[best] / medians[OURS]
        mark = "**" if value < 1 else ""
        ratio = f"{mark}{value:.2f}x{mark} ({min(rounds):.2f} to {max(rounds):.2f}), {TITLES[best]}"
    shares = [share_of_floor(cell, turn) for turn in turns[OURS]] if cell.shape == "q05" else []
    share = f"{100 * statistics.median(shares):.0f} %" if shares else ""
    return f"{cell.requests}", f"{cell.prompt:,}", *rates, ratio, share


def rendered() -> str:
    """The tables of all processors in RESULTS, in Markdown."""
    parts = []
    header = (
        "bits",
        "requests",
        "prompt",
        "Chairlift",
        *TITLES.values(),
        "ratio to the best rival",
        "share of the floor",
    )
    for file in sorted(RESULTS.glob("*.json")):
        record = json.loads(file.read_text())
        machine = record["hardware"]
        parts.append(f"#### {file.stem}: {machine['cpu']}, {machine['cores']} cores, {', '.join(machine['isa'])}")
        for shape, published in SHAPES.items():
            rows = [
                (f"{cell.bits}", *summary(cell, record["cells"][cell.name]["turns"]))
                for cell in sorted(every_cell(), key=lambda cell: (-cell.bits, cell.requests, cell.prompt))
                if cell.shape == shape and cell.name in record["cells"]
            ]
            if rows:
                parts += [f"{published}, output tokens/s:", table(header, rows)]
        versions = {name.split()[0]: about["version"] for name, about in record["engines"].items()}
        parts.append("Versions: " + ", ".join(f"{TITLES.get(k, 'Chairlift')} {v}" for k, v in versions.items()) + ".")
        parts += [f"Left out: {name}: {reason}." for name, reason in sorted(record["left_out"].items())]
    return "\n\n".join(parts)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, help="folder for environments and models, outside of the repository")
    parser.add_argument("--install", action="store_true", help="make the environments and models that are missing")
    parser.add_argument("--cells", nargs="+", metavar="CELL", help="cells to measure; default: all that are missing")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--minutes", type=float, default=180, help="begin no cell after this time")
    parser.add_argument("--again", action="store_true", help="measure cells again that the file has")
    parser.add_argument("--processor", default=processor_name(), help="name of the file of results")
    parser.add_argument("--render", action="store_true", help="write the tables into benchmarks/README.md")
    args = parser.parse_args()
    if not args.render and args.cache is None:
        parser.error("--cache names the folder for environments and models; give one, or --render")
    if OURS not in args.engines:
        parser.error(f"--engines must contain {OURS}, with which the others are compared")
    return args


def main() -> None:
    args = parse_args()
    if args.render:
        README.write_text(replaced(README.read_text(), BEGIN, rendered()))
        return
    # SIGTERM raises KeyboardInterrupt, so that started() ends the children, which have process groups of their own.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cache = args.cache.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    if args.install:
        install(cache)
    cells = {cell.name: cell for cell in every_cell()}
    unknown = [name for name in args.cells or () if name not in cells]
    if unknown:
        raise SystemExit(f"there is no cell {', '.join(unknown)}; cells are {', '.join(cells)}")
    file = RESULTS / f"{args.processor}.json"
    done = json.loads(file.read_text())["cells"] if file.exists() and not args.again else {}
    chosen = [cells[name] for name in args.cells or cells if name not in done]
    run(chosen, args.engines, cache, file, time.monotonic() + 60 * args.minutes)


if __name__ == "__main__":
    main()
