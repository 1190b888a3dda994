"""Measures how waiting times change when only a fraction of each step's prompt budget is used in policy order.

    python benchmarks/fair_share.py --json benchmarks/results/fair-share.json     # simulated, about ten minutes
    python benchmarks/fair_share.py --real                                        # the bundled model, one round

The script simulates a modelled machine at 0.85 of its capacity. The traffic is chat, code and documents, and samples in
the file formats of the Azure 2023, BurstGPT and Mooncake traces. Every round draws one trace per kind of traffic and
serves it with each fraction. It prints percentiles over the requests of all rounds, as ratios to the fraction 1, at
which all prompt tokens are used in policy order. ``--real`` serves six prompts of the largest length and then one of 8
tokens, on the bundled model with 512 tokens per step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from chairlift.config import EngineConfig
from chairlift_lab.replay.machines import Deployment, deploy, shape_from_name
from chairlift_lab.replay.replay import RequestTiming, serve_trace, simulated_core
from chairlift_lab.workload.formats import read_trace
from chairlift_lab.workload.lengths import LogNormal
from chairlift_lab.workload.trace import TracedRequest

FRACTIONS = (1.0, 0.75, 0.5, 0.25)
KINDS: dict[str, tuple[LogNormal, LogNormal]] = {
    "chat": (LogNormal(4.6, 0.8, 8, 1024), LogNormal(4.2, 0.9, 4, 512)),
    "code": (LogNormal(7.2, 1.0, 16, 7000), LogNormal(2.7, 0.9, 1, 300)),
    "documents": (LogNormal(7.6, 0.5, 256, 8000), LogNormal(4.5, 0.5, 16, 512)),
    "azure": (LogNormal(6.6, 1.1, 4, 7400), LogNormal(4.6, 0.9, 1, 1000)),
    "burstgpt": (LogNormal(5.6, 1.3, 4, 6000), LogNormal(4.9, 1.1, 2, 1500)),
    "mooncake": (LogNormal(8.4, 1.0, 256, 30000), LogNormal(4.9, 0.9, 4, 1000)),
}
"""Kind of traffic -> (lengths of prompts, lengths of outputs). The medians are those that the publishers of the traces
report."""


def drawn(kind: str, count: int, seed: int, rate: float, folder: Path) -> list[TracedRequest]:
    """Draw a trace with Poisson arrivals. A kind with a public file format is written in that format and read back."""
    rng = np.random.default_rng([seed, *kind.encode()])
    prompts, answers = (lengths.draw(rng, count) for lengths in KINDS[kind])
    times = np.cumsum(rng.exponential(1 / rate, count)) if math.isfinite(rate) else np.zeros(count)
    rows = [(float(t), int(p), int(a)) for t, p, a in zip(times, prompts, answers, strict=True)]
    if kind == "azure":
        lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
        for t, p, a in rows:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(1700158627 + t))
            lines.append(f"{stamp}.{int(t % 1 * 1e6):06d}0,{p},{a}")
        return _read(folder / "azure.csv", lines)
    if kind == "burstgpt":
        lines = ["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"]
        lines += [f"{t:.3f},ChatGPT,{p},{a},{p + a},Conversation log" for t, p, a in rows]
        return _read(folder / "burstgpt.csv", lines)
    if kind == "mooncake":
        lines = []
        for number, (t, p, a) in enumerate(rows):
            ids = [0, *range(1 + 100 * number, 100 * number - (-p // 512))]  # all share their first block
            lines.append(
                json.dumps({"timestamp": int(1000 * t), "input_length": p, "output_length": a, "hash_ids": ids})
            )
        return _read(folder / "mooncake.jsonl", lines)
    return [TracedRequest(arrival=t, prompt_tokens=p, output_tokens=a) for t, p, a in rows]


def _read(path: Path, lines: list[str]) -> list[TracedRequest]:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return read_trace(path)


@dataclasses.dataclass
class Figures:
    """Results of all rounds with one fraction of the prompt budget in policy order. Times are in seconds."""

    ttft: list[float] = dataclasses.field(default_factory=list)
    e2e: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    preempted: float = 0.0

    def row(self, base: Figures) -> dict[str, float]:
        """Each value divided by the same value of ``base``; only the preemption rate is not divided."""
        found = {}
        for name in ("ttft", "e2e"):
            own, old = getattr(self, name), getattr(base, name)
            for q in (50, 90, 99):
                found[f"{name}_p{q}"] = float(np.percentile(own, q) / np.percentile(old, q))
        return found | {"seconds": self.seconds / base.seconds, "preemption_rate": self.preempted}


def serve(
    deployment: Deployment, trace: list[TracedRequest], fraction: float, figures: Figures | None, memory: int | None
) -> float:
    """Serve a trace and add its results to ``figures``. Returns requests per second."""
    config = EngineConfig.from_flat({"policy_share": fraction, "kv_cache_memory_bytes": memory})
    core, limits = simulated_core(deployment, config)
    timings: list[RequestTiming] = []
    served = serve_trace(core, trace, limits, timings)
    if figures is not None:
        figures.ttft += [timing.times[0] - timing.request.arrival for timing in timings]
        figures.e2e += [timing.left - timing.request.arrival for timing in timings]
        figures.seconds += served.seconds
        figures.preempted = max(figures.preempted, served.preemption_rate)
    return served.requests_per_second


def simulated(
    machine: str, model: str, rounds: int, count: int, load: float, memory: int | None, kinds: list[str]
) -> dict[str, Any]:
    """Serve every kind of traffic with every fraction. Prints and returns the ratios."""
    deployment = deploy(machine, shape_from_name(model))
    report: dict[str, Any] = {"machine": machine, "model": model, "rounds": rounds, "count": count, "load": load}
    report["kv_cache_memory_bytes"] = memory
    print(f"{machine}, {model}, {rounds} rounds of {count} requests at {load} of capacity; ratios to a fraction of 1")
    head = ("traffic", "fraction", "ttft p50", "p90", "p99", "e2e p50", "p90", "p99", "seconds", "preempted")
    print(("{:10} {:>8} " + "{:>9}" * 8).format(*head))
    with tempfile.TemporaryDirectory() as name:
        for kind in kinds:
            full = serve(deployment, drawn(kind, count, 0, math.inf, Path(name)), 1.0, None, memory)
            figures = {fraction: Figures() for fraction in FRACTIONS}
            for seed in range(rounds):
                trace = drawn(kind, count, seed, load * full, Path(name))
                for fraction in FRACTIONS:
                    serve(deployment, trace, fraction, figures[fraction], memory)
            for fraction in FRACTIONS[1:]:
                row = figures[fraction].row(figures[1.0])
                report[f"{kind} {fraction}"] = row
                print(f"{kind:10} {fraction:8} " + "".join(f"{value:9.3f}" for value in row.values()), flush=True)
            report[f"{kind} 1.0"] = {"preemption_rate": figures[1.0].preempted}
            print(f"{kind:10} {1.0:8}  preempted {figures[1.0].preempted:.3f}")
    return report


def real() -> dict[str, Any]:
    """Time to the first token of a prompt of 8 tokens that arrives after six long prompts, on the bundled model."""
    from chairlift.base.sampling_params import SamplingParams
    from chairlift.engine.engine import Engine
    from chairlift.llm import LLM

    report: dict[str, Any] = {}
    for fraction in (1.0, 0.75, 1.0, 0.75):
        llm = LLM(policy_share=fraction, max_num_batched_tokens=512)
        engine: Engine = llm.engine
        longest = min(2000, engine.limits.max_model_len - 8)
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        for number in range(6):
            engine.add_request([10 + number] * longest, params, request_id=f"long {number}")
        engine.add_request([3] * 8, params, request_id="short")
        begin, steps = time.perf_counter(), 0
        served = False
        while not served:
            engine.step()
            steps += 1
            served = any(row.request_id.startswith("short") for row in engine.step_log[-1].rows)
        seconds = time.perf_counter() - begin
        report.setdefault(str(fraction), []).append({"step": steps, "seconds": seconds})
        print(f"fraction {fraction}: {longest} tokens x 6, then 8: served in step {steps}, after {seconds:.3f} s")
        engine.shutdown()
    return report


def main() -> None:
    """Read the command line, run the benchmark, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default="a100-80gb")
    parser.add_argument("--model", default="qwen2.5-7b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--load", type=float, default=0.85)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--kv-cache-memory-bytes", type=int, help="bytes of KV cache; a low number causes preemptions")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    settings = (given.rounds, given.count, given.load, given.kv_cache_memory_bytes, given.kinds)
    report = real() if given.real else simulated(given.machine, given.model, *settings)
    if given.json:
        given.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
