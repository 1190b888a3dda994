"""Grammars in the engine: the answer is what it is alone, whatever happens to its request."""

from __future__ import annotations

import dataclasses
import json
import re
from concurrent.futures import Future
from typing import Any

import pytest

from chairlift import LLM, SamplingParams
from chairlift.base.outputs import FinishReason, RequestOutput
from chairlift.base.thinking import ThinkingBudget
from chairlift.engine.grammars import Grammars
from chairlift.engine.input_processor import PreparedRequest
from chairlift_lab.sim.grammars import LateMasks

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}
PROMPTS = ["Describe a lift.", "Who are you?", "Chairlift is", "One two three", "Describe a lift. Again."]


def held(**more: Any) -> SamplingParams:
    fields = {"structured_outputs": {"json": SCHEMA}, "temperature": 1.0, "max_tokens": 120, "seed": 11, **more}
    return SamplingParams(**fields)


def make(**settings: Any) -> LLM:
    return LLM(**{"num_kv_blocks": 200, "max_num_seqs": 8, "dtype": "float32", "threads": 1, **settings})


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def alone() -> list[list[list[int]]]:
    """Each prompt by itself: free and held in turns, two answers each."""
    llm = make(max_num_seqs=2, num_lookahead_steps=1)  # without drafts
    return [tokens(llm.generate(prompt, params))[0] for prompt, params in mixed()]


def mixed() -> list[tuple[str, SamplingParams]]:
    free = SamplingParams(temperature=1.0, max_tokens=40, seed=11, n=2)
    return [(prompt, free if i % 2 else held(n=2)) for i, prompt in enumerate(PROMPTS)]


SETTINGS: list[dict[str, Any]] = [
    {},
    {"num_lookahead_steps": 1},
    {"num_lookahead_steps": 2},
    {"num_kv_blocks": 20, "preemption_mode": "recompute"},
    {"num_kv_blocks": 20, "preemption_mode": "swap", "swap_space_bytes": 1 << 24, "num_lookahead_steps": 2},
    {"max_num_batched_tokens": 8, "num_lookahead_steps": 1},
    {"batching": "static"},
    {"batching": "dynamic", "enable_prefix_caching": False},
    {"speculative_config": '{"method": "ngram", "prompt_lookup_min": 1}'},
    {"kernels": "torch"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_guided_answers_are_the_same_together_as_alone(settings: dict[str, Any], alone: list[list[list[int]]]) -> None:
    llm = make(**settings)
    asked = mixed()
    outputs = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    assert tokens(outputs) == alone
    if "num_kv_blocks" in settings:
        assert llm.engine.scheduler.num_preemptions
    for output, (_, params) in zip(outputs, asked, strict=True):
        for answer in output.outputs if params.structured_outputs else ():
            if answer.finish_reason is FinishReason.STOP:
                assert set(json.loads(answer.text)) == {"name", "tags", "age"}
    assert not len(llm.engine.core.preparers.grammars)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make()


def test_an_answer_ends_where_nothing_may_follow(llm: LLM) -> None:
    for limit in (40, 8):  # with the second, the last token is also the last there may be
        output = llm.generate("Hi", SamplingParams(structured_outputs={"regex": "[0-9]{8}"}, max_tokens=limit))[0]
        answer = output.outputs[0]
        if len(answer.token_ids) <= limit and re.fullmatch("[0-9]{8}", answer.text):
            assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, None)


@pytest.mark.parametrize("known", [1, 7, 23])
@pytest.mark.parametrize("kind", ["grammar", "thinking"])
def test_a_grammar_and_a_budget_follow_tokens_of_another_engine(llm: LLM, kind: str, known: int) -> None:
    thinking = ThinkingBudget(max_tokens=33, end=5, after=(7, 8))
    regex = {"regex": "([a-z]{3}[0-9]){12}!"}
    params = SamplingParams(max_tokens=60, seed=3, structured_outputs=regex)
    if kind == "thinking":
        params = SamplingParams(max_tokens=60, seed=3, ignore_eos=True, thinking=thinking)
    whole = llm.generate("Hi", params)[0].outputs[0].token_ids
    assert len(whole) >= 25 and (kind == "grammar" or whole[33:36] == [5, 7, 8])
    prepared = llm.engine._inputs.prepare("continued", llm.generate("Hi", params)[0].prompt_token_ids, params, 0.0)
    core = llm.engine.core
    core.add(dataclasses.replace(prepared, answer_token_ids=whole[:known]))
    rest: list[int] = []
    while core.has_work:
        outputs = core.step()
        rest += outputs.token_ids if outputs is not None else []
    assert whole[:known] + rest == whole


def test_an_answer_that_is_cut_off_says_length_and_keeps_its_text(llm: LLM) -> None:
    answer = llm.generate("Hi", held(max_tokens=4))[0].outputs[0]
    assert answer.finish_reason is FinishReason.LENGTH and answer.text.startswith("{") and len(answer.token_ids) == 4


def test_other_settings_work_beside_a_grammar(llm: LLM) -> None:
    asked = held(logprobs=2, repetition_penalty=1.2, presence_penalty=0.5, bad_words=["lift"], top_p=0.95)
    answer = llm.generate("Hi", asked)[0].outputs[0]
    assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
    assert json.loads(answer.text) and "lift" not in answer.text
    stopped = llm.generate("Hi", held(stop='"tags"'))[0].outputs[0]
    assert stopped.stop_reason == '"tags"' and '"tags"' not in stopped.text


def test_a_mask_and_a_list_without_a_token_in_common_is_an_error_of_one(llm: LLM) -> None:
    none = SamplingParams(structured_outputs={"regex": "a+"}, allowed_token_ids=[5], max_tokens=9)
    broken, good = llm.generate(["Hi", "Hi"], [none, held()])
    assert broken.error is not None and "no token is left" in broken.error and good.error is None
    assert json.loads(good.outputs[0].text)


class _Slow:
    """Compiles when it is told to."""

    def __init__(self, llm: LLM) -> None:
        self.work: list[tuple[Any, Future[Any]]] = []
        self.grammars = llm.engine.core.preparers.grammars = Grammars(
            llm.engine.core.preparers.grammars._compiler, self._later
        )

    def _later(self, work: Any) -> Future[Any]:
        self.work.append((work, Future()))
        return self.work[-1][1]

    def finish(self, error: Exception | None = None) -> None:
        for work, future in self.work:
            if future.cancelled():
                continue
            if error is None:
                future.set_result(work())
            else:
                future.set_exception(error)


def _add(llm: LLM, name: str, params: SamplingParams) -> PreparedRequest:
    prepared = llm.engine._inputs.prepare(name, "Hi", params, llm.engine.clock.now())
    llm.engine.core.add(prepared)
    llm.engine._outputs.add(prepared, False)
    return prepared


def _drain(llm: LLM) -> dict[str, RequestOutput]:
    done: dict[str, RequestOutput] = {}
    while llm.engine.has_unfinished:
        for output in llm.engine.step():
            done[output.request_id] = output
        llm.engine.check_invariants()
    return done


def test_a_request_waits_for_its_grammar_and_others_do_not() -> None:
    llm = make(num_kv_blocks=60)
    slow = _Slow(llm)
    _add(llm, "held", held(n=2))
    _add(llm, "free", SamplingParams(max_tokens=3))
    done: list[str] = []
    while not done:
        done += [output.request_id for output in llm.engine.step()]
        llm.engine.check_invariants()
    record = llm.engine.step_log[-1]
    assert done == ["free"] and llm.engine.core.has_work
    assert (record.held_up_by, record.num_waiting) == ("grammar", 1)
    slow.finish()
    output = _drain(llm)["held"]
    assert all(json.loads(answer.text) for answer in output.outputs)
    assert output.metrics is not None and output.metrics.causes is not None
    assert output.metrics.causes["waiting_grammar"] > 0 and not len(slow.grammars)


@pytest.mark.parametrize("aborted", ["held", "both"])
def test_an_abort_while_it_compiles_leaves_nothing(aborted: str) -> None:
    llm = make(num_kv_blocks=60)
    slow = _Slow(llm)
    for name in ("held", "other"):
        _add(llm, name, held())
    for name in ("held", "other") if aborted == "both" else ("held",):
        assert llm.engine.abort(name)
    slow.finish()
    assert set(_drain(llm)) == (set() if aborted == "both" else {"other"})
    assert not len(slow.grammars) and not llm.engine.scheduler.batch.unready and len(slow.work) == 1
    assert slow.work[0][1].cancelled() == (aborted == "both") and not slow.grammars.is_busy


def test_a_compiler_that_dies_ends_its_requests_only(caplog: pytest.LogCaptureFixture) -> None:
    llm = make(num_kv_blocks=60)
    slow = _Slow(llm)
    _add(llm, "held", held(n=2))
    _add(llm, "free", SamplingParams(max_tokens=3))
    slow.finish(OSError("injected"))
    done = _drain(llm)
    assert done["free"].error is None and "could not be compiled" in (done["held"].error or "")


LATE: list[dict[str, Any]] = [
    *({"num_lookahead_steps": depth} for depth in (0, 1, 2)),
    {"num_kv_blocks": 20, "preemption_mode": "recompute", "num_lookahead_steps": 1},
    {"num_kv_blocks": 20, "preemption_mode": "swap", "swap_space_bytes": 1 << 24},
    {"speculative_config": '{"method": "ngram", "prompt_lookup_min": 1}'},
    {"batching": "static"},
    {"batching": "dynamic"},
]


@pytest.mark.parametrize("settings", LATE, ids=str)
def test_late_masks_do_not_change_the_answers(settings: dict[str, Any], alone: list[list[list[int]]]) -> None:
    llm, asked = make(**settings), mixed()
    masks = llm.engine.core.preparers.grammars.masks = LateMasks(seed=3, probability=0.4, most=5)
    for number, (prompt, params) in enumerate(asked):
        llm.engine.add_request(prompt, params, request_id=str(number))
    done: dict[str, RequestOutput] = {}
    while llm.engine.has_unfinished:
        masks.tick()
        done.update({output.request_id: output for output in llm.engine.step() if output.finished})
        llm.engine.check_invariants()
    assert tokens([done[str(number)] for number in range(len(asked))]) == alone
    assert masks.num_late > 20 or settings.get("batching") == "static"


def _held_up(llm: LLM) -> LateMasks:
    """Make every mask of the engine wait until the caller calls :meth:`LateMasks.tick`."""
    masks = LateMasks(seed=1, probability=1.0, most=0)
    llm.engine.core.preparers.grammars.masks = masks
    return masks


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_late_mask_delays_its_own_answer_only(depth: int) -> None:
    llm = make(num_lookahead_steps=depth)
    masks = _held_up(llm)
    llm.engine.core.preparers.grammars.check(held().structured_outputs.value)  # type: ignore[union-attr]
    _add(llm, "held", held(n=2))
    _add(llm, "free", SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(36):
        llm.engine.step()
        llm.engine.check_invariants()
    core = llm.engine.core
    assert len(core.scheduler.requests) == 2
    assert not any(request.num_output_tokens for request in core.scheduler.requests.values())
    assert core.next_event() > core.clock.now()  # type: ignore[operator]  # the loop need not run at once
    steps = core.scheduler.step
    llm.engine.step()
    assert core.scheduler.step == steps
    assert llm.engine.abort("held") and not core.scheduler.has_unfinished and not len(core.preparers.grammars)
    masks.tick()
    assert not masks.done


def test_a_deadline_ends_an_answer_that_waits_for_its_mask() -> None:
    llm = make(scheduling_policy="priority", late_requests="drop")
    _held_up(llm)
    _add(llm, "held", held(deadline_ms=1.0))
    assert "deadline" in (_drain(llm)["held"].error or "")
    assert not len(llm.engine.core.preparers.grammars)


def test_equal_grammars_are_compiled_once(llm: LLM) -> None:
    grammars = llm.engine.core.preparers.grammars
    before, hits, seconds = grammars.num_compiled, grammars.num_hits, grammars.compile_seconds
    params = SamplingParams(structured_outputs={"choice": ["one", "two"]}, max_tokens=9)
    llm.generate(["a", "b", "c"], params)
    assert (grammars.num_compiled, grammars.num_hits) == (before + 1, hits + 3) and grammars.compile_seconds > seconds
    stats = llm.engine.core.stats()
    assert (stats.num_grammars_compiled, stats.num_grammar_hits) == (grammars.num_compiled, grammars.num_hits)
    assert stats.grammar_compile_seconds == grammars.compile_seconds


def test_callers_with_different_salts_share_no_grammar(llm: LLM) -> None:
    """The time of an answer would show whether another caller had sent the grammar."""
    grammars = llm.engine.core.preparers.grammars
    params = SamplingParams(structured_outputs={"choice": ["three", "four"]}, max_tokens=9)
    before, hits = grammars.num_compiled, grammars.num_hits
    for salt in ("one", "two", "one", ""):
        llm.engine.add_request("a", params, cache_salt=salt)
        _drain(llm)
    assert (grammars.num_compiled, grammars.num_hits) == (before + 3, hits + 4)


def test_a_grammar_that_is_being_compiled_is_waited_for_by_its_own_caller_only() -> None:
    llm = make(num_kv_blocks=60)
    slow, params = _Slow(llm), SamplingParams(structured_outputs={"choice": ["three", "four"]}, max_tokens=9)
    for index, salt in enumerate(("one", "two", "one")):
        prepared = llm.engine._inputs.prepare(str(index), "Hi", params, llm.engine.clock.now(), salt)
        llm.engine.core.add(prepared)
        llm.engine._outputs.add(prepared, False)
    assert len(slow.work) == 2
    slow.finish()
    assert all(output.error is None for output in _drain(llm).values())
