"""The loop over HashLM: what comes out, when, and what one request's misfortune does to the others."""

from __future__ import annotations

from typing import Any

import pytest

from chairlift.base.outputs import FinishReason
from chairlift.base.sampling_params import SamplingParams
from chairlift.base.step_batch import SampledTokens, StepBatch
from chairlift.engine.input_processor import Prompt
from chairlift.errors import PromptTooLongError, RequestError
from chairlift.models.hashlm import HashLM
from tests.engine.make import EOS, alone, drain, greedy, make_engine

PROMPTS = [[1, 2, 3], [4] * 9, [1, 2, 3, 4, 5, 6, 7], [8]]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("text", [False, True])
def test_streamed_outputs_grow_to_the_answer_of_a_request_alone(depth: int, text: bool) -> None:
    engine = make_engine(num_lookahead_steps=depth, text=text)
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, greedy(5 + number), request_id=f"r{number}")
    for name, outputs in drain(engine).items():
        prompt, params = PROMPTS[int(name[1:])], greedy(5 + int(name[1:]))
        last = outputs[-1].outputs[0]
        assert last.token_ids == alone(prompt, params)
        assert last.finish_reason is FinishReason.LENGTH
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, len(last.token_ids) + 1))
        for output in outputs:
            answer = output.outputs[0]
            assert last.token_ids[: len(answer.token_ids)] == answer.token_ids
            assert last.text.startswith(answer.text)
            assert (answer.finish_reason is not None) == output.finished
        assert bool(last.text) == text


def test_without_stream_only_the_end_is_reported() -> None:
    engine = make_engine()
    engine.add_request([1, 2], greedy(6), request_id="a", stream=False)
    engine.add_request([1, 2], greedy(6), request_id="b")
    seen = drain(engine)
    assert [len(seen["a"]), len(seen["b"])] == [1, 6]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_all_answers_are_distinct_and_those_of_requests_alone(depth: int) -> None:
    engine = make_engine(num_lookahead_steps=depth, max_num_seqs=8)
    params = greedy(9, n=5)
    engine.add_request([3, 1, 4, 1, 5], params, request_id="a")
    outputs = drain(engine)["a"]
    assert [answer.index for answer in outputs[-1].outputs] == [0, 1, 2, 3, 4]
    found = [answer.token_ids for answer in outputs[-1].outputs]
    assert found == [alone([3, 1, 4, 1, 5], params, index) for index in range(5)]
    assert len({tuple(tokens) for tokens in found}) == 5
    assert [output.finished for output in outputs].count(True) == 1


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_an_aborted_request_is_silent_and_leaves_nothing(depth: int, n: int, after: int) -> None:
    engine = make_engine(num_lookahead_steps=depth)
    engine.add_request([1] * 20, greedy(20, n=n), request_id="a")
    engine.add_request([2] * 5, greedy(9), request_id="b")
    for _ in range(after):
        engine.step()
    assert engine.abort("a")
    assert not engine.abort("a")
    assert not engine.abort("nobody")
    engine.check_invariants()
    seen = drain(engine)
    assert set(seen) == {"b"}
    assert seen["b"][-1].outputs[0].token_ids == alone([2] * 5, greedy(9))


def test_abort_takes_the_whole_id() -> None:
    engine = make_engine()
    for name in ("a", "ab", "b"):
        engine.add_request([1, 2], greedy(3), request_id=name)
    assert engine.abort("a")
    assert set(drain(engine)) == {"ab", "b"}


def test_an_id_may_be_used_again_once_its_request_has_gone() -> None:
    engine = make_engine(num_lookahead_steps=1)
    for ends in (False, True, True):
        engine.add_request([1, 2], greedy(6), request_id="a")
        with pytest.raises(RequestError, match="'a' is already in use"):
            engine.add_request([3], greedy(1), request_id="a")
        engine.step()
        engine.step()
        if ends:
            assert drain(engine)["a"][-1].outputs[0].token_ids == alone([1, 2], greedy(6))
        else:
            engine.abort("a")


@pytest.mark.parametrize(("first", "n", "second", "m"), [("a#1", 1, "a", 3), ("a", 3, "a#1", 1), ("a", 2, "a#1", 2)])
def test_ids_that_look_like_those_of_answers_do_not_mix(first: str, n: int, second: str, m: int) -> None:
    engine = make_engine()
    engine.add_request([1, 2], greedy(4, n=n), request_id=first)
    engine.step()
    refused = False
    try:
        engine.add_request([3, 4], greedy(4, n=m), request_id=second)
    except RequestError:
        refused = True
    engine.check_invariants()
    seen = drain(engine)
    assert set(seen) == ({first} if refused else {first, second})
    assert [answer.token_ids for answer in seen[first][-1].outputs] == [
        alone([1, 2], greedy(4, n=n), i) for i in range(n)
    ]


def test_a_refused_request_changes_nothing() -> None:
    engine = make_engine(num_blocks=5)
    cases: list[tuple[Prompt, SamplingParams, type[RequestError]]] = [
        ([], greedy(), RequestError),
        ([1, 99], greedy(), RequestError),
        ([1] * 10, greedy(8), PromptTooLongError),
        ("text", greedy(), RequestError),
    ]
    for prompt, params, error in cases:
        with pytest.raises(error):
            engine.add_request(prompt, params, request_id="a")
        assert not engine.has_unfinished
        assert not engine.abort("a")


# -- failures ----------------------------------------------------------------------------------------------------


class _Failing(HashLM):
    """Fails in the steps and rows it is told."""

    fail_next = False
    fails_for: int | None = None
    nan_for: int | None = None
    repeats = True

    def forward(self, batch: StepBatch) -> list[int]:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("secret detail")
        if self.fails_for in batch.tokens[batch.slots, 0]:
            raise RuntimeError("secret detail")
        return super().forward(batch)

    def sample(self, hidden: list[int], batch: StepBatch, masks: Any = None) -> SampledTokens:
        tokens = super().sample(hidden, batch, masks)
        for row, history in enumerate(batch.histories):
            if history[0] == self.nan_for:
                tokens.token_ids[row] = -1
                tokens.errors[row] = "not finite"
        return tokens


def _model(engine: Any) -> _Failing:
    model = engine.core.executor._runner
    assert isinstance(model, _Failing)
    return model


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_step_that_fails_once_ends_no_request(depth: int) -> None:
    engine = make_engine(model=_Failing, num_lookahead_steps=depth)
    engine.add_request([1, 2, 3, 4], greedy(6), request_id="a")
    engine.add_request([5] * 4, greedy(6), request_id="b")
    engine.step()
    _model(engine).fail_next = True
    seen = drain(engine)
    assert not _model(engine).fail_next
    assert seen["a"][-1].outputs[0].token_ids == alone([1, 2, 3, 4], greedy(6))
    assert seen["b"][-1].outputs[0].token_ids == alone([5] * 4, greedy(6))


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("budget", [3, 64])
def test_a_row_that_cannot_be_computed_ends_alone(depth: int, budget: int) -> None:
    engine = make_engine(model=_Failing, num_lookahead_steps=depth, max_num_batched_tokens=budget, max_num_seqs=3)
    _model(engine).fails_for = 9
    engine.add_request([9, 2, 3, 4, 5], greedy(6), request_id="bad")
    engine.add_request([5] * 4, greedy(6), request_id="good")
    seen = drain(engine)
    bad = seen["bad"][-1]
    assert bad.outputs[0].finish_reason is FinishReason.ERROR
    assert bad.error == "its output could not be made (RuntimeError); the server's log says more"
    assert seen["good"][-1].outputs[0].token_ids == alone([5] * 4, greedy(6))
    assert seen["good"][-1].error is None


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_failed_step_that_cannot_be_repeated_ends_its_requests_only(depth: int) -> None:
    engine = make_engine(model=_Failing, num_lookahead_steps=depth, max_num_batched_tokens=4)
    _model(engine).repeats = False
    engine.add_request([1, 2, 3, 4], greedy(6), request_id="a")
    engine.add_request([5] * 4, greedy(6), request_id="b")
    _model(engine).fail_next = True
    seen = drain(engine)
    failed = seen["a"][-1]
    assert (failed.finished, failed.outputs[0].finish_reason) == (True, FinishReason.ERROR)
    assert failed.error == "the step failed: RuntimeError"  # the rest is for the log: it may hold other people's data
    assert seen["b"][-1].outputs[0].token_ids == alone([5] * 4, greedy(6))
    engine.add_request([1, 2, 3, 4], greedy(6), request_id="a")
    assert drain(engine)["a"][-1].outputs[0].token_ids == alone([1, 2, 3, 4], greedy(6))


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("n", [1, 2])
def test_a_row_that_is_not_finite_ends_alone(depth: int, n: int) -> None:
    engine = make_engine(model=_Failing, num_lookahead_steps=depth, max_num_seqs=6)
    _model(engine).nan_for = 9
    engine.add_request([9, 2, 3, 4, 5], greedy(6, n=n), request_id="bad")
    engine.add_request([5] * 4, greedy(6), request_id="good")
    seen = drain(engine)
    bad = seen["bad"][-1]
    assert [answer.finish_reason for answer in bad.outputs] == [FinishReason.ERROR] * n
    assert [answer.token_ids for answer in bad.outputs] == [[]] * n
    assert bad.error == "not finite"
    assert seen["good"][-1].outputs[0].token_ids == alone([5] * 4, greedy(6))
    assert seen["good"][-1].error is None


# -- stops -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("kind", ["end of sequence", "token", "string"])
def test_every_kind_of_stop_ends_the_answer_at_its_place(depth: int, kind: str) -> None:
    prompt = [1, 2, 3]
    tokens = alone(prompt, greedy(30))
    at = next(i for i, token in enumerate(tokens) if token < 12 and token not in tokens[:i] and i > 2)
    stop, letter = tokens[at], chr(97 + tokens[at])
    engine = make_engine(num_lookahead_steps=depth, text=True, eos=(stop if kind == "end of sequence" else EOS,))
    params = {
        "end of sequence": greedy(30, ignore_eos=False),
        "token": greedy(30, stop_token_ids=[stop]),
        "string": greedy(30, stop=[letter]),
    }[kind]
    engine.add_request(prompt, params, request_id="stops")
    engine.add_request(prompt, greedy(30), request_id="goes on")
    seen = {name: outputs[-1].outputs[0] for name, outputs in drain(engine).items()}
    found = seen["stops"]
    assert (found.token_ids, found.finish_reason) == (tokens[: at + 1], FinishReason.STOP)
    assert found.stop_reason == {"end of sequence": None, "token": stop, "string": letter}[kind]
    assert letter not in found.text
    assert seen["goes on"].text.startswith(found.text + letter)
    assert seen["goes on"].token_ids == tokens
    assert engine.scheduler.num_late == depth


# -- static and dynamic batches, and the clock -------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_stop_string_that_is_a_special_token_ends_the_answer(depth: int) -> None:
    found = ((prompt, alone(prompt, greedy(30))) for prompt in ([letter] for letter in range(EOS)))
    prompt, tokens = next(each for each in found if EOS in each[1])
    engine = make_engine(num_lookahead_steps=depth, text=True, eos=())
    engine.add_request(prompt, greedy(30, stop=["<eos>"]), request_id="stops")
    (answer,) = drain(engine)["stops"][-1].outputs
    assert answer.token_ids == tokens[: tokens.index(EOS) + 1]
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, "<eos>")


@pytest.mark.parametrize(("batching", "steps"), [("static", [9, 9]), ("dynamic", [9, 2]), ("continuous", [9, 2])])
def test_a_static_batch_delivers_only_at_its_end(batching: str, steps: list[int]) -> None:
    engine = make_engine(batching=batching)
    engine.add_request([1, 2], greedy(9), request_id="long")
    engine.add_request([3, 4], greedy(2), request_id="short")
    delivered: dict[str, list[int]] = {}
    step = 0
    while engine.has_unfinished:
        step += 1
        for output in engine.step():
            delivered.setdefault(output.request_id, []).append(step)
    assert [delivered["long"][-1], delivered["short"][-1]] == steps
    assert len(delivered["short"]) == (1 if batching == "static" else 2)


def test_a_static_batch_delivers_no_answer_of_a_request_of_which_one_fails() -> None:
    class OneRowFails(HashLM):
        num_calls = 0

        def sample(self, hidden: list[int], batch: StepBatch, masks: Any = None) -> SampledTokens:
            tokens = super().sample(hidden, batch, masks)
            self.num_calls += 1
            if self.num_calls == 3:
                tokens.token_ids[0], tokens.errors[0] = -1, "not finite"
            return tokens

    engine = make_engine(model=OneRowFails, batching="static")
    engine.add_request([1, 2], greedy(6, n=2), request_id="a", stream=True)
    outputs = [output for _ in range(12) for output in engine.step()]
    assert [output.finished for output in outputs] == [True]
    assert [answer.finish_reason for answer in outputs[0].outputs] == [FinishReason.ERROR, FinishReason.LENGTH]


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_step_waits_for_the_batch_on_the_engines_clock(batching: str) -> None:
    engine = make_engine(batching=batching, batch_wait_ms=250.0, max_num_seqs=2)
    engine.add_request([1, 2], greedy(1), request_id="a")
    assert engine.step() == []
    assert engine.clock.now() == 0.25
    assert [output.request_id for output in engine.step()] == ["a"]
    engine.add_request([1], greedy(1))
    engine.add_request([2], greedy(1))
    assert len(engine.step()) == 2  # full: no wait
    assert engine.clock.now() == 0.25


def test_a_step_without_work_does_not_wait() -> None:
    engine = make_engine()
    assert engine.step() == []
    assert engine.clock.now() == 0.0


def test_shutdown_ends_everything() -> None:
    engine = make_engine(num_lookahead_steps=1)
    engine.add_request([1, 2], greedy(9, n=2))
    engine.step()
    engine.shutdown()
    assert not engine.has_unfinished
    assert not engine.scheduler.has_unfinished


# -- what is measured --------------------------------------------------------------------------------------------


def test_the_step_log_says_which_request_computed_what_and_why() -> None:
    engine = make_engine(max_num_batched_tokens=6)
    engine.add_request([1] * 8, greedy(3), request_id="a")
    engine.add_request([2] * 3, greedy(2), request_id="b")
    drain(engine)
    log = list(engine.step_log)
    rows = [[(row.request_id, row.num_tokens, row.why) for row in record.rows] for record in log]
    assert rows == [
        [("a", 4, "prefill"), ("b", 2, "prefill")],
        [("a", 4, "prefill"), ("b", 1, "prefill")],
        [("a", 1, "decode"), ("b", 1, "decode")],
        [("a", 1, "decode")],
    ]
    assert [record.num_tokens for record in log] == [6, 5, 2, 1]
    assert [record.num_waiting for record in log] == [0, 0, 0, 0]
    assert [record.finished for record in log] == [(), (), ("b",), ("a",)]
    # Two blocks of four for a, one for b; then one more each where a position opens it.
    assert [record.unused_slots for record in log] == [12 - 6, 12 - 11, 16 - 13, 12 - 10]
    assert [record.padding_avoided for record in log] == [4 * 2 - 6, 4 * 2 - 5, 0, 0]
    assert [record.blocks.used for record in log] == [3, 3, 4, 3]


def test_a_prefix_read_from_the_cache_is_reported() -> None:
    engine = make_engine()
    engine.add_request([1] * 9, greedy(2), request_id="a")
    assert drain(engine)["a"][-1].num_cached_tokens == 0
    engine.add_request([1] * 9, greedy(2), request_id="b")
    engine.add_request([1] * 9, greedy(2), request_id="c", cache_salt="other")
    seen = drain(engine)
    assert (seen["b"][-1].num_cached_tokens, seen["c"][-1].num_cached_tokens) == (8, 0)


def test_metrics_are_on_the_engines_clock() -> None:
    engine = make_engine()
    engine.clock.wait_until(5.0)
    engine.add_request([1] * 20, greedy(3), request_id="a")
    outputs = []
    while engine.has_unfinished:
        engine.clock.wait_until(engine.clock.now() + 1.0)
        outputs += engine.step()
    metrics = outputs[-1].metrics
    assert metrics is not None
    # 20 tokens under a budget of 16: two steps until the first token.
    assert (metrics.arrival_time, metrics.first_token_time, metrics.finished_time) == (5.0, 7.0, 9.0)
    assert metrics.first_scheduled_time == 6.0
    assert metrics.num_preemptions == 0


def test_a_preempted_request_counts_its_preemptions() -> None:
    engine = make_engine()
    engine.add_request([1] * 5, greedy(6), request_id="a")
    engine.step()
    assert engine.scheduler.preempt("a")
    last = drain(engine)["a"][-1]
    assert last.metrics is not None
    assert last.metrics.num_preemptions == 1
    assert last.outputs[0].token_ids == alone([1] * 5, greedy(6))
