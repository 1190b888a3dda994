"""What is said to be lost is lost: nobody is dropped who could have made it."""

from __future__ import annotations

import pytest

from chairlift.config import EngineConfig
from chairlift.engine.core import EngineCore
from chairlift.engine.input_processor import InputProcessor
from chairlift.outputs import FinishReason
from chairlift.sampling_params import SamplingParams
from chairlift.sim.machines import deploy, shape_from_name
from chairlift.sim.replay import simulated_core


def engine() -> tuple[EngineCore, InputProcessor]:
    settings = {"scheduling_policy": "priority", "late_requests": "drop", "num_kv_blocks": 2000, "max_num_seqs": 8}
    core, limits = simulated_core(
        deploy("ryzen-9950x", shape_from_name("qwen2.5-0.5b")), EngineConfig.from_flat(settings)
    )
    return core, InputProcessor(limits, None, core.kv, seed=0)


def serve(core: EngineCore) -> dict[str, tuple[FinishReason, float]]:
    """Why and when each ended."""
    ended = {}
    while core.has_work:
        outputs = core.step()
        for each in outputs.finished if outputs is not None else ():
            ended[each.sequence_id] = (each.finish_reason, core.clock.now())
    return ended


@pytest.mark.parametrize("cached", [True, False])
def test_what_the_prefix_cache_has_takes_no_time(cached: bool) -> None:
    core, door = engine()
    prompt = list(range(10, 4010))
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    core.add(door.prepare("first", prompt if cached else prompt[::-1], params, 0.0))
    serve(core)
    now = core.clock.now()
    soon = SamplingParams(max_tokens=1, ignore_eos=True, ttft_ms=1000 * core.costs.model.prefill_seconds(4000) / 2)
    core.add(door.prepare("again", prompt, soon, now))
    reason, end = serve(core)["again"]
    assert reason is (FinishReason.LENGTH if cached else FinishReason.DEADLINE)
    assert end - now <= soon.ttft_ms / 1000  # type: ignore[operator]
    assert core.scheduler.num_past_deadline == (not cached)


def test_answers_of_one_request_share_its_prompt() -> None:
    core, door = engine()
    now = core.clock.now()
    whole = core.costs.model.prefill_seconds(4000)
    params = SamplingParams(n=4, max_tokens=2, ignore_eos=True, deadline_ms=1000 * 1.6 * whole)
    core.add(door.prepare("r", list(range(10, 4010)), params, now))
    ended = serve(core)
    assert [reason for reason, _ in ended.values()] == [FinishReason.LENGTH] * 4
    assert max(end for _, end in ended.values()) - now < 1.6 * whole
