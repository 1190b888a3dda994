"""Trains the learned governor in the simulator, and writes its weights.

    python -m tools.train_governor chairlift/core/plugins/learned_governor.json

A policy is 30 numbers (``chairlift.core.plugins.learned_governor``). The cross-entropy method draws policies around a
mean, runs each on the same simulated traffic, and moves mean and spread to the best of them. It starts from a policy
that follows the forecasts without corrections. ``--seed`` determines the result. Training takes some minutes on one
core.

An episode is a trace of the laboratory on an L4, at 95 % of the rate that the default sustains, with all of the memory
or a third of it. Its score is the goodput (requests per second that met the laboratory's strict targets) relative to
the first policy. Each percent of preempted requests above 1.5 costs two percent of the score. The seeds are not those
of ``chairlift lab``, and the traffic and machines are not those of ``benchmarks/governor.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from chairlift.core.plugins.learned_governor import FEATURES, MOVES, LearnedGovernor, Weights
from chairlift_lab.laboratory.cell import CellTask, LabMachine, LabTrace, RateTask, find_capacity, serve_cell
from chairlift_lab.laboratory.knots import bundled_knots
from chairlift_lab.laboratory.plan import LabGroup, LabPlan
from chairlift_lab.laboratory.policies import chosen_policies
from chairlift_lab.laboratory.targets import LabTargets
from chairlift_lab.replay.machines import deploy, shape_from_name
from chairlift_lab.replay.replay import simulated_core

__all__ = ["TRACES", "Episode", "episodes", "main", "start", "train"]

_Vector = npt.NDArray[np.float64]

TRACES: Final = (
    *("azure-2023-chat", "azure-2024-code", "burstgpt", "mooncake-conversation"),
    *("mooncake-toolagent", "sharegpt", "tracelab-agent"),
)
"""Traces of the laboratory, each an episode with all of the memory and one with little."""
_MEMORY: Final = (1.0, 1 / 3)
_LOAD: Final = 0.95
_REQUESTS: Final = 60
_FIRST_SEED: Final = 10_000
"""The seeds of ``chairlift lab`` begin at 0."""
_GOVERNOR: Final = "chairlift.core.plugins.learned_governor:LearnedGovernor"


@dataclasses.dataclass(frozen=True, slots=True)
class Episode:
    """A trace on a machine, with the rate and the targets of the laboratory."""

    of: RateTask
    capacity: float
    targets: LabTargets

    def task(self, seed: int) -> CellTask:
        """The cell that every policy of a generation plays."""
        rate = self.capacity * _LOAD
        return CellTask(of=self.of, policy={"governor": _GOVERNOR}, rate=rate, seed=seed, targets=self.targets)


def episodes() -> Iterator[Episode]:
    """All episodes."""
    known = bundled_knots()
    machine = LabMachine(name="l4", deployment=deploy("l4", shape_from_name("llama-3.1-8b")))
    plan = LabPlan(
        policies=chosen_policies("fcfs"),
        traces=[LabTrace(name=name, knots=known[name]) for name in TRACES],
        machines=[dataclasses.replace(machine, memory=share) for share in _MEMORY],
        loads=[_LOAD],
        shares=[0.75],
        seeds=1,
        requests=_REQUESTS,
        settings={"max_num_seqs": 32},
    )
    groups: list[LabGroup] = list(plan.groups())
    for group in groups:
        task = plan.rate_task(group)
        yield Episode(task, *find_capacity(task))


def _play(task: CellTask, weights: Weights) -> tuple[float, float]:
    """Simulate a policy. Returns (requests per second that met the strict targets, fraction of preempted requests)."""
    config = task.of.config(task.policy)
    core, limits = simulated_core(task.of.machine.deployment, config)
    loop = core.governor
    if loop is None or not isinstance(loop.governor, LearnedGovernor):
        raise RuntimeError("the simulated engine has no learned governor to train")
    loop.governor.weights = weights
    figures, _ = serve_cell(core, limits, task.requests(), task, config.scheduler.max_num_batched_tokens)
    return figures.goodput_strict, figures.preemptions / task.of.count


def start() -> _Vector:
    """Weights of the first policy, in which rows, budget and watermark follow the forecast."""
    mean = np.zeros((len(MOVES), len(FEATURES)))
    for move, name in enumerate(("rows to those that fit", "budget to the best", "watermark to growth")):
        mean[move, FEATURES.index(name)] = 1.0
    return mean.ravel()


def _named(vector: _Vector) -> dict[str, list[float]]:
    rows = np.round(vector, 3).reshape(len(MOVES), len(FEATURES)).tolist()
    return dict(zip(MOVES, rows, strict=True))


def train(seed: int, generations: int, population: int, elite: int, played_on: list[Episode]) -> dict[str, list[float]]:
    """Train for ``generations`` rounds on these episodes, and return the weights."""
    rng = np.random.default_rng(seed)
    mean, spread = start(), np.full(start().size, 0.25)
    for generation in range(generations):
        tasks = [each.task(_FIRST_SEED + 100 * generation + index) for index, each in enumerate(played_on)]
        reference = [_play(task, _named(start())) for task in tasks]
        drawn = mean + spread * rng.standard_normal((population, mean.size))
        drawn[0] = mean
        scores = []
        for vector in drawn:
            played = [_play(task, _named(vector)) for task in tasks]
            each = [
                good / max(was, 0.05) - 2 * max(0.0, rate - 0.015)
                for (good, rate), (was, _) in zip(played, reference, strict=True)
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
    parser.add_argument("--generations", type=int, default=5)
    parser.add_argument("--population", type=int, default=10)
    parser.add_argument("--elite", type=int, default=3)
    args = parser.parse_args()
    begin = time.perf_counter()
    weights = train(args.seed, args.generations, args.population, args.elite, list(episodes()))
    record = {
        "made_by": "tools/train_governor.py",
        "episodes": [f"{name}, memory {share:.2g}" for share in _MEMORY for name in TRACES],
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
