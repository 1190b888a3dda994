"""A machine whose costs are known, and the records that a benchmark of it writes."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from chairlift.config import EngineConfig
from chairlift.core.scheduler.cost_model import CostModel, StepFeatures
from chairlift_lab.replay.machines import MODELS, Deployment, deploy
from chairlift_lab.replay.replay import RequestTiming, serve_trace, simulated_core
from chairlift_lab.replay.traced_request import TracedRequest

SHAPE = MODELS["smollm-135m"]
SHEET = deploy("turin-9755", SHAPE)
"""Prior of the fits in tests: much faster than the known machine."""
SETTINGS = {"preset": "vllm", "enable_prefix_caching": False, "max_num_seqs": 16, "max_num_batched_tokens": 512}
BASE, ROW, PROMPT, CONTEXT, PAIR = 8e-3, 3e-4, 1.5e-4, 4e-7, 3e-8


class NoisyCost(CostModel):
    """Costs of the known machine: linear in the features, with a seeded error of a few per cent."""

    def __init__(self, noise: float, seed: int = 0) -> None:
        super().__init__()
        self._noise, self._random = noise, random.Random(seed)

    def exact(self, step: StepFeatures) -> float:
        seconds = BASE + ROW * step.num_decodes + PROMPT * step.prefill_tokens
        return seconds + CONTEXT * step.context_tokens + PAIR * step.prefill_context

    def step_seconds(self, step: StepFeatures) -> float:
        return self.exact(step) * (1 + self._random.gauss(0, self._noise))


def machine(noise: float = 0.02, seed: int = 0, **changes: Any) -> Deployment:
    return dataclasses.replace(SHEET, machine="known", cost=NoisyCost(noise, seed), **changes)


def traffic(
    rate: float, count: int, seed: int, prompts: tuple[int, int] = (20, 900), outputs: tuple[int, int] = (8, 60)
) -> list[TracedRequest]:
    """Poisson arrivals with uniformly distributed lengths."""
    rng = random.Random(seed)
    now, trace = 0.0, []
    for _ in range(count):
        lengths = {"prompt_tokens": rng.randint(*prompts), "output_tokens": rng.randint(*outputs)}
        trace.append(TracedRequest(arrival=now, **lengths))
        now += rng.expovariate(rate)
    return trace


def serve(trace: Sequence[TracedRequest], deployment: Deployment, **settings: Any) -> list[RequestTiming]:
    core, limits = simulated_core(deployment, EngineConfig.from_flat(SETTINGS | settings))
    timings: list[RequestTiming] = []
    serve_trace(core, trace, limits, timings, request_seconds=deployment.request_seconds)
    return sorted(timings, key=lambda timing: timing.index)


def record(timings: Sequence[RequestTiming]) -> dict[str, Any]:
    """The record that ``vllm bench serve --save-result --save-detailed`` writes, with its clock."""
    clock = 7000.0
    return {
        "backend": "vllm",
        "model_id": "smollm",
        "request_rate": 2.0,
        "max_concurrency": None,
        "input_lens": [timing.request.prompt_tokens for timing in timings],
        "output_lens": [timing.tokens for timing in timings],
        "ttfts": [timing.first - timing.request.arrival for timing in timings],
        "itls": [
            [now - before for before, now in zip(timing.times, timing.times[1:], strict=False)] for timing in timings
        ],
        "start_times": [clock + timing.request.arrival for timing in timings],
        "errors": ["" for _ in timings],
    }
