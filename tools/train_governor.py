"""Trains the learned governor in the simulator, and writes its weights.

    python -m tools.train_governor chairlift/core/plugins/learned_governor.json

A policy is 30 numbers (``chairlift.core.plugins.learned_governor``). The cross-entropy method draws policies around a
mean, runs each on the same simulated traffic, and moves mean and spread to the best of them. It starts from a policy
that follows the forecasts without corrections. ``--seed`` determines the result. Training takes some minutes on one
core.

The score of an episode is the fraction of requests that met their latency targets (output tokens per second if there
are no targets), relative to the first policy. Each percent of preempted requests above 1.5 costs two percent of the
score. The traffic differs from that of ``benchmarks/governor.py`` in machine, rates, seeds and memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from chairlift.config import EngineConfig
from chairlift.core.plugins.learned_governor import FEATURES, MOVES, LearnedGovernor, Weights
from chairlift_lab.replay.machines import deploy, shape_from_name
from chairlift_lab.replay.replay import serve_trace, simulated_core
from chairlift_lab.workload.arrivals import parse_arrivals
from chairlift_lab.workload.trace import TracedRequest, draw_trace

__all__ = ["EPISODES", "main", "start", "train"]

_Vector = npt.NDArray[np.float64]

EPISODES: tuple[dict[str, Any], ...] = (
    {"workload": "chat", "arrivals": "poisson:24", "count": 300, "tokens": 6000},
    {"workload": "chat", "arrivals": "onoff:20:15:10", "count": 300, "tokens": 12000, "tpot_ms": 22.0},
    {"workload": "write", "arrivals": "poisson:1.5", "count": 160, "tokens": 12000},
    {"workload": "write", "arrivals": "onoff:2:40:60", "count": 160, "tokens": 8000},
    {"workload": "summarize", "arrivals": "poisson:3", "count": 160, "tokens": 14000},
    {"workload": "assistant", "arrivals": "gamma:20:0.4", "count": 300, "tokens": 9000, "ttft_ms": 4000.0},
    {"workload": "summarize", "arrivals": "onoff:3:30:30", "count": 120, "tokens": 24000, "tpot_ms": 26.0},
)
"""Training episodes: kinds of traffic, each with the number of tokens in the KV cache (``tokens``)."""


def _trace(episode: dict[str, Any], seed: int) -> list[TracedRequest]:
    trace = draw_trace(episode["workload"], parse_arrivals(episode["arrivals"]), episode["count"], seed)
    promises = {name: episode.get(name) for name in ("ttft_ms", "tpot_ms")}
    return [dataclasses.replace(request, **promises) for request in trace]


def _play(episode: dict[str, Any], trace: list[TracedRequest], weights: Weights) -> tuple[float, float]:
    """Simulate a policy. Returns (fraction of requests that met their targets, or output tokens per second; fraction of
    preempted requests)."""
    deployment = deploy("rtx-4090", shape_from_name("qwen2.5-7b"))
    settings = {
        "max_num_seqs": 96,
        "max_num_batched_tokens": 2048,
        "num_kv_blocks": episode["tokens"] // 16,
        "governor": "chairlift.core.plugins.learned_governor:LearnedGovernor",
        "governor_ttft_ms": episode.get("ttft_ms"),
        "governor_tpot_ms": episode.get("tpot_ms"),
    }
    core, limits = simulated_core(deployment, EngineConfig.from_flat(settings))
    loop = core.governor
    if loop is None or not isinstance(loop.governor, LearnedGovernor):
        raise RuntimeError("the simulated engine has no learned governor to train")
    loop.governor.weights = weights
    served = serve_trace(core, trace, limits)
    good = served.output_tokens_per_second if served.goodput is None else served.goodput
    return good, served.preemption_rate


def start() -> _Vector:
    """Weights of the first policy, in which rows, budget and watermark follow the forecast."""
    mean = np.zeros((len(MOVES), len(FEATURES)))
    for move, name in enumerate(("rows to those that fit", "budget to the best", "watermark to growth")):
        mean[move, FEATURES.index(name)] = 1.0
    return mean.ravel()


def _named(vector: _Vector) -> dict[str, list[float]]:
    rows = np.round(vector, 3).reshape(len(MOVES), len(FEATURES)).tolist()
    return dict(zip(MOVES, rows, strict=True))


def train(seed: int, generations: int, population: int, elite: int) -> dict[str, list[float]]:
    """Train for ``generations`` rounds, and return the weights."""
    rng = np.random.default_rng(seed)
    mean, spread = start(), np.full(start().size, 0.25)
    for generation in range(generations):
        traces = [_trace(episode, 10_000 + 100 * generation + index) for index, episode in enumerate(EPISODES)]
        reference = [_play(episode, trace, _named(start())) for episode, trace in zip(EPISODES, traces, strict=True)]
        drawn = mean + spread * rng.standard_normal((population, mean.size))
        drawn[0] = mean
        scores = []
        for vector in drawn:
            played = [_play(episode, trace, _named(vector)) for episode, trace in zip(EPISODES, traces, strict=True)]
            each = [
                speed / max(was, 0.05) - 2 * max(0.0, rate - 0.015)
                for (speed, rate), (was, _) in zip(played, reference, strict=True)
            ]
            scores.append(float(np.mean(each)))
        best = np.argsort(scores)[::-1][:elite]
        mean, spread = drawn[best].mean(axis=0), np.maximum(drawn[best].std(axis=0), 0.05)
        print(f"generation {generation}: mean {scores[0]:.3f}, best {max(scores):.3f}", flush=True)
    return _named(mean)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--generations", type=int, default=10)
    parser.add_argument("--population", type=int, default=14)
    parser.add_argument("--elite", type=int, default=4)
    args = parser.parse_args()
    begin = time.perf_counter()
    weights = train(args.seed, args.generations, args.population, args.elite)
    record = {
        "made_by": "tools/train_governor.py",
        "seed": args.seed,
        "generations": args.generations,
        "population": args.population,
        "elite": args.elite,
        "features": list(FEATURES),
        "weights": weights,
    }
    args.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
