"""A compiled grammar ends where it should, never offers a wrong token, goes back, and has limits."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from chairlift import RequestError, SamplingParams
from chairlift.base.structured_outputs import MAX_GRAMMAR_CHARS, StructuredOutputsParams
from chairlift.text.grammar.compiler import _LIMITS, GrammarCompiler
from tests.text.grammar.models import allowed, bundled, compiled, compiler, of_bytes, sampled, verdict
from tests.text.tokenizer.tiny import make

LARGE = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
OPEN = {"type": "array", "prefixItems": [{**LARGE, "title": str(i)} for i in range(6)]}
AMBIGUOUS = 'e: e e | "a"\nstart: e'


def test_the_end_is_offered_only_where_the_answer_is_complete() -> None:
    eos, made = bundled().eos_token_ids[0], compiled(regex="[0-9]{2,3}")
    matcher = made.matcher()
    one, ids = bundled().encode("1", False)[0], []
    for _ in range(3):
        ids.append(eos in allowed(matcher))
        assert not matcher.stopped and matcher.consume(one)
    assert ids == [False, False, True] and matcher.stopped and matcher.num_consumed == 3


def test_stop_tokens_of_the_caller_are_offered_where_the_answer_may_end() -> None:
    matcher = compiled(regex="a{1,2}").matcher([7])
    assert 7 not in allowed(matcher) and matcher.consume(bundled().encode("a", False)[0])
    assert {7, bundled().eos_token_ids[0]} <= set(allowed(matcher))


def test_a_matcher_goes_back_also_from_the_end() -> None:
    matcher = compiled(choice=["yes", "no"]).matcher()
    before = allowed(matcher)
    for token_id in bundled().encode("no", False):
        assert matcher.consume(token_id)
    assert matcher.stopped and matcher.rewind(0) and allowed(matcher) == before and matcher.num_consumed == 0


def test_a_refused_token_is_an_error_for_good_and_no_early_end() -> None:
    matcher = compiled(json={"type": "integer"}).matcher()
    assert not matcher.consume(bundled().encode("x", False)[0])
    assert matcher.error.startswith("structured_outputs cannot be followed: ") and matcher.mask() is None
    assert not matcher.rewind(0) and not matcher.consume(bundled().encode("1", False)[0])


@pytest.mark.parametrize(
    "asked",
    [
        {"choice": ["the lift goes up the mountain in winter and in summer, 12345 times"]},
        {
            "json": {
                "type": "object",
                "properties": {"a long name of it": {"const": "it's  so\\n"}, "b": {"enum": [1]}},
                "required": ["a long name of it", "b"],
                "additionalProperties": False,
            }
        },
        {"regex": "(left|right) then straight on for [0-9]{1,3} metres, to the end of the road"},
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", ["pieces", "bytes"])
def test_a_forced_text_that_is_remembered_gives_the_masks_that_are_computed(asked: dict[str, Any], tokens: str) -> None:
    own = compiler() if tokens == "pieces" else of_bytes()[1]
    made = own.compile(StructuredOutputsParams(**asked).value)
    matcher, known, num_remembered = made.matcher([7]), list[int](), 0
    while not matcher.stopped:
        made.mask_seconds = -1.0
        ids = allowed(matcher)
        num_remembered += made.mask_seconds < 0
        fresh = made.matcher([7])
        assert all(fresh.consume(token_id) for token_id in known)
        assert ids == allowed(fresh) and (len(known) < 5 or matcher.forced(3) == fresh.forced(3))
        known.append(ids[len(ids) // 2])
        if len(known) % 7 == 3:  # go back, and along the same way again
            assert matcher.rewind(len(known) - 3) and all(matcher.consume(each) for each in known[-3:-1])
        assert matcher.consume(known[-1])
    assert num_remembered > 5


def test_matchers_are_independent() -> None:
    made = compiled(choice=["yes", "no"])
    first, second = made.matcher(), made.matcher()
    assert first.consume(bundled().encode("y", False)[0])
    assert len(allowed(second)) > 1 and first.num_consumed == 1 and second.num_consumed == 0


def test_ids_beyond_the_logits_and_beyond_the_tokenizer_are_never_offered() -> None:
    for width in (2_900, 3_072, 3_100):
        matcher = GrammarCompiler(bundled, width).compile(StructuredOutputsParams(json_object=True).value).matcher()
        assert matcher.consume(bundled().token_to_id("{") or 0)
        mask = matcher.mask()
        assert mask is not None and len(mask) == -(-width // 32)
        assert max(allowed(matcher)) < min(width, 3_072)


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback", "byte_fallback_no_strip", "unigram_byte_fallback"])
@pytest.mark.parametrize("text", ["</s>", "a <|im_start|> b", "<tool call>x", "ñandú", "<unk>", "two  spaces\n"])
def test_literals_that_spell_added_tokens_are_written_out(family: str, text: str) -> None:
    tokenizer = make(family)
    own = GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size)
    for asked in ({"choice": [text]}, {"json": {"const": text}}):
        written = sampled(own.compile(StructuredOutputsParams(**asked).value), 1, tokenizer)
        assert written is not None and (written == text or json.loads(written) == text)


@pytest.mark.parametrize("family", ["metaspace", "word_piece", "suffix"])
def test_tokenizers_without_bytes_are_refused(family: str) -> None:
    tokenizer = make(family)
    with pytest.raises(RequestError, match=r"neighbours|ends the answer"):
        GrammarCompiler(lambda: tokenizer, 300, (0,)).compile(StructuredOutputsParams(json={}).value)


def test_whitespace_between_tokens_is_limited() -> None:
    for blanks in ("", " ", "\t", "\n", "\n" + 16 * " ", "\n" + 8 * "\t"):
        assert verdict('{"a":' + blanks + "1" + blanks + "}", json_object=True) == "complete"
    for blanks in ("  ", "\n\n", " \n", "\n" + 17 * " ", "\n \t"):
        assert verdict('{"a":' + blanks + "1}", json_object=True) == "refused"
    assert verdict('{ "a"', json_object=True, disable_any_whitespace=True) == "refused"
    assert verdict('{"a":[1,2]}', json_object=True, disable_any_whitespace=True) == "complete"


GRAMMARS: list[tuple[dict[str, Any], str, str]] = [
    ({"regex": r"\d{3}-\d{4}"}, "555-0123", "5550123"),
    ({"choice": ["red", "dark red", 'a "quote"', "é😀"]}, 'a "quote"', "dark"),
    ({"grammar": 'start: "<" word ">"\nword: /[a-z]+/'}, "<abc>", "<1>"),
    ({"grammar": 'root ::= "[" item ("," item)* "]"\nitem ::= [0-9]+'}, "[1,22]", "[1,]"),
    ({"grammar": 'start: "v=" %json {"type": "boolean"}'}, "v=true", "v=maybe"),
]


@pytest.mark.parametrize(("asked", "good", "bad"), GRAMMARS)
def test_grammars_of_every_kind_accept_good_and_refuse_bad_texts(asked: dict[str, Any], good: str, bad: str) -> None:
    assert verdict(good, **asked) == "complete" and verdict(bad, **asked) != "complete"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"regex": "(a"}, "unclosed group"),
    ({"regex": "a(?=b)"}, "look-around"),
    ({"regex": r"(a)\1"}, "backreferences"),
    ({"grammar": 'start: "a" b'}, "unknown name"),
    ({"grammar": "root ::= ("}, "cannot be followed"),
    ({"grammar": 'start: "a" <[99999]>'}, "too large"),
    ({"grammar": 'start: %json {"not": {}, "x\\u002dguidance": {"lenient": true}}'}, '"not"'),
    ({"grammar": 'start: %json {"x-guidance": {}}'}, "x-guidance"),
    ({"grammar": "start: a\na[temperature=0.5]: /x/"}, "temperature"),
    ({"grammar": '{"grammars": []}'}, "got JSON"),
    ({"json": {"x-guidance": {"lenient": True}, "not": {}}}, "x-guidance"),
    ({"json": "{"}, "not JSON"),
    ({"json": '{"a": NaN}'}, "NaN"),
    ({"json": False}, "schema false"),
    ({"json": [1]}, "JSON object"),
    ({"json": OPEN}, "too big"),
    ({"json": {"description": "x" * MAX_GRAMMAR_CHARS}}, "characters"),
    ({"choice": []}, "at least one"),
    ({"choice": ["a", ""]}, "not empty"),
    ({"choice": "ab"}, "list"),
    ({}, "exactly one"),
    ({"json": {}, "regex": "a"}, "json, regex"),
    ({"json_object": True, "disable_any_whitespace": 1}, "true or false"),
]


@pytest.mark.parametrize(("asked", "named"), BAD, ids=lambda value: str(value)[:40])
def test_a_form_that_cannot_be_followed_is_refused(asked: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError) as caught:
        compiled(**asked)
    assert (
        named in str(caught.value)
        and str(caught.value).startswith("structured_outputs")
        and len(str(caught.value)) < 700
    )


def test_nesting_without_end_is_refused_cleanly() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5_000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(RequestError, match="deep"):
        StructuredOutputsParams(json=schema)
    with pytest.raises(RequestError):
        compiled(json='{"items":' * 900 + "{}" + "}" * 900)


@pytest.mark.parametrize("limit", [200, pytest.param(_LIMITS["max_items_in_row"], marks=pytest.mark.nightly)])
def test_an_ambiguous_grammar_ends_with_an_error_and_not_with_the_machine(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_LIMITS, "max_items_in_row", limit)  # time grows with the square of it
    tokenizer, own = of_bytes()
    matcher = own.compile(StructuredOutputsParams(grammar=AMBIGUOUS).value).matcher()
    for place in range(1000):
        if (not place % 50 and matcher.mask() is None) or not matcher.consume(ord("a")):
            break
    assert "items" in matcher.error and matcher.num_consumed < limit and tokenizer.vocab_size > ord("a")


@pytest.mark.parametrize("closed", [True, False])
def test_limits_leave_room_for_many_optional_properties(closed: bool) -> None:
    """Schemas of Kubernetes and of settings of editors have up to some hundred of them."""
    wide = {"type": "object", "properties": {f"setting{i}": {"type": "string"} for i in range(200)}}
    inner = wide | {"additionalProperties": False} if closed else wide
    schema = {"type": "object", "properties": {"a": inner, "b": {"type": "array", "items": inner}}}
    some = {f"setting{i}": "some words of it" for i in range(0, 200, 7)}
    for value in ({"a": some, "b": [some, {}, some]}, {"b": [some]}):
        assert verdict(json.dumps(value), json=schema) == "complete"


def test_sampling_parameters_take_it_by_name_and_refuse_what_contradicts_it() -> None:
    params = SamplingParams.from_dict({"structured_outputs": {"choice": ["a"], "disable_fallback": True}})
    assert params.structured_outputs == StructuredOutputsParams(choice=("a",)) and hash(params)
    with pytest.raises(RequestError, match="whitespace_pattern"):
        SamplingParams(structured_outputs={"json": {}, "whitespace_pattern": " *"})  # type: ignore[arg-type]
    for more in ({"min_tokens": 2}, {"ignore_eos": True}):
        with pytest.raises(RequestError, match=next(iter(more))):
            SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"), **more)


@pytest.mark.full
def test_without_llguidance_the_rest_works_and_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['llguidance'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *more: None if name == 'llguidance' else find(name, *more)\n"
        "from chairlift import LLM, RequestError, SamplingParams\n"
        "llm = LLM(num_kv_blocks=20, max_num_seqs=2)\n"
        "print(len(llm.generate('Hi', SamplingParams(max_tokens=3))[0].outputs[0].token_ids))\n"
        "try:\n    llm.generate('Hi', SamplingParams(structured_outputs={'json': {}}))\n"
        "except RequestError as error:\n    print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("3\n") and "pip install llguidance" in run.stdout
