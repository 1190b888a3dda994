"""The output processor knows enough of a running request, and keeps nothing of an ended one that is not needed."""

from __future__ import annotations

import pytest

from chairlift.base.outputs import FinishReason, Logprob
from chairlift.base.sampling_params import SamplingParams
from chairlift.base.turn_cache import ResumedTurn, TurnCache
from chairlift.engine.core_outputs import CoreOutputs, FinishedSequence, Progress, TokenRecord
from chairlift.engine.input_processor import PreparedRequest
from chairlift.engine.output_processor import OutputProcessor, RequestPhase, RequestProgress, RequestState
from chairlift.engine.process.messages import FrameReader, Step, encode
from chairlift.metrics.stats import EngineStats, Histogram, RequestStats

PROMPT = [1, 2, 3]


def begun(stats: RequestStats, n: int = 1) -> tuple[OutputProcessor, RequestState]:
    """A request that came at 100 and was in its first step at 102."""
    outputs = OutputProcessor(None, (), stats)
    prepared = PreparedRequest("r", None, PROMPT, SamplingParams(n=n), 0, 10, arrival_time=100.0)
    state = outputs.add(prepared, stream=True)
    outputs.take(CoreOutputs(joined=[(prepared.sequence_ids[0], 2, 102.0)]), 102.5)
    return outputs, state


def test_the_times_of_a_request_are_told_apart() -> None:
    stats = RequestStats()
    outputs, _ = begun(stats)
    for now in (105.0, 106.0, 108.0):
        outputs.take(CoreOutputs(["r"], [7]), now)
    outputs.finish([FinishedSequence("r", FinishReason.LENGTH, num_preemptions=1)], 109.0)

    def only(times: Histogram) -> float:
        assert sum(times.counts) == 1
        return times.total

    assert (only(stats.queue), only(stats.prefill), only(stats.decode)) == (2.0, 3.0, 4.0)
    assert (only(stats.e2e), only(stats.inference), only(stats.ttft)) == (9.0, 7.0, 5.0)
    assert only(stats.time_per_output_token) == 2.0
    assert (sum(stats.inter_token.counts), stats.inter_token.total) == (2, 3.0)
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generation_tokens) == (3, 2, 3)
    assert (stats.request_generation_tokens.total, stats.request_preemptions.total) == (3, 1)


def test_the_first_running_answer_tells_the_progress_of_a_request() -> None:
    outputs, state = begun(RequestStats(), n=2)
    assert state.progress() == RequestProgress(RequestPhase.PREFILL, 2)
    outputs.take(CoreOutputs(["r#0", "r#1"], [7, 7], joined=[("r#1", 3, 103.0)]), 103.5)
    assert (state.metrics.first_scheduled_time, state.num_cached_tokens) == (102.0, 2)
    outputs.take(CoreOutputs(["r#1"], [7], progress=[Progress("r#1", 2, 1, True)]), 104.0)
    assert state.progress() == RequestProgress(RequestPhase.DECODE, 3)
    outputs.finish([FinishedSequence("r#0", FinishReason.STOP)], 104.0)
    assert state.progress() == RequestProgress(RequestPhase.PREEMPTED, 1)
    outputs.finish([FinishedSequence("r#1", FinishReason.STOP)], 105.0)
    assert state.finished and state.progress() == RequestProgress(RequestPhase.PREEMPTED, 1)


def test_the_sources_of_a_prompt_are_those_of_its_first_step() -> None:
    stats = RequestStats()
    outputs = OutputProcessor(None, (), stats)
    state = outputs.add(PreparedRequest("r", None, PROMPT, SamplingParams(), 0, 10, arrival_time=100.0), stream=True)
    outputs.take(CoreOutputs(joined=[("r", 3, 102.0)], fetched=[("r", 1, 2)]), 102.5)
    outputs.take(CoreOutputs(["r"], [7], joined=[("r", 5, 103.0)], fetched=[("r", 0, 5)]), 103.5)  # it has moved
    assert (state.num_cached_tokens, state.num_host_tokens, state.num_disk_tokens) == (3, 1, 2)
    assert (stats.prompt_tokens, stats.cached_tokens, stats.host_tokens, stats.disk_tokens) == (3, 3, 1, 2)


def test_what_a_turn_found_of_its_cache_is_that_of_its_first_step() -> None:
    outputs, state = begun(RequestStats())
    first = ResumedTurn("before", ("search",), 4.5, TurnCache.EXPIRED)
    other = ResumedTurn("elsewhere", ("search",), 9.0, TurnCache.KEPT)
    frame = CoreOutputs(resumed=[("r", first), ("gone", other)])
    frame.merge(CoreOutputs(["r"], [7], joined=[("r", 0, 102.0)], resumed=[("r", other)]))  # it has moved
    (step,) = FrameReader().feed(encode(Step(frame, EngineStats())))
    assert isinstance(step, Step)
    outputs.take(step.outputs, 102.5)
    assert state.metrics.resumed == first


@pytest.mark.parametrize("by_the_core", [False, True])
def test_only_answers_ended_by_a_stop_string_are_charged_by_the_last_frame(by_the_core: bool) -> None:
    outputs, state = begun(RequestStats())
    frame = CoreOutputs(["r"], [7], decoding=[("r", {"prefill": 1.0}, (0.0, 0.0, 0.0))], decode_seconds=(5.0, 0.0, 0.0))
    outputs.take(frame, 105.0)
    told = {"prefill": 1.0, "decode": 2.0, "preempted": 3.0} if by_the_core else None
    outputs.finish([FinishedSequence("r", FinishReason.STOP, causes=told)], 107.0)
    assert state.metrics.causes is not None
    charged = {cause: seconds for cause, seconds in state.metrics.causes.items() if seconds}
    assert charged == {**(told or {"prefill": 1.0, "decode": 5.0}), "delivery": 1.0}


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_end_of_sequence_is_a_stop_reason_only_with_ignore_eos(ignore_eos: bool) -> None:
    outputs = OutputProcessor(None, (9,))
    params = SamplingParams(stop_token_ids=[9], ignore_eos=ignore_eos)
    state = outputs.add(PreparedRequest("r", None, PROMPT, params, 0, 10, arrival_time=100.0), stream=True)
    outputs.take(CoreOutputs(["r"], [9], joined=[("r", 2, 102.0)]), 102.5)
    outputs.finish([FinishedSequence("r", FinishReason.STOP, 9)], 103.0)
    (answer,) = state.answers
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, 9 if ignore_eos else None)


@pytest.mark.parametrize("num_read", [0, 2])
def test_log_probabilities_that_were_delivered_are_not_kept(num_read: int) -> None:
    outputs = OutputProcessor(None, ())
    prepared = PreparedRequest("r", None, PROMPT, SamplingParams(logprobs=1, prompt_logprobs=1), 0, 10)
    state = outputs.add(prepared, stream=True)
    scored = [TokenRecord([token, 9], [-1.0, -0.5], 2) for token in (2, 3)]
    for _ in range(2):  # a recompute brings them again
        outputs.take(CoreOutputs(prompt_logprobs=[("r", 1, scored[:1]), ("r", 2, scored[1:])]), 1.0)
    delivered = []
    for token in (5, 6, 7, 8):
        outputs.take(CoreOutputs(["r"], [token], [TokenRecord([token, 9], [-2.0, -0.5], 2)]), 2.0)
        if token < 5 + num_read:
            delivered.append(state.delta())
            assert state.answers[0].logprobs == []
    outputs.finish([FinishedSequence("r", FinishReason.LENGTH)], 3.0)
    delivered.append(state.delta())
    told = [entry for output in delivered if output for answer in output.outputs for entry in answer.logprobs or ()]
    assert told == [{token: Logprob(-2.0, 2), 9: Logprob(-0.5, 1)} for token in (5, 6, 7, 8)]
    assert delivered[-1] is not None
    assert delivered[-1].prompt_logprobs == [None, *({t: Logprob(-1.0, 2), 9: Logprob(-0.5, 1)} for t in (2, 3))]
