"""A simulated prefill that may stop between operators."""

from __future__ import annotations

import pytest

from chairlift.config import EngineConfig
from chairlift.core.plugins.flow_prefill import FlowPrefill
from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.engine.core import EngineCore
from chairlift.errors import ConfigError
from chairlift.executor.local import LocalExecutor
from chairlift.models.hashlm import HashLM
from chairlift_lab.replay.machines import Deployment
from chairlift_lab.replay.replay import RequestTiming, serve_trace, simulated_core
from chairlift_lab.replay.traced_request import TracedRequest
from tests.core.plugins.toys import SHARES, LinearModel

PATH = "chairlift.core.plugins.flow_prefill:FlowPrefill"


class Halves(FlowPrefill):
    operators = 2


class OneMillisecondPerToken(LinearModel):
    def __init__(self) -> None:
        super().__init__(0.0, 0.0, 0.001)

    def step_seconds(self, step: StepFeatures) -> float:
        return max(1e-9, super().step_seconds(step) - step.num_decodes)


def first_tokens(path: str, share: float) -> tuple[float, float]:
    """Times of the first tokens of A, 1,000 tokens that arrive at 0 s, and of B, 100 tokens that arrive at 0.25 s and
    want theirs by 0.45 s."""
    deployment = Deployment(
        machine="toy",
        model="toy",
        cost=OneMillisecondPerToken(),
        kv_bytes_per_token=1,
        kv_memory_bytes=100_000,
        max_model_len=4096,
    )
    settings = {"scheduling_policy": path, "policy_share": share, "max_num_seqs": 8}
    core, limits = simulated_core(deployment, EngineConfig.from_flat(settings))
    trace = [
        TracedRequest(arrival=0.0, prompt_tokens=1000, output_tokens=1),
        TracedRequest(arrival=0.25, prompt_tokens=100, output_tokens=1, ttft_ms=200.0),
    ]
    timings: list[RequestTiming] = []
    serve_trace(core, trace, limits, timings)
    one, other = (timing.first for timing in sorted(timings, key=lambda timing: timing.index))
    return one, other


@pytest.mark.parametrize("share", SHARES)
def test_an_urgent_prompt_runs_after_the_present_operator(share: float) -> None:
    """A has 10 operators of 100 ms. B runs from 300 to 400 ms, and A ends at 1,100 ms. With halves, B runs from 500 to
    600 ms and is late."""
    assert first_tokens(PATH, share) == (pytest.approx(1.1, abs=0.01), pytest.approx(0.4, abs=0.01))
    halves = first_tokens(f"{__name__}:Halves", share)
    assert halves == (pytest.approx(1.1, abs=0.01), pytest.approx(0.6, abs=0.01))


def test_a_real_executor_refuses_it() -> None:
    config = EngineConfig.from_flat({"scheduling_policy": PATH}).scheduler
    model = HashLM([], 16, 20, 64)
    executor = LocalExecutor(model, num_slots=4, max_model_len=64, block_size=16)
    with pytest.raises(ConfigError, match=r"flow_prefill ends steps between operators.*chairlift sim"):
        EngineCore(executor, config, max_model_len=64)
