"""Fits the H100 and the H200 to the recorded runs of ``gpu.py`` and ``gpu_steps.py``, and writes machine files.

    python benchmarks/gpu_fits.py --json benchmarks/results/gpu-fits.json

A record of ``gpu.py`` has the seconds of a whole run of known requests, and the GPU's speeds of copies and products. So
little can be fitted: reads and products have the recorded speeds, and one number is chosen so that the simulated run
takes as long as the measured one. For the H100 it is the fixed time per step. For the H200, this time follows from the
recorded decode step with one row, and the number is the factor of the time that decode rows take for their positions.
Each GPU has runs of two models. The fit to one model is tested on the other one, and on the other recorded steps.
Prices of rows and of prompts are not identified, and follow from the speeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu import draw

from chairlift.config import EngineConfig
from chairlift.core.scheduler.cost_model import CostModel, StepFeatures
from chairlift_lab.fitting.polish import scaled
from chairlift_lab.replay.machines import MACHINES, MODELS, Deployment, Machine, deploy, write_deployment
from chairlift_lab.replay.replay import serve_trace, simulated_core
from chairlift_lab.replay.traced_request import TracedRequest

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
RUNS = {
    "h100-sxm": {"qwen2.5-0.5b": "gpu-qwen2.5-0.5b-h100.json", "qwen3-0.6b": "gpu-qwen3-0.6b-h100.json"},
    "h200": {"qwen2.5-0.5b": "gpu-qwen2.5-0.5b.json", "qwen3-0.6b": "gpu-qwen3-0.6b.json"},
}
STEPS = {"h200": "gpu-steps-h200.json"}
SETTINGS = {
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "enable_prefix_caching": False,
    "num_lookahead_steps": 1,
    "policy_share": 0.75,
}


def measured(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return record


def with_speeds(machine: Machine, record: dict[str, Any]) -> Machine:
    """The machine with the speeds that were measured in the same run."""
    limits = record["limits"]
    return dataclasses.replace(
        machine,
        bandwidth_share=limits["read_bytes"][0]["median"] / machine.bandwidth,
        operation_share=limits["product_operations"][0]["median"] / machine.operations,
    )


def seconds(deployment: Deployment, trace: list[TracedRequest]) -> float:
    """Simulated seconds of the run."""
    core, limits = simulated_core(deployment, EngineConfig.from_flat(SETTINGS))
    return serve_trace(core, trace, limits).seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """A machine, and the factor of the time that decode rows take for their positions."""

    machine: Machine
    decode: float = 1.0

    def deployed(self, model: str) -> Deployment:
        """The model on the machine."""
        deployment = deploy(self.machine.name, MODELS[model])
        cost = CostModel(MODELS[model].on(self.machine))
        return dataclasses.replace(deployment, cost=scaled(cost, {"decode": self.decode}))


def bisected(seconds_of: Callable[[float], float], wanted: float, low: float, high: float) -> float:
    """The number from ``low`` to ``high`` for which a rising function is ``wanted``."""
    for _ in range(12):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds_of(middle) < wanted else (low, middle)
    return (low * high) ** 0.5


def fitted(machine: Machine, model: str, wanted: float, trace: list[TracedRequest]) -> Fit:
    """The fit whose simulated run takes ``wanted`` seconds."""
    record = measured(STEPS[machine.name]) if machine.name in STEPS else None
    if record is None:

        def by_step(step_seconds: float) -> float:
            return seconds(Fit(dataclasses.replace(machine, step_seconds=step_seconds)).deployed(model), trace)

        return Fit(dataclasses.replace(machine, step_seconds=bisected(by_step, wanted, 1e-6, 0.02)))
    one_row = record[model][0]["median_ms"]["all"] / 1e3
    bare = Fit(dataclasses.replace(machine, step_seconds=1e-9)).deployed(model).cost
    machine = dataclasses.replace(machine, step_seconds=one_row - bare.step_seconds(StepFeatures(1, record["context"])))
    return Fit(machine, bisected(lambda decode: seconds(Fit(machine, decode).deployed(model), trace), wanted, 0.1, 30))


def step_errors(fit: Fit, model: str) -> dict[str, float]:
    """Rows -> predicted / measured - 1 of a decode step with as many rows, if there are measured steps."""
    if fit.machine.name not in STEPS:
        return {}
    record = measured(STEPS[fit.machine.name])
    cost, context = fit.deployed(model).cost, record["context"]
    return {
        str(row["rows"]): cost.step_seconds(StepFeatures(row["rows"], row["rows"] * context))
        / (row["median_ms"]["all"] / 1e3)
        - 1
        for row in record[model]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=Path, default=HERE / "machines", help="directory for the machine files")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.machines.mkdir(exist_ok=True)
    trace = [
        TracedRequest(arrival=0.0, prompt_tokens=len(prompt), output_tokens=count) for prompt, count in draw(256, 1024)
    ]
    rows = []
    for name, files in RUNS.items():
        records = {model: measured(file) for model, file in files.items()}
        took = {model: record["summary"]["chairlift"]["median_seconds"] for model, record in records.items()}
        for model, other in (tuple(files), tuple(reversed(files))):
            fit = fitted(with_speeds(MACHINES[name], records[model]), model, took[model], trace)
            test = seconds(fit.deployed(other), trace) / took[other] - 1
            sheet = seconds(deploy(name, MODELS[other]), trace) / took[other] - 1
            steps = step_errors(fit, model)
            step_seconds = fit.machine.step_seconds
            by_rows = ", ".join(f"{count} rows {error:+.0%}" for count, error in steps.items()) or "-"
            print(
                f"{name}, fitted to {model}: {step_seconds * 1e3:.3f} ms per step, decode x {fit.decode:.2f}; {other}"
                f" {test:+.1%}, data sheet {sheet:+.1%}; steps {by_rows}",
                flush=True,
            )
            words = f"fitted to the time of 1 run; on 1 run of {other} held back, whole run {test:+.0%}"
            if steps:
                worst = max(list(steps.values())[1:], key=abs)
                words = f"fitted to the time of 1 run and 1 step; on {len(steps) - 1} steps held back {worst:+.0%}"
            deployment = dataclasses.replace(fit.deployed(model), machine=f"{name}, fitted", validity=words)
            write_deployment(args.machines / f"{name}-{model}.json", deployment)
            row = {"machine": name, "model": model, "step_seconds": step_seconds, "decode": fit.decode, "other": other}
            row |= {"error": test, "data_sheet_error": sheet, "step_errors": steps}
            rows.append(row)
    if args.json is not None:
        args.json.write_text(json.dumps({"command": " ".join(sys.argv), "fits": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
