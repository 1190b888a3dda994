"""Compares governors, which change settings while serving, with the best fixed settings, in simulation.

    python benchmarks/governor.py --json benchmarks/results/governor.json

Each trace is replayed with the fixed settings of a grid (rows and watermark, then the budget near their best), then
with each governor, which starts from the widest settings of the grid and does not know the trace. No trace, machine or
seed was used to train the learned governor or to tune the rules; docs/governor.md describes the kinds of traffic that
were. The best fixed setting has the highest score among those that preempt fewer than 2 % of the requests. It is chosen
after the whole trace is known, which no operator can do. The score is output tokens per second, or, on traces with
latency targets, the fraction of requests that met them.

Everything is *modelled, unvalidated*: machines are those of ``chairlift_lab.replay.machines``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import chairlift
from chairlift.config import EngineConfig
from chairlift_lab.replay.machines import MODELLED, Deployment, deploy, shape_from_name
from chairlift_lab.replay.replay import ServedTrace, serve_trace, simulated_core
from chairlift_lab.workload.arrivals import parse_arrivals
from chairlift_lab.workload.trace import TracedRequest, draw_trace

ROWS = (4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64, 96, 256)
WATERMARKS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4)
USUAL_BUDGET, OTHER_BUDGETS, WIDEST_BUDGET = 256, (128, 512, 1024, 2048), 2048
MOST_PREEMPTED = 0.02
GOVERNORS = {"rules": "rules", "learned": "chairlift.core.plugins.learned_governor:LearnedGovernor"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A trace on a modelled machine."""

    name: str
    machine: str
    model: str
    parts: tuple[tuple[str, str, int], ...]
    """(workload, arrivals, number of requests) for each part. Parts follow one another; with ``mixed`` they run at the
    same time."""
    kv_tokens: int
    mixed: bool = False
    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def trace(self, seed: int) -> list[TracedRequest]:
        """The requests of the case."""
        requests: list[TracedRequest] = []
        begin = 0.0
        for index, (workload, arrivals, count) in enumerate(self.parts):
            part = draw_trace(workload, parse_arrivals(arrivals), count, seed + index)
            moved = [
                dataclasses.replace(each, arrival=begin + each.arrival, ttft_ms=self.ttft_ms, tpot_ms=self.tpot_ms)
                for each in part
            ]
            requests += moved
            begin = 0.0 if self.mixed else moved[-1].arrival
        return sorted(requests, key=lambda request: request.arrival)


CASES = (
    Case(
        name="chat in bursts",
        machine="h100-sxm",
        model="llama-3-8b",
        parts=(("chat", "onoff:250:10:15", 1500),),
        kv_tokens=12_000,
    ),
    Case(
        name="long prompts",
        machine="l40s",
        model="llama-3.1-8b",
        parts=(("summarize", "gamma:4:0.5", 300),),
        kv_tokens=24_000,
    ),
    Case(
        name="long answers, tight memory",
        machine="turin-9755",
        model="qwen2.5-0.5b",
        parts=(("write", "poisson:12", 400),),
        kv_tokens=10_000,
    ),
    Case(
        name="chat, then long answers, then long prompts",
        machine="a10",
        model="qwen2.5-7b",
        parts=(("chat", "poisson:12", 500), ("write", "poisson:1", 150), ("summarize", "poisson:2", 150)),
        kv_tokens=12_000,
    ),
    Case(
        name="chat among long prompts, with targets",
        machine="a100-40gb",
        model="llama-3-8b",
        parts=(("chat", "poisson:14", 500), ("summarize", "poisson:1.2", 45)),
        kv_tokens=40_000,
        mixed=True,
        ttft_ms=2000.0,
        tpot_ms=22.0,
    ),
)


def deployment(case: Case) -> Deployment:
    """Description of what to simulate: the model of the case on the machine of the case."""
    return deploy(case.machine, shape_from_name(case.model))


def serve(case: Case, trace: list[TracedRequest], **settings: Any) -> dict[str, Any]:
    """Run one simulation. Returns the values that the benchmark compares."""
    flat = {"num_kv_blocks": case.kv_tokens // 16, "governor_ttft_ms": case.ttft_ms, "governor_tpot_ms": case.tpot_ms}
    core, limits = simulated_core(deployment(case), EngineConfig.from_flat(flat | settings))
    served = serve_trace(core, trace, limits)
    return figures(served) | {"decisions": 0 if core.governor is None else core.governor.num_decisions}


def figures(served: ServedTrace) -> dict[str, Any]:
    """Name -> value of the results of one simulation, for the record."""
    return {
        "score": served.output_tokens_per_second if served.goodput is None else served.goodput,
        "preemption_rate": served.preemption_rate,
        "output_tokens_per_second": served.output_tokens_per_second,
        "goodput": served.goodput,
        "ttft_p50": served.ttft.p50,
        "ttft_p99": served.ttft.p99,
        "tpot_p50": served.tpot.p50,
        "tpot_p99": served.tpot.p99,
    }


def best_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The run with the highest score among the runs with few preemptions, or among all runs if none has few."""
    healthy = [run for run in runs if run["preemption_rate"] < MOST_PREEMPTED]
    return max(healthy or runs, key=lambda run: run["score"])


def compare(case: Case, seed: int) -> dict[str, Any]:
    """Run all fixed settings and all governors on one trace."""
    trace = case.trace(seed)

    def fixed(rows: int, tokens: int, watermark: float) -> dict[str, Any]:
        settings = {"max_num_seqs": rows, "max_num_batched_tokens": tokens, "admission_watermark": watermark}
        return {"settings": settings, **serve(case, trace, **settings)}

    runs = [fixed(rows, USUAL_BUDGET, watermark) for rows in ROWS for watermark in WATERMARKS]
    near = best_of(runs)["settings"]
    runs += [fixed(near["max_num_seqs"], tokens, near["admission_watermark"]) for tokens in OTHER_BUDGETS]
    best, widest = best_of(runs), fixed(ROWS[-1], WIDEST_BUDGET, WATERMARKS[0])
    result: dict[str, Any] = {
        "case": dataclasses.asdict(case),
        "requests": len(trace),
        "best_fixed": best,
        "best_fixed_however_many_preempted": max(runs, key=lambda run: run["score"]),
        "default": widest,
        "grid": [[*run["settings"].values(), run["score"], run["preemption_rate"]] for run in runs],
        "governors": {},
    }
    for name, governor in GOVERNORS.items():
        run = serve(case, trace, max_num_seqs=ROWS[-1], max_num_batched_tokens=WIDEST_BUDGET, governor=governor)
        run["ratio"] = run["score"] / best["score"]
        run["within_5_percent"] = run["ratio"] >= 0.95 and run["preemption_rate"] < MOST_PREEMPTED
        result["governors"][name] = run
    return result


def lines(result: dict[str, Any]) -> list[str]:
    """Lines of the table for a case."""
    best, rows = result["best_fixed"], []
    shown = [("widest, no governor", result["default"]), ("best fixed", best), *result["governors"].items()]
    for name, run in shown:
        at = run.get("settings")
        where = "" if at is None or run is not best else " ({}, {}, {})".format(*at.values())
        ratio = run["score"] / best["score"]
        rows.append(
            f"  {name + where:<28} {run['score']:>9.4g}  {ratio:>6.1%} of the best, {run['preemption_rate']:>6.1%}"
            f" preempted, TTFT p50 {run['ttft_p50']:.2f} s, TPOT p99 {run['tpot_p99'] * 1000:.0f} ms"
        )
    return [result["case"]["name"], *rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=23)
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    begin, results = time.perf_counter(), []
    for case in CASES:
        if args.only in case.name:
            results.append(compare(case, args.seed))
            print("\n".join(lines(results[-1])), flush=True)
    print(f"{time.perf_counter() - begin:.0f} s")
    if args.json is not None:
        record = {
            "chairlift": chairlift.__version__,
            "benchmark": "governor",
            "command": "python benchmarks/governor.py --json benchmarks/results/governor.json",
            "validity": MODELLED,
            "seed": args.seed,
            "results": results,
        }
        args.json.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
