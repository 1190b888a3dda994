"""Calls that a grammar guarantees, read while they grow: every format, however the text is cut and wherever it ends."""

from __future__ import annotations

import json
from typing import Any

import jiter
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.base.structured_outputs import StructuredOutputsParams
from chairlift.text.tool_calls import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    Answer,
    AnswerReader,
    CallBegun,
    CallPiece,
    Thinking,
    check_tools,
    complete_part,
    guarantees_calls,
    output_constraint,
    read_answer,
)
from chairlift.text.tool_calls.forced import calls_format, strict_calls_format
from chairlift.text.tool_calls.formats import Body
from tests.text.grammar.models import of_bytes, sampled, verdict
from tests.text.tool_calls.recorded import as_calls, split_read
from tests.text.tool_calls.test_forced import FORCED, LOOK, SHORT, WRITTEN, tools_of

LONG = 'Ulm \\"é😀\\\\ \\n{[' + "many words " * 6
DEEP: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "deep": {
            "type": "object",
            "properties": {"x": {"type": "array", "items": {"type": ["string", "number", "boolean", "null"]}}},
        },
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "n": {"type": "number"},
    },
    "required": ["place"],
}
NESTED = '{"x": ["a ]\\" b", -1.5e3, true, null]}'


def reader(name: str, tools: Any, **options: Any) -> AnswerReader:
    how = {"held": True, "guaranteed": True, "custom": tools.custom, "parallel": tools.parallel, **options}
    return AnswerReader(TOOL_FORMATS[name], None, tools.schemas, **how)


def written(name: str, *calls: str) -> str:
    """The text in which a model writes the calls ``long``, ``empty`` and ``null`` one after another in the format."""
    form = TOOL_FORMATS[name]
    tagged = {
        "qwen3_coder": "<parameter={0}>\n{1}\n</parameter>\n",
        "seed_oss": "<parameter={0}>{1}</parameter>\n",
        "minimax_m2": '<parameter name="{0}">{1}</parameter>\n',
        "glm": "<arg_key>{0}</arg_key>\n<arg_value>{1}</arg_value>\n",
        "hy_v3": "<arg_key>{0}</arg_key>\n<arg_value>{1}</arg_value>\n",
        "step3": '<steptml:parameter name="{0}">{1}</steptml:parameter>\n',
        "deepseek_v32": '<｜DSML｜parameter name="{0}" string="{2}">{1}</｜DSML｜parameter>\n',
        "deepseek_v4": '<｜DSML｜parameter name="{0}" string="{2}">{1}</｜DSML｜parameter>\n',
        "kimi_k3": '<|open|>argument key="{0}" type="{3}"<|sep|>{1}<|close|>argument<|sep|>',
    }
    values = {
        "long": [
            ("place", json.dumps("x" + json.loads(f'"{LONG}"'), ensure_ascii=False), "string"),
            ("deep", NESTED, "object"),
        ],
        "null": [("place", '"b"', "string"), ("maybe", "null", "null"), ("n", "-1.5e3", "number")],
        "empty": [],
    }
    before, separator, after = _series(form)
    texts = []
    for number, call in enumerate(calls):
        begin, end = _around(form, "now" if call == "empty" else "look", number)
        if name in tagged:
            given = [(key, json.loads(v) if kind == "string" else v, kind) for key, v, kind in values[call]]
            body = "".join(tagged[name].format(key, v, str(kind == "string").lower(), kind) for key, v, kind in given)
        else:
            body = "{" + ", ".join(f'"{key}": {value}' for key, value, _ in values[call]) + "}"
        texts.append(begin + body + end)
    return before + (separator or "").join(texts) + after


def _series(form: Any) -> tuple[str, str | None, str]:
    """The text around and between calls, from the grammar itself."""
    many = calls_format(form, tools_of(DEEP))
    parts = many["elements"] if many["type"] == "sequence" else [many]
    at = next(index for index, part in enumerate(parts) if part["type"] == "tags_with_separator")
    words = ["".join(part["value"] for part in side) for side in (parts[:at], parts[at + 1 :])]
    return words[0], None if parts[at]["stop_after_first"] else parts[at]["separator"], words[1]


def _around(form: Any, name: str, number: int) -> tuple[str, str]:
    """The text before and after the arguments of a call, from the grammar itself."""
    tags = calls_format(form, check_tools([{"type": "function", "function": {"name": name}}], "required"))
    many = next(part for part in tags.get("elements", [tags]) if part["type"] == "tags_with_separator")
    content = many["tags"][0]["content"]
    parts = content["elements"] if content["type"] == "sequence" else [content]
    texts = [str(number) if part["type"] == "regex" else part.get("value", "\0") for part in parts]
    before, _, after = "".join([many["tags"][0]["begin"], *texts, many["tags"][0]["end"]]).partition("\0")
    if form.body is Body.TAGGED:
        before, mark, after = before.rpartition(form.call_end)
        return before, mark + after
    return before, after


def texts_of(name: str) -> list[str]:
    one = TOOL_FORMATS[name].body is Body.HARMONY or not TOOL_FORMATS[name].section
    texts = [written(name, call) for call in ("long", "null", "empty")]
    return texts if one else [*texts, written(name, "null", "empty", "null")]


def arguments_of(answer: Answer) -> list[str]:
    return [call.arguments for call in answer.calls]


@pytest.mark.parametrize("name", FORCED)
def test_the_texts_of_these_tests_follow_the_grammar(name: str) -> None:
    grammar = {"format": calls_format(TOOL_FORMATS[name], tools_of(DEEP))}
    assert [verdict(text, structural_tag=grammar) for text in texts_of(name)] == ["complete"] * len(texts_of(name))


@pytest.mark.parametrize("name", FORCED)
def test_a_growing_call_is_the_call_of_the_whole_text(name: str) -> None:
    tools = tools_of(DEEP)
    for text in texts_of(name):
        plain = read_answer(text, AnswerReader(TOOL_FORMATS[name], None, tools.schemas, held=True))
        whole = read_answer(text, reader(name, tools))
        assert as_calls(whole) == as_calls(plain) and whole.broken == plain.broken == []
        assert not whole.content and not any(call.is_cut for call in whole.calls)
        assert [call.id for call in whole.calls] == [call.id for call in plain.calls]
        for size in (1, 2, 3, 7):
            assert split_read(reader(name, tools), [text[at : at + size] for at in range(0, len(text), size)]) == whole


@pytest.mark.parametrize("name", FORCED)
def test_wherever_the_text_ends_nothing_was_taken_back(name: str) -> None:
    """At every end the pieces give the whole answer, and each answer begins with the answer of the shorter text."""
    tools = tools_of(DEEP)
    for text in texts_of(name):
        before = Answer()
        streamed = reader(name, tools)
        sent = Answer()
        for at in range(len(text) + 1):
            answer = read_answer(text[:at], reader(name, tools))
            assert at % 5 or split_read(reader(name, tools), list(text[:at])) == answer
            for shorter, longer in zip(before.calls, answer.calls, strict=False):
                assert longer.arguments.startswith(shorter.arguments)
                assert shorter.is_cut or shorter == longer
            assert len(answer.calls) >= len(before.calls)
            assert all(not call.is_cut for call in answer.calls[:-1])
            assert (
                bool(answer.broken) == any(call.is_cut for call in answer.calls) or not answer.calls or answer.content
            )
            for call in answer.calls:
                assert jiter.from_json(call.arguments.encode() or b"{}", partial_mode=True) == json.loads(
                    complete_part(call.arguments)
                )
            sent.add(streamed.feed(text[at - 1 : at] if at else ""))
            growing = [*arguments_of(sent), *(["".join(sent._pieces)] if sent._begun else [])]
            assert growing == arguments_of(answer)
            before = answer


@pytest.mark.parametrize("name", FORCED)
def test_a_text_in_the_arguments_is_never_held_back(name: str) -> None:
    text = written(name, "long")
    begin = text.index("many words")
    streamed = reader(name, tools_of(DEEP))
    streamed.feed(text[:begin])
    for char in "many words":
        assert streamed.feed(char) == [CallPiece(char)] or char == " "


@pytest.mark.parametrize("name", FORCED)
def test_random_outputs_of_the_grammar_grow(name: str) -> None:
    tools = tools_of(SHORT)
    held = output_constraint(None, tools, TOOL_FORMATS[name], None, Thinking.NONE)
    assert held is not None and guarantees_calls(None, tools, TOOL_FORMATS[name])
    tokenizer, compiler = of_bytes()
    made = compiler.compile(held.value)
    found = 0
    for seed in range(8):
        text = sampled(made, seed, tokenizer, most=1500)
        if text is None:
            continue
        found += 1
        plain = read_answer(text, AnswerReader(TOOL_FORMATS[name], None, tools.schemas, held=True))
        growing = reader(name, tools)
        assert any(isinstance(event, CallBegun) for event in growing.feed(text))
        assert as_calls(split_read(reader(name, tools), list(text))) == as_calls(plain)
    assert found


# --- custom tools ---------------------------------------------------------------------------------------------------


def custom_tools(choice: Any = "required") -> Any:
    return check_tools([{"type": "custom", "custom": {"name": "patch"}}], choice)


INPUTS = ["", "a", '\n*** Begin\n+ "é😀" \\n\t</tool_call>\n\n', "\ud83d x", "\ude00", "\\", "a\\", "😀"]


@pytest.mark.parametrize("text", INPUTS)
def test_the_text_of_a_custom_tool_grows_without_its_escapes(text: str) -> None:
    for ascii_only in (True, False):
        if not ascii_only and any("\ud800" <= char <= "\udfff" for char in text):
            continue
        given = json.dumps({"input": text}, ensure_ascii=ascii_only)
        call = f'<tool_call>\n{{"name": "patch", "arguments": {given}}}\n</tool_call>'
        whole = read_answer(call, reader("hermes", custom_tools()))
        expected = "".join("\ufffd" if "\ud800" <= char <= "\udfff" else char for char in text)
        assert [each.text for each in whole.calls] == [expected] and not whole.broken
        plain = read_answer(call, AnswerReader(TOOL_FORMATS["hermes"], None, {"patch": {}}, custom={"patch"}))
        assert [each.text for each in plain.calls] == [expected]
        before = ""
        for at in range(len(call)):
            answer = read_answer(call[:at], reader("hermes", custom_tools()))
            assert split_read(reader("hermes", custom_tools()), list(call[:at])) == answer
            for each in answer.calls:
                assert each.text is not None and each.text.startswith(before) and expected.startswith(each.text)
                before = each.text


@pytest.mark.parametrize("name", ["qwen3_coder", "glm", "minimax_m2", "deepseek_v32", "kimi_k3"])
def test_the_text_of_a_custom_tool_in_a_tag_grows_as_it_is(name: str) -> None:
    begin, end = _around(TOOL_FORMATS[name], "patch", 0)
    before, _, after = _series(TOOL_FORMATS[name])
    tag = {
        "qwen3_coder": "<parameter=input>\n{0}\n</parameter>\n",
        "glm": "<arg_key>input</arg_key>\n<arg_value>{0}</arg_value>\n",
        "minimax_m2": '<parameter name="input">{0}</parameter>\n',
        "deepseek_v32": '<｜DSML｜parameter name="input" string="true">{0}</｜DSML｜parameter>\n',
        "kimi_k3": '<|open|>argument key="input" type="string"<|sep|>{0}<|close|>argument<|sep|>',
    }[name]
    given = '*** Begin\n+ "é😀" \\n</x>\n\n<b>\n'
    text = before + begin + tag.format(given) + end + after
    assert verdict(text, structural_tag={"format": calls_format(TOOL_FORMATS[name], custom_tools())}) == "complete"
    answer = read_answer(text, reader(name, custom_tools()))
    assert [(call.text, call.is_cut) for call in answer.calls] == [(given, False)] and not answer.content
    for at in range(len(text)):
        cut = read_answer(text[:at], reader(name, custom_tools()))
        assert split_read(reader(name, custom_tools()), list(text[:at])) == cut
        assert all(given.startswith(call.text or "") for call in cut.calls)


# --- strict functions, one call, and what is not guaranteed -----------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - {"harmony", "llama3_json"}))
def test_strict_calls_grow_after_text_and_text_may_follow(name: str) -> None:
    strict = {"type": "function", "function": {"name": "look", "parameters": LOOK, "strict": True}}
    tools = check_tools([strict, {"type": "function", "function": {"name": "now"}}], "auto")
    form = TOOL_FORMATS[name]
    assert guarantees_calls(None, tools, form)
    made = strict_calls_format(form, tools)
    for text in (f"I look. {WRITTEN[name]}", f"{WRITTEN[name]} So.", "No call."):
        plain = read_answer(text, AnswerReader(form, None, tools.schemas, held=True))
        whole = read_answer(text, reader(name, tools))
        assert (whole.content, as_calls(whole), whole.broken) == (plain.content, as_calls(plain), plain.broken)
        if not text.endswith("So."):
            assert verdict(text, structural_tag={"format": made}) == "complete"
        for at in range(len(text)):
            cut = read_answer(text[:at], reader(name, tools))
            assert split_read(reader(name, tools), list(text[:at])) == cut


def test_a_custom_tool_beside_a_strict_function_gets_a_text() -> None:
    strict = {"type": "function", "function": {"name": "look", "parameters": LOOK, "strict": True}}
    tools = check_tools([strict, {"type": "custom", "custom": {"name": "patch"}}], "auto")
    made = {"format": strict_calls_format(TOOL_FORMATS["hermes"], tools)}
    call = '<tool_call>\n{{"name": "patch", "arguments": {0}}}\n</tool_call>'
    assert verdict(call.format('{"input": "x"}'), structural_tag=made) == "complete"
    assert verdict(call.format('{"other": 5}'), structural_tag=made) == "refused"


def test_only_the_first_call_grows_where_one_is_wanted() -> None:
    text = written("hermes", "null", "empty")
    for pieces in ([text], list(text)):
        answer = split_read(reader("hermes", tools_of(DEEP, parallel=False)), pieces)
        assert [call.name for call in answer.calls] == ["look"]
        assert answer.broken == ["parallel_tool_calls is false, and 1 more calls were left out"]


def test_a_head_that_is_cut_is_text() -> None:
    for text in ('<tool_call>\n{"name": "lo', "<tool_call>", '<tool_call>\n{"name": "look", "argume'):
        for pieces in ([text], list(text)):
            answer = split_read(reader("hermes", tools_of(DEEP)), pieces)
            assert (answer.content, answer.calls, len(answer.broken)) == (text, [], 1)


def test_a_call_in_reasoning_does_not_grow() -> None:
    text = f"Hm. {written('hermes', 'null')}</think>\n\n{written('hermes', 'empty')}"
    tools = tools_of(DEEP)
    how: Any = {"inside": True, "held": True, "guaranteed": True}
    for pieces in ([text], list(text)):
        answer = split_read(
            AnswerReader(TOOL_FORMATS["hermes"], REASONING_FORMATS["think"], tools.schemas, **how), pieces
        )
        assert [call.name for call in answer.calls] == ["now"] and "look" in answer.reasoning


def test_beside_a_form_no_call_is_certain() -> None:
    form = StructuredOutputsParams(json_object=True)
    assert guarantees_calls(form, tools_of(DEEP), TOOL_FORMATS["hermes"])
    assert not guarantees_calls(form, tools_of(DEEP, "auto"), TOOL_FORMATS["hermes"])
    assert not guarantees_calls(None, tools_of(DEEP, "auto"), TOOL_FORMATS["hermes"])


def test_what_a_grammar_lets_through_and_readers_do_not_is_named() -> None:
    for arguments, reason in (('{"a": 1, "a": 2}', "the same name twice"), ('{"a": 1e999}', "too large")):
        text = f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'
        answer = read_answer(text, reader("hermes", tools_of(DEEP)))
        assert arguments_of(answer) == [arguments] and not answer.calls[0].is_cut and reason in answer.broken[0]


def test_text_that_no_grammar_allows_ends_a_call() -> None:
    text = '<tool_call>\n{"name": "look", "arguments": {"place": no}}\n</tool_call>'
    for pieces in ([text], list(text)):
        answer = split_read(reader("hermes", tools_of(DEEP)), pieces)
        assert [call.is_cut for call in answer.calls] == [True] and "no JSON value" in answer.broken[0]


# --- the complete part of JSON ----------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6) | st.text(max_size=5)
LISTS = st.lists(SCALARS | st.lists(SCALARS, max_size=3), max_size=3)
VALUES = SCALARS | LISTS | st.dictionaries(st.text(max_size=3), SCALARS | LISTS, max_size=3)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), st.sampled_from([None, 1]), st.booleans())
def test_the_complete_part_is_what_anthropics_client_reads(value: Any, indent: int | None, ascii_only: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    for at in range(1, len(text) + 1):
        assert json.loads(complete_part(text[:at])) == jiter.from_json(text[:at].encode(), partial_mode=True), text[:at]
    assert complete_part("") == "{}"
