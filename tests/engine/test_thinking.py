"""Thinking budgets: the reasoning ends where it has to, and all else of the answer is what it would have been."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from chairlift import LLM, SamplingParams
from chairlift.base.outputs import RequestOutput
from chairlift.base.thinking import ThinkingBudget
from chairlift.engine.engine import Engine
from chairlift.engine.process.messages import Add, FrameReader, encode
from chairlift.engine.thinking import ThinkingMatcher
from chairlift.errors import RequestError

PROMPTS = ["Describe a lift.", "Who are you?", "Chairlift is", "One two three", "Describe a lift. Again."]
END, AFTER = 300, (301, 17)
"""Tokens that none of these answers has by itself."""
BUDGET = ThinkingBudget(max_tokens=9, end=END, after=AFTER)
SETTINGS: list[dict[str, Any]] = [
    {},
    {"num_lookahead_steps": 1},
    {"num_lookahead_steps": 2},
    {"num_kv_blocks": 20, "preemption_mode": "recompute"},
    {"num_kv_blocks": 20, "preemption_mode": "swap", "swap_space_bytes": 1 << 24, "num_lookahead_steps": 2},
    {"max_num_batched_tokens": 8, "num_lookahead_steps": 1},
    {"batching": "static"},
    {"enable_prefix_caching": False},
    {"speculative_config": '{"method": "ngram", "prompt_lookup_min": 1}'},
    {"kernels": "torch"},
]


def make(**settings: Any) -> LLM:
    return LLM(**{"num_kv_blocks": 200, "max_num_seqs": 8, "dtype": "float32", "threads": 1, **settings})


def asked(thinking: ThinkingBudget | None = BUDGET, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 60, "seed": 11, "thinking": thinking, **more})


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def mixed() -> list[SamplingParams]:
    budgets = [BUDGET, None, ThinkingBudget(max_tokens=0, end=END), BUDGET, ThinkingBudget(max_tokens=30, end=END)]
    return [asked(budget, n=2, ignore_eos=True) for budget in budgets]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make()


@pytest.fixture(scope="module")
def alone() -> list[list[list[int]]]:
    llm = make(max_num_seqs=2, num_lookahead_steps=1)  # without drafts
    return [tokens(llm.generate(prompt, params))[0] for prompt, params in zip(PROMPTS, mixed(), strict=True)]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_budgeted_answers_are_the_same_together_as_alone(
    settings: dict[str, Any], alone: list[list[list[int]]]
) -> None:
    llm = make(**settings)
    outputs = llm.generate(PROMPTS, mixed())
    assert tokens(outputs) == alone
    if "num_kv_blocks" in settings:
        assert llm.engine.scheduler.num_preemptions
    assert isinstance(llm.engine, Engine) and not len(llm.engine.core.preparers.grammars)


def test_tokens_before_and_after_the_budget_are_unchanged(llm: LLM) -> None:
    """The first tokens are those without a budget, then come the forced ones, then what follows all of these."""
    for prompt in PROMPTS:
        free = llm.generate(prompt, asked(None, ignore_eos=True))[0]
        held = llm.generate(prompt, asked(ignore_eos=True))[0].outputs[0].token_ids
        assert held[:9] == free.outputs[0].token_ids[:9] and held[9:12] == [END, *AFTER]
        known = [*free.prompt_token_ids, *held[:12]]
        rest = llm.generate(known, asked(None, max_tokens=48, ignore_eos=True))[0]
        assert held[12:] == rest.outputs[0].token_ids


def test_reasoning_that_ends_by_itself_is_not_forced(llm: LLM) -> None:
    free = llm.generate("Hi", asked(None, ignore_eos=True))[0].outputs[0].token_ids
    end = next(token for token in free[3:] if token not in free[: free.index(token)])
    place = free.index(end)
    grammars = llm.engine.core.preparers.grammars
    limited, ended = grammars.num_limited, grammars.num_ended_thinking
    same = llm.generate("Hi", asked(ThinkingBudget(max_tokens=place, end=end, after=AFTER), ignore_eos=True))[0]
    forced = llm.generate("Hi", asked(ThinkingBudget(max_tokens=place - 1, end=end, after=AFTER), ignore_eos=True))[0]
    assert same.outputs[0].token_ids[: place + 1] == free[: place + 1]
    assert forced.outputs[0].token_ids[place - 1 : place + 2] == [end, *AFTER]
    later = llm.generate("Hi", asked(ThinkingBudget(max_tokens=place + 1, end=end, after=AFTER), ignore_eos=True))[0]
    assert later.outputs[0].token_ids == free
    # In two of three the budget was used up; in the first of them the model ended at the same place.
    assert (grammars.num_limited, grammars.num_ended_thinking) == (limited + 3, ended + 2)


def test_reasoning_that_begins_late_or_never_is_content(llm: LLM) -> None:
    free = llm.generate("Hi", asked(None, ignore_eos=True))[0].outputs[0].token_ids
    for begin, count in (((free[0],), 1), (tuple(free[:2]), 2), (tuple(free[1:3]), 3)):
        held = llm.generate("Hi", asked(ThinkingBudget(max_tokens=4, end=END, begin=begin), ignore_eos=True))[0]
        assert held.outputs[0].token_ids[: count + 5] == [*free[: count + 4], END]
    for begin in ((END,), (free[0], END)):
        held = llm.generate("Hi", asked(ThinkingBudget(max_tokens=4, end=END + 1, begin=begin), ignore_eos=True))[0]
        assert held.outputs[0].token_ids == free


def test_other_settings_work_beside_a_thinking_budget(llm: LLM) -> None:
    more = {"logprobs": 2, "repetition_penalty": 1.2, "top_k": 5, "bad_words": ["lift"], "ignore_eos": True}
    held = llm.generate("Hi", asked(**more))[0].outputs[0]
    assert held.token_ids[9:12] == [END, *AFTER] and held.logprobs is not None and len(held.logprobs) == 60
    tokenizer = llm.engine._inputs._tokenizer
    stop = tokenizer.token_text(END)
    stopped = llm.generate("Hi", asked(stop=stop, ignore_eos=True))[0].outputs[0]
    assert stopped.stop_reason == stop and len(stopped.token_ids) <= 10
    short = llm.generate("Hi", asked(max_tokens=10, ignore_eos=True))[0].outputs[0]
    assert (
        short.token_ids == held.token_ids[:0] + llm.generate("Hi", asked(ignore_eos=True))[0].outputs[0].token_ids[:10]
    )
    none = llm.generate("Hi", asked(allowed_token_ids=[5]))[0]
    assert none.error is not None and "no token is left" in none.error


def test_a_grammar_begins_after_the_reasoning(llm: LLM) -> None:
    (end,) = llm.engine._inputs._tokenizer.encode("#", False)
    thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "#"}
    form = {"type": "sequence", "elements": [thought, {"type": "regex", "pattern": "[0-9]{3}"}]}
    budget = ThinkingBudget(max_tokens=6, end=end)
    params = asked(budget, structured_outputs={"structural_tag": {"format": form}}, n=4)
    for answer in llm.generate(["Hi", "Who are you?"], params)[0].outputs:
        assert re.fullmatch(r"[^#]*#[0-9]{3}", answer.text), answer.text
        assert end in answer.token_ids[:10]


def test_a_request_is_guided_only_until_its_budget_is_spent() -> None:
    llm = make(speculative_config='{"method": "ngram"}')
    core = llm.engine.core
    prepared = llm.engine._inputs.prepare("a", "Hi", asked(ignore_eos=True), llm.engine.clock.now())
    core.add(prepared)
    request = core.scheduler.requests["a"]
    seen = []
    while core.has_work:
        core.step()
        seen.append((request.num_output_tokens >= 12, request.is_guided))
    assert {guided for over, guided in seen if not over} == {True}
    assert {guided for over, guided in seen if over} == {False}


@pytest.mark.parametrize(
    "thinking",
    [
        {"max_tokens": -1, "end": 5},
        {"max_tokens": 3, "end": True},
        {"max_tokens": 3, "end": 5, "begin": ["a"]},
        {"max_tokens": 3, "end": 5, "after": [-1]},
        {"max_tokens": 3, "end": 5, "begin": range(65)},
        {"max_tokens": 3},
        {"max_tokens": 3, "end": 5, "other": 1},
        3,
    ],
)
def test_an_invalid_thinking_budget_is_refused(thinking: Any) -> None:
    with pytest.raises(RequestError, match="thinking"):
        SamplingParams(thinking=thinking)


def test_a_budget_with_tokens_unknown_to_the_model_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="thinking"):
        llm.generate("Hi", asked(ThinkingBudget(max_tokens=3, end=10**6)))
    with pytest.raises(RequestError, match="which also ends the answer"):
        llm.generate("Hi", asked(stop_token_ids=[END]))


def test_a_thinking_budget_crosses_to_another_process(llm: LLM) -> None:
    prepared = llm.engine._inputs.prepare("a", "Hi", asked(), 0.0)
    (message,) = FrameReader().feed(encode(Add.of(prepared)))
    assert isinstance(message, Add) and message.request().params.thinking == BUDGET


class _Grammar:
    """Allows everything but the end of the reasoning, at some places."""

    error, stopped = "", False

    def __init__(self, closed: set[int]) -> None:
        self.num_consumed, self._closed = 0, closed

    def consume(self, token_id: int) -> bool:
        self.num_consumed += 1
        return True

    def rewind(self, num_consumed: int) -> bool:
        self.num_consumed = min(self.num_consumed, num_consumed)
        return True

    def mask(self) -> npt.NDArray[np.uint32]:
        return np.array([0xFFFFFFFE if self.num_consumed in self._closed else 0xFFFFFFFF], dtype=np.uint32)


def test_the_end_waits_for_a_grammar_that_does_not_allow_it() -> None:
    matcher = ThinkingMatcher(ThinkingBudget(max_tokens=2, end=0, after=(3,)), 32, _Grammar({2, 3}))
    seen = []
    for token in (7, 7, 7, 7, 0, 3, 9):
        mask = matcher.mask()
        assert mask is not None
        seen.append(int(mask[0]))
        matcher.consume(token)
    assert seen == [0xFFFFFFFF] * 2 + [0xFFFFFFFE] * 2 + [1, 8, 0xFFFFFFFF]


def test_rejected_drafts_leave_no_trace_in_the_budget() -> None:
    rng = random.Random(5)
    for _ in range(300):
        begin = tuple(rng.choices(range(3), k=rng.choice([0, 1, 2])))
        budget = ThinkingBudget(max_tokens=rng.randrange(5), end=3, begin=begin, after=(1, 2)[: rng.randrange(3)])
        history: list[int] = []
        matcher = ThinkingMatcher(budget, 8)
        for _ in range(20):
            back = rng.randrange(len(history) + 1) if rng.random() < 0.2 else len(history)
            assert matcher.rewind(back)
            del history[back:]
            mask = matcher.mask()
            token = rng.randrange(4) if mask is None else int(mask[0]).bit_length() - 1
            history.append(token)
            assert matcher.consume(token)
            fresh = ThinkingMatcher(budget, 8)
            for each in history:
                fresh.consume(each)
            assert (matcher.num_consumed, matcher.is_over) == (fresh.num_consumed, fresh.is_over)
            one, other = matcher.mask(), fresh.mask()
            assert (None if one is None else one.tolist()) == (None if other is None else other.tolist())
