"""The door: every limit at its edge, and one kind of error for everything that does not pass."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import pytest

from chairlift.base.sampling_params import SamplingParams
from chairlift.base.seeds import sample_seed
from chairlift.base.service_class import parse_service_classes
from chairlift.core.request import Service
from chairlift.engine.input_processor import InputProcessor, ModelLimits, PreparedRequest
from chairlift.errors import PromptTooLongError, RequestError
from chairlift_lab.sim.oracle import byte_tokenizer
from tests.text.tokenizer import tiny
from tests.text.tokenizer.tiny import make

VOCAB, LENGTH, EOS = 20, 32, 19


class _Room:
    def __init__(self, capacity_tokens: int = 1000) -> None:
        self.capacity_tokens = capacity_tokens


def door(
    *, capacity: int = 1000, text: bool = False, seed: int | None = None, priority: bool = False
) -> InputProcessor:
    limits = ModelLimits(VOCAB, LENGTH, (EOS,), parse_service_classes("") if priority else None)
    return InputProcessor(limits, byte_tokenizer() if text else None, _Room(capacity), seed)


def prepare(
    at: InputProcessor, prompt: Any = (1, 2, 3), salt: Any = "", name: Any = "a", **params: Any
) -> PreparedRequest:
    return at.prepare(name, prompt, SamplingParams(**params), 1.5, salt)


class _Id(enum.IntEnum):
    FIVE = 5


@pytest.mark.parametrize("prompt", [[0], [VOCAB - 1], (1, 2), [_Id.FIVE], [1] * (LENGTH - 1)])
def test_valid_token_ids_are_accepted_as_they_are(prompt: Sequence[int]) -> None:
    prepared = prepare(door(), prompt, max_tokens=1)
    assert prepared.prompt_token_ids == list(prompt)
    assert prepared.prompt is None


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "the prompt is empty"),
        ("", "tokenizer was not loaded"),
        ([-1], "token id -1, but the model knows ids from 0 to 19"),
        ([1, VOCAB], "token id 20"),
        ([2**63], "token id 9223372036854775808"),
        ([True], "whole numbers as token ids, got True"),
        ([1.0], "got 1.0"),
        (["1"], "got '1'"),
        ([None], "got None"),
        ([[1]], "whole numbers"),
        (b"ab", "got bytes"),
        (5, "got int"),
        (None, "got NoneType"),
        ({1, 2}, "got set"),
        ({"prompt": "x"}, "the tokenizer was not loaded"),
        ({"text": "x"}, "no other key; got .text."),
        ({}, "got nothing"),
        ({"prompt_token_ids": [1], "prompt": 5}, "no other key; got .prompt_token_ids., .prompt."),
        ({"prompt_token_ids": [], "prompt": "x"}, "the prompt is empty"),
        ({"prompt": {"prompt": "x"}}, "got dict"),
    ],
)
def test_invalid_prompts_are_refused(prompt: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        prepare(door(), prompt)


@pytest.mark.parametrize("prompt", ["", "\ud800", "ab\udfff"])
def test_invalid_texts_are_refused(prompt: str) -> None:
    with pytest.raises(RequestError):
        prepare(door(text=True), prompt)


def test_text_becomes_tokens_and_is_kept() -> None:
    prepared = prepare(door(text=True), "abc")
    assert (prepared.prompt, prepared.prompt_token_ids) == ("abc", [0, 1, 2])


def test_ids_may_come_with_their_text() -> None:
    prepared = prepare(door(), {"prompt_token_ids": [3, 1], "prompt": "so it was \ud800"})
    assert (prepared.prompt, prepared.prompt_token_ids) == ("so it was ?", [3, 1])
    assert prepare(door(), {"prompt_token_ids": [3], "prompt": None}).prompt is None


def test_an_empty_text_is_a_prompt_where_the_tokenizer_begins_one() -> None:
    at = InputProcessor(ModelLimits(500, LENGTH), make("byte_level"), _Room(10**6))
    prepared = prepare(at, "")
    assert prepared.prompt == ""
    assert len(prepared.prompt_token_ids) == 1


def test_a_shared_logit_bias_cannot_change_under_a_request() -> None:
    params = SamplingParams(logit_bias={1: 1.0})
    prepared = door().prepare("a", [1], params, 1.5)
    params.logit_bias[2] = 5.0  # type: ignore[index]
    assert prepared.params.logit_bias == {1: 1.0}
    params.logit_bias[2] = "x"  # type: ignore[index]
    with pytest.raises(RequestError, match="logit_bias"):
        door().prepare("a", [1], params, 1.5)


def test_prompt_and_answer_fit_up_to_the_longest_length_only() -> None:
    prepared = prepare(door(), [1] * 20, max_tokens=LENGTH - 20)
    assert prepared.make_sequences()[0].max_total_tokens == LENGTH
    with pytest.raises(
        PromptTooLongError, match=r"prompt has 20 tokens and max_tokens is 13, together 33.* lower max_tokens to 12"
    ):
        prepare(door(), [1] * 20, max_tokens=LENGTH - 19)
    with pytest.raises(
        PromptTooLongError,
        match="prompt has 32 tokens, but the model takes 32 together with the answer, which has at least one",
    ):
        prepare(door(), [1] * LENGTH, max_tokens=1)
    assert prepare(door(), [1] * 20, max_tokens=None).make_sequences()[0].max_total_tokens == LENGTH


def test_the_kv_cache_limits_the_length_too() -> None:
    """The last token sampled is never an input: a cache of 16 positions serves sequences of 17."""
    small = door(capacity=16)
    assert prepare(small, [1] * 10, max_tokens=7).make_sequences()[0].limit == 16
    assert prepare(small, [1] * 10, max_tokens=None).make_sequences()[0].max_total_tokens == 17
    assert prepare(small, [1] * 16, max_tokens=1).make_sequences()[0].limit == 16
    with pytest.raises(PromptTooLongError, match="the KV cache 16"):
        prepare(small, [1] * 10, max_tokens=8)
    with pytest.raises(PromptTooLongError, match="whole KV cache holds 16"):
        prepare(small, [1] * 17, max_tokens=1)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_ids_in_settings_are_below_the_vocabulary(name: str) -> None:
    last, beyond = [VOCAB - 1], [VOCAB]
    prepare(door(), **{name: dict.fromkeys(last, 1.0) if name == "logit_bias" else last})
    with pytest.raises(RequestError, match=f"{name} has token id 20"):
        prepare(door(), **{name: dict.fromkeys(beyond, 1.0) if name == "logit_bias" else beyond})


@pytest.mark.parametrize("params", [{"stop": "a"}, {"bad_words": ["a"]}])
def test_settings_that_need_the_tokenizer_are_refused_without_one(params: dict[str, Any]) -> None:
    prepare(door(text=True), **params)
    with pytest.raises(RequestError, match="need the tokenizer"):
        prepare(door(), **params)


@pytest.mark.parametrize("salt", ["", "a", "A-z_09", "x" * 64])
def test_valid_salts_are_accepted(salt: str) -> None:
    assert prepare(door(), salt=salt).make_sequences()[0].cache_salt == salt


@pytest.mark.parametrize("salt", ["x" * 65, "a b", "a\n", "é", "a/b", None, 5, b"a", ["a"]])
def test_invalid_salts_are_refused(salt: Any) -> None:
    with pytest.raises(RequestError, match="cache_salt must be"):
        prepare(door(), salt=salt)


@pytest.mark.parametrize(
    ("name", "good"), [("a", 1), ("x" * 256, 1), ("", 0), ("x" * 257, 0), (5, 0), (None, 0), (b"a", 0)]
)
def test_request_ids_are_short_printable_texts(name: Any, good: int) -> None:
    if good:
        assert prepare(door(), name=name).make_sequences()[0].request_id == name
    else:
        with pytest.raises(RequestError, match="request_id must be"):
            prepare(door(), name=name)


@pytest.mark.parametrize("params", [None, {}, "greedy", 5])
def test_params_are_sampling_params(params: Any) -> None:
    with pytest.raises(RequestError, match="must be a SamplingParams"):
        door().prepare("a", [1], params, 0.0)


def test_priority_is_refused_under_a_policy_that_ignores_it() -> None:
    assert prepare(door(priority=True), priority=-3).make_sequences()[0].priority == -3
    with pytest.raises(RequestError, match="priority is -3"):
        prepare(door(), priority=-3)
    for name in ("ttft_ms", "tpot_ms", "deadline_ms"):
        with pytest.raises(RequestError, match=f"{name} is 5"):
            prepare(door(), **{name: 5})
    assert prepare(door(), service_tier="flex", priority=0).service.service_class == "default"


def test_latency_targets_are_the_callers_or_those_of_the_class() -> None:
    classes = parse_service_classes({"chat": {"priority": -3, "ttft_ms": 500, "deadline_ms": 4000, "retention": 2}})
    at = InputProcessor(ModelLimits(VOCAB, LENGTH, (EOS,), classes), None, _Room())
    arrival = 1.5
    prepared = prepare(at, service_tier="chat", deadline_ms=1000, tpot_ms=20)
    assert prepared.priority == -3
    assert prepared.service == Service("chat", "", arrival + 0.5, arrival + 1.0, 0.02, 2)
    assert prepare(at, service_tier="chat", priority=7).make_sequences()[0].priority == 7
    assert prepare(at, service_tier="flex").priority == 10
    for tier in (None, "auto", "default"):
        assert prepare(at, service_tier=tier).service == Service(retention=1)
    with pytest.raises(RequestError, match="one of auto, priority, default, flex, chat; got 'gold'"):
        prepare(at, service_tier="gold")


def test_seeds_are_the_callers_or_drawn_reproducibly() -> None:
    one, two, other = door(seed=5), door(seed=5), door(seed=6)
    drawn = [prepare(one).seed for _ in range(3)]
    assert drawn == [prepare(two).seed for _ in range(3)]
    assert drawn != [prepare(other).seed for _ in range(3)]
    assert len(set(drawn)) == 3
    assert prepare(door()).seed != prepare(door()).seed
    assert [prepare(one, seed=seed).seed for seed in (0, -2, 2**63 - 1)] == [0, -2, 2**63 - 1]
    assert prepare(one, seed=-1).params.seed is None


def test_a_refused_request_draws_no_seed() -> None:
    one, two = door(seed=5), door(seed=5)
    with pytest.raises(RequestError):
        prepare(one, [])
    assert prepare(one).seed == prepare(two).seed


def test_each_answer_has_a_sequence_of_its_own() -> None:
    prepared = prepare(door(), n=3, seed=7, prompt_logprobs=1, max_tokens=4)
    sequences = prepared.make_sequences()
    first, *others = sequences
    assert [one.request_id for one in sequences] == ["a#0", "a#1", "a#2"]
    assert [one.source for one in sequences] == [None, first, first]
    assert [one.sampling.seed for one in sequences] == [sample_seed(7, index) for index in range(3)]
    assert [one.sampling.wants_prompt_logprobs for one in sequences] == [True, False, False]
    assert [one.may_share for one in sequences] == [False, True, True]
    assert {one.arrival_time for one in others} == {1.5}


@pytest.mark.parametrize(("ignore_eos", "stops"), [(False, {3, EOS}), (True, {3})])
def test_end_of_sequence_stops_unless_ignored(ignore_eos: bool, stops: set[int]) -> None:
    one = prepare(door(), stop_token_ids=[3], ignore_eos=ignore_eos).make_sequences()[0]
    assert one.stop_token_ids == stops
    assert set(one.sampling.stop_token_ids) == stops


def test_bad_words_are_masked_at_the_start_and_after_a_space() -> None:
    for word in ("ab", " ab"):
        row = prepare(door(text=True), bad_words=[word]).make_sequences()[0].sampling
        assert row.bad_word_ids == ((0, 1), (18, 0, 1))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_bad_words_are_masked_wherever_a_word_begins(family: str) -> None:
    tokenizer = make(family)
    at = InputProcessor(ModelLimits(tokenizer.vocab_size, LENGTH), tokenizer, _Room())
    for word in ("lift", "the", "stops"):
        words = prepare(at, [1], bad_words=[word]).bad_word_ids
        for before in ("", "a ", "a\n", "a(", "a  ", "a</s>"):
            written = tokenizer.encode(before + word, add_special_tokens=False)
            ends = [tuple(written[-len(each) :]) == each for each in words]
            assert any(ends), (before, word)
        for each in words:
            assert word in tokenizer.decode(each), each


def test_bad_words_do_not_begin_as_texts_do() -> None:
    """A tokenizer may begin a text with a token of its own; words in the middle of an answer have no such token."""
    tokenizer = make("byte_level")
    at = InputProcessor(ModelLimits(tokenizer.vocab_size, LENGTH), tokenizer, _Room())
    request = prepare(at, "chairlift", bad_words=["chairlift"])
    start, *word = request.prompt_token_ids
    assert tokenizer.decode([start], skip_special_tokens=False) == "<s>"
    assert request.bad_word_ids[0] == tuple(word)


def test_min_tokens_must_fit_also_where_max_tokens_is_left_out() -> None:
    room = LENGTH - 3
    assert prepare(door(), [1, 2, 3], max_tokens=None, min_tokens=room).max_tokens == room
    with pytest.raises(PromptTooLongError, match=f"min_tokens is {room + 1}, .* room for {room}"):
        prepare(door(), [1, 2, 3], max_tokens=None, min_tokens=room + 1)
