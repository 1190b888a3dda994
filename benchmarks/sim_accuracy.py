"""Measures the accuracy of ``chairlift sim`` by comparison with real runs on this machine.

    python benchmarks/make_random_model.py /tmp/q05
    python benchmarks/sim_accuracy.py --model /tmp/q05 --json benchmarks/results/sim-accuracy.json

The real engine times the steps of a short calibration, and a cost model is fitted to them. Each of the following rounds
serves a seeded trace on the real engine, and simulates the same trace with the same settings. The simulation uses only
the calibration's cost model. A second simulation of each trace uses a cost model from the steps of the other rounds,
like an engine that has served similar traffic for a while. Last, a real engine serves the first trace in real time with
steps that sleep for the time of the cost model. The difference between this run and the simulation is the error of the
simulated loop, not of the cost model.

The script prints simulated values divided by measured values. ``busy`` is the fraction of the processors that other
programs used during each round. If it is not near 0, the ratios say little about the simulator.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from chairlift import LLM, __version__
from chairlift.core.scheduler.cost_model import CostModel
from chairlift.engine.clock import SystemClock
from chairlift.engine.input_processor import ModelLimits
from chairlift.models.model_files import read_config
from chairlift_lab.bench.machine import describe_machine
from chairlift_lab.replay.calibrate import StepTimes, calibrate, fit_steps
from chairlift_lab.replay.machines import Deployment, ModelShape
from chairlift_lab.replay.replay import ServedTrace, replay, serve_trace, simulated_core
from chairlift_lab.workload.arrivals import parse_arrivals
from chairlift_lab.workload.trace import TracedRequest, draw_trace

FIGURES = ("output_tokens_per_second", "ttft.p50", "ttft.p99", "tpot.p50", "tpot.p99", "e2e.p50", "e2e.p99")


def figures(served: ServedTrace) -> dict[str, float]:
    """Name -> value of the results that are compared."""
    values = {}
    for name in FIGURES:
        value: Any = served
        for part in name.split("."):
            value = getattr(value, part)
        values[name] = value
    return values


def cpu_times() -> tuple[float, float]:
    """(processor seconds of the whole machine, processor seconds of this process)."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    worked = sum(map(int, fields)) - int(fields[3]) - int(fields[4])
    return worked / os.sysconf("SC_CLK_TCK"), time.process_time()


def traces(args: argparse.Namespace) -> list[list[TracedRequest]]:
    """One trace per round, each with its own seed."""
    return [
        draw_trace(args.workload, parse_arrivals(args.arrivals), args.num_prompts, seed) for seed in range(args.rounds)
    ]


def deployment(cost: CostModel, llm: LLM, shape: ModelShape) -> Deployment:
    """Description of this machine with the model, and the engine's KV cache."""
    cache = llm.engine.core.executor.cache_groups[0].num_blocks * llm.engine.core.executor.block_size
    return Deployment(
        machine="this one",
        model=shape.name,
        cost=cost,
        kv_bytes_per_token=shape.kv_bytes,
        kv_memory_bytes=cache * shape.kv_bytes,
        max_model_len=llm.max_model_len,
        validity="fitted",
    )


def simulate(
    cost: CostModel, trace: list[TracedRequest], llm: LLM, shape: ModelShape
) -> tuple[dict[str, float], float]:
    """Simulate a trace. Returns (simulated results, simulated seconds per second of computing)."""
    begin = time.perf_counter()
    served = replay(trace, llm.config, deployment(cost, llm, shape)).served
    return figures(served), served.seconds / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--workload", default="chat")
    parser.add_argument("--arrivals", default="poisson:1.5")
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    llm = LLM(
        args.model,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=512,
        kv_cache_memory_bytes=2 << 30,
        threads=args.threads,
    )
    network = read_config(args.model)
    shape, limits = ModelShape.of(args.model.name, network), ModelLimits(network.vocab_size, llm.max_model_len)
    core = llm.engine.core
    calibration = calibrate(core, limits, args.max_num_seqs)
    real, steps, busy = [], [], []
    for trace in traces(args):
        times = StepTimes()
        core.events.subscribe("times", times)
        before, begin = cpu_times(), SystemClock().now()
        real.append(figures(serve_trace(core, trace, limits)))
        after, seconds = cpu_times(), SystemClock().now() - begin
        steps.append(times.steps)
        others = (after[0] - before[0]) - (after[1] - before[1])
        busy.append(max(0.0, others) / seconds / (os.cpu_count() or 1))
    report(args, llm, shape, calibration, real, steps, busy)


def report(
    args: argparse.Namespace,
    llm: LLM,
    shape: ModelShape,
    calibration: StepTimes,
    real: list[dict[str, float]],
    steps: list[Any],
    busy: list[float],
) -> None:
    """Simulate the measured traces, print the ratios, and write the record."""
    calibrated, rounds = fit_steps(calibration.steps, shape), []
    for index, trace in enumerate(traces(args)):
        others = [step for other, taken in enumerate(steps) if other != index for step in taken]
        row: dict[str, Any] = {"busy": busy[index], "measured": real[index]}
        models = {"calibration": calibrated} | ({"other rounds": fit_steps(others, shape)} if others else {})
        print(f"round {index}, busy {busy[index]:.0%}")
        for name, cost in models.items():
            simulated, speed = simulate(cost, trace, llm, shape)
            errors = cost.errors(steps[index])
            row[name] = {
                "simulated": simulated,
                "ratio": {figure: simulated[figure] / real[index][figure] for figure in FIGURES},
                "step_error_median": errors[len(errors) // 2],
                "step_error_p90": errors[int(0.9 * len(errors))],
                "steps_seconds_ratio": sum(cost.step_seconds(step) for step, _ in steps[index])
                / sum(seconds for _, seconds in steps[index]),
                "simulated_seconds_per_second": speed,
            }
            ratios = "  ".join(f"{figure} {row[name]['ratio'][figure]:.2f}" for figure in FIGURES)
            print(f"  fitted on {name}: {ratios}")
            print(
                f"    steps: median error {row[name]['step_error_median']:.1%}, p90 {row[name]['step_error_p90']:.1%},"
                f" their sum {row[name]['steps_seconds_ratio']:.2f}; {speed:,.0f} simulated seconds per second"
            )
        rounds.append(row)
    core, limits = simulated_core(deployment(calibrated, llm, shape), llm.config, SystemClock())
    asleep = figures(serve_trace(core, traces(args)[0], limits))
    loop = {figure: rounds[0]["calibration"]["simulated"][figure] / asleep[figure] for figure in FIGURES}
    print("the loop alone: " + "  ".join(f"{figure} {loop[figure]:.3f}" for figure in FIGURES))
    summary = {
        name: {figure: statistics.median(row[name]["ratio"][figure] for row in rounds) for figure in FIGURES}
        for name in rounds[0]
        if name not in ("busy", "measured")
    }
    for name, ratios in summary.items():
        print(f"median of the rounds, {name}: " + "  ".join(f"{figure} {ratios[figure]:.2f}" for figure in FIGURES))
    if args.json is not None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        command = f"sim_accuracy.py --model {args.model} --workload {args.workload} --arrivals {args.arrivals}"
        command += f" --num-prompts {args.num_prompts} --rounds {args.rounds} --max-num-seqs {args.max_num_seqs}"
        command += f" --threads {args.threads}" if args.threads else ""
        record = {
            "command": command,
            "commit": commit,
            "chairlift": __version__,
            "python": platform.python_version(),
            "machine": dataclasses.asdict(describe_machine()),
            "calibration_steps": len(calibration.steps),
            "median_ratio": summary,
            "loop_ratio": loop,
            "rounds": rounds,
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
