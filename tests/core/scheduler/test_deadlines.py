"""A request is dropped only if it cannot meet its deadline any more."""

from __future__ import annotations

import math

import pytest

from chairlift.base.outputs import FinishReason
from chairlift.base.sampling_params import SamplingParams
from chairlift.config import EngineConfig
from chairlift.core.request import Request, Service
from chairlift.core.scheduler.deadlines import Deadlines, Estimate
from chairlift.engine.core import EngineCore
from chairlift.engine.input_processor import InputProcessor
from chairlift_lab.replay.machines import deploy, shape_from_name
from chairlift_lab.replay.replay import simulated_core


def engine(machine: str = "ryzen-9950x", shape: str = "qwen2.5-0.5b") -> tuple[EngineCore, InputProcessor]:
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
def test_cached_prompt_tokens_take_no_time_in_the_estimate(cached: bool) -> None:
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


@pytest.mark.parametrize("shorter_first", [False, True])
def test_a_prompt_size_without_observations_refuses_no_request(shorter_first: bool) -> None:
    """A GPU computes a long prompt in less time than any number of short ones would let one expect."""
    core, door = engine("h100-sxm", "llama-3-8b")
    chat = SamplingParams(max_tokens=5, ignore_eos=True)
    for index in range(50 * shorter_first):
        core.add(door.prepare(f"short {index}", [index + 10] * 30, chat, core.clock.now()))
        serve(core)
    for index in range(5):
        params = SamplingParams(max_tokens=2, ignore_eos=True, ttft_ms=1200)
        core.add(door.prepare(f"long {index}", [index + 100] * 4000, params, core.clock.now()))
        assert serve(core)[f"long {index}"][0] is FinishReason.LENGTH
    assert core.scheduler.num_past_deadline == 0


def test_an_observed_prompt_size_refuses_a_hopeless_request() -> None:
    core, door = engine()
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    core.add(door.prepare("first", list(range(10, 4010)), params, 0.0))
    serve(core)
    now = core.clock.now()
    hopeless = SamplingParams(max_tokens=2, ignore_eos=True, ttft_ms=1000 * core.costs.model.prefill_seconds(4000) / 3)
    core.add(door.prepare("again", list(range(9, 4009)), hopeless, now))
    reason, end = serve(core)["again"]
    assert (reason, end) == (FinishReason.DEADLINE, pytest.approx(now))


def test_a_request_without_a_deadline_is_not_estimated() -> None:
    asked: list[str] = []
    deadlines = Deadlines(lambda request: asked.append(request.request_id) or Estimate())  # type: ignore[func-returns-value]
    deadlines.add(Request("plain", [1, 2], max_tokens=3))
    deadlines.add(Request("promised", [1, 2], max_tokens=3, service=Service(first_token_by=5.0)))
    assert asked == ["promised"]


@pytest.mark.parametrize(
    ("min_tokens", "runs", "num_out", "lost_at"),
    [
        (0, False, 0, 1.5),
        (5, False, 0, 1.1),
        (0, True, 0, 2.0),
        (5, True, 0, 1.6),
        (5, True, 2, 1.7),
        (5, True, 7, 2.0),
    ],
)
def test_a_request_is_lost_if_it_would_be_late_even_alone(
    min_tokens: int, runs: bool, num_out: int, lost_at: float
) -> None:
    """Half a second to the first token, and a tenth for each that must follow."""
    one = Request("a", [1, 2], max_tokens=20, min_tokens=min_tokens, service=Service(finish_by=2.0))
    deadlines = Deadlines(lambda request: Estimate(0.5, 0.5, None, 0.1, 0.1))
    deadlines.add(one)
    one.slot = 0 if runs else -1
    one.token_ids += [7] * num_out
    assert list(deadlines.lost(lost_at - 0.01)) == []
    assert list(deadlines.lost(lost_at + 0.01)) == [one]


def test_a_request_is_in_doubt_if_an_answer_of_usual_length_would_be_late() -> None:
    one = Request("a", [1, 2], max_tokens=20, service=Service(finish_by=2.0))
    deadlines = Deadlines(lambda request: Estimate(0.5, 0.5, 10, 0.1, 0.1))
    deadlines.add(one)
    assert one.start_by == pytest.approx(0.6)
    assert (list(deadlines.lost(0.59)), deadlines.doubtful()) == ([], [])
    one.slot = 0  # what runs keeps its place, however late
    assert (list(deadlines.lost(1.2)), deadlines.doubtful()) == ([], [])
    one.slot = -1
    deadlines.add(one)
    assert (list(deadlines.lost(0.61)), deadlines.doubtful()) == ([], [one])
    assert one.start_by == math.inf
    assert (list(deadlines.lost(1.51)), deadlines.doubtful()) == ([one], [])
