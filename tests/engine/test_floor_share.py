"""The share of the machine's floor: on a machine of known speed it is known, and wasted rows do not raise it."""

from __future__ import annotations

import pytest
import torch

from chairlift.config import EngineConfig
from chairlift.core.scheduler.cost_model import CostModel, Roofline, StepFeatures
from chairlift.engine.floor_share import FloorShare
from chairlift.kernels.cpu.library import ThreadPool, supported_isas
from chairlift.kernels.roof import quick_roof
from chairlift_lab.replay.machines import Deployment
from chairlift_lab.replay.replay import serve_trace, simulated_core
from chairlift_lab.replay.traced_request import TracedRequest
from tests.native import needs_kernels

PRICES = Roofline(weight_seconds=0.02, token_seconds=0.001, context_seconds=1e-9, pair_seconds=1e-12, step_seconds=1e-6)


def least_seconds(step: StepFeatures, sampled: int) -> float:
    """Half of what a step of the simulated machine takes, by its rows."""
    return 0.5 * max(0.02, 0.001 * (step.num_decodes + step.prefill_tokens))


def share_of(lengths: list[int], **settings: object) -> float:
    deployment = Deployment(
        machine="m",
        model="x",
        cost=CostModel(PRICES),
        kv_bytes_per_token=1000,
        kv_memory_bytes=10**9,
        max_model_len=2048,
    )
    core, limits = simulated_core(deployment, EngineConfig.from_flat({"max_num_seqs": 64, **settings}))
    assert core.stats().floor_share is None
    core.times.floor = FloorShare(least_seconds)
    serve_trace(core, [TracedRequest(arrival=0.0, prompt_tokens=2, output_tokens=each) for each in lengths], limits)
    share = core.stats().floor_share
    assert share is not None
    return share


def test_a_machine_that_takes_twice_its_floor_is_at_half_of_it() -> None:
    assert share_of([40] * 16) == pytest.approx(0.5, abs=0.01)


def test_rows_that_are_held_are_no_work() -> None:
    """Above the ridge a step costs by its rows: most of those of a static batch have ended."""
    lengths = [4] * 48 + [200] * 2
    static, continuous = share_of(lengths, batching="static"), share_of(lengths)
    assert static < 0.3
    assert continuous == pytest.approx(0.5, abs=0.02)


def test_the_share_forgets_old_steps() -> None:
    share = FloorShare(lambda step, sampled: 1.0)
    for seconds in [1.0] * 50 + [4.0] * 50:
        share.landed(StepFeatures(1, 1), 1, 0, seconds)
    assert share.share == pytest.approx(0.25, abs=0.01)
    share.landed(StepFeatures(1, 1), 1, 0, 0.0)
    assert share.share == pytest.approx(0.25, abs=0.01)


@needs_kernels
def test_the_quick_roof_has_a_plausible_bandwidth_and_peak() -> None:
    pool = ThreadPool(1)
    roof = quick_roof(pool, supported_isas()[-1], torch.bfloat16)
    pool.close()
    assert 1e8 < roof.bandwidth < 1e13
    assert 1e8 < roof.peak < 1e15
