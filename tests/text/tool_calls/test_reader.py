"""The reader of answers: every format, however its text is cut; and text that only looks like a call."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.text.tool_calls import REASONING_FORMATS, TOOL_FORMATS, Answer, AnswerReader, read_answer
from chairlift.text.tool_calls.scan import CUT_OFF
from tests.text.tool_calls.recorded import RECORDED, TOOLS, as_calls, reader_for, split_read, without_edges

IDS = [f"{name}{index}" for index, (name, *_) in enumerate(RECORDED)]


@pytest.mark.parametrize(("name", "text", "content", "calls"), RECORDED, ids=IDS)
def test_recorded_answers_have_their_calls_however_they_are_cut(
    name: str, text: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    whole = read_answer(text, reader_for(name))
    assert (whole.content, as_calls(whole), whole.broken) == (content, calls, [])
    for size in (1, 2, 3, 7):
        assert split_read(reader_for(name), [text[at : at + size] for at in range(0, len(text), size)]) == whole
    for at in range(len(text)):
        assert split_read(reader_for(name), [text[:at], text[at:]]) == whole, (text[:at], text[at:])


@pytest.mark.parametrize(("name", "text", "content", "calls"), RECORDED, ids=IDS)
def test_an_answer_that_is_cut_off_loses_no_text_and_invents_no_call(
    name: str, text: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    for at in range(len(text)):
        answer = read_answer(text[:at], reader_for(name))
        found = as_calls(answer)
        assert found == calls[: len(found)]
        if not found and name != "harmony":
            assert answer.content.strip() == without_edges(name, text[:at]).strip()


def test_every_format_is_recorded() -> None:
    assert {name for name, *_ in RECORDED} == set(TOOL_FORMATS)


def test_no_marker_begins_with_another_that_is_looked_for_beside_it() -> None:
    for form in TOOL_FORMATS.values():
        groups = [
            form.begins,
            (form.call, form.section_end),
            (form.key, form.call_end),
            tuple(mark for mark, _ in form.values),
            form.name_ends,
        ]
        for group in groups:
            marks = [each for each in group if each]
            assert not [(a, b) for a in marks for b in marks if a != b and b.startswith(a)], form.name


PLAIN = [
    ("hermes", "Models write <tool_call> before a call."),
    ("hermes", '```\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n```\nSo.'),
    ("hermes", 'Use `<tool_call>{"name": "now", "arguments": {}}</tool_call>` here.'),
    ("hermes", '~~~xml\n```\n<tool_call>{"name": "now"}</tool_call>\n~~~'),
    ("llama3_json", '{"name": "Bob", "age": 3}'),
    ("llama3_json", '{"name": "look", "parameters": {}} is how a call looks.'),
    ("llama3_json", "{not json}"),
    ("llama3_json", '```json\n{"name": "look", "parameters": {}}\n```'),
    ("pythonic", "[1, 2, 3]"),
    ("pythonic", "[look](http://localhost)"),
    ("pythonic", "[look(place='Ulm')] and more"),
    ("glm", "The tag <tool_call> is special.\n"),
    ("qwen3_coder", "<function=look> is how it begins."),
    ("qwen3_coder", "A `<function=now>\n</function>` call."),
    ("mistral", "[TOOL_CALLS] is a marker"),
    ("functionary_v31", "<function=look>no json</function>"),
    ("hermes", "ends with <tool_"),
    ("hermes", "  spaces \n around\n\n"),
]


@pytest.mark.parametrize(("name", "text"), PLAIN)
def test_plain_text_is_never_taken_for_a_call(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        answer = split_read(reader_for(name), pieces)
        assert (answer.content, answer.calls) == (text, [])


BROKEN = [
    ("hermes", '<tool_call>\n{"name": "look", "arguments": {"place": "a "b" c"}}\n</tool_call>', "there is a word"),
    ("hermes", '<tool_call>{"name": "fly", "arguments": {}}</tool_call>', "'fly' is none of the tools (look, now)"),
    ("hermes", '<tool_call>{"name": "look", "arguments": [1]}</tool_call>', "the arguments are no object"),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "a call has no name"),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"place": NaN}}</tool_call>', "NaN is no JSON value"),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"a": 1, "a": 2}}</tool_call>', "the same name twice"),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"days": 1e999}}</tool_call>', "too large"),
    ("hermes", '<tool_call>{"name": "look", "arguments": {"place": "Ul', CUT_OFF),
    ("hermes", "<tool_call>" + '{"a":' * 100, "JSON has something else"),
    ("qwen3_coder", "<tool_call>\n<function=look>\n<parameter=place>\nUlm", CUT_OFF),
    ("qwen3_coder", "<tool_call>\n<function=look>\nUlm\n</function>\n</tool_call>", "text between the arguments"),
    ("lfm2", "<|tool_call_start|>[look(place=__import__('os'))]<|tool_call_end|>", "is no value"),
    ("lfm2", "<|tool_call_start|>[look(" + "a=" + "[" * 200 + "]" * 200 + ")]<|tool_call_end|>", "more than 64 deep"),
    ("gemma4", '<|tool_call>call:look{place:<|"|>Ulm}<tool_call|>', "a text has no end"),
    ("harmony", "<|channel|>commentary to=functions.look<|message|>no json<|call|>", "there is a word"),
    ("kimi_k2", "<|tool_calls_section_begin|>nothing", "no call follows"),
]


@pytest.mark.parametrize(("name", "text", "reason"), BROKEN)
def test_a_broken_call_is_text_with_a_reason(name: str, text: str, reason: str) -> None:
    for pieces in ([text], list(text)):
        answer = split_read(reader_for(name), pieces)
        assert answer.calls == []
        assert answer.content.startswith(text[:20])
        assert len(answer.broken) == 1 and reason in answer.broken[0], answer.broken
    if name != "harmony":  # the mark at the end of a turn is no text
        assert answer.content == text


def test_a_good_call_behind_a_broken_one_is_a_call() -> None:
    text = '<tool_call>{"name": look}</tool_call>\n<tool_call>{"name": "now"}</tool_call>'
    for pieces in ([text], list(text)):
        answer = split_read(reader_for("hermes"), pieces)
        assert as_calls(answer) == [("now", {})]
        assert answer.content == '<tool_call>{"name": look}</tool_call>'


def test_calls_after_the_first_are_left_out_where_one_is_wanted() -> None:
    text = '<tool_call>{"name": "now"}</tool_call>' * 3
    answer = read_answer(text, reader_for("hermes", parallel=False))
    assert len(answer.calls) == 1
    assert answer.broken == ["parallel_tool_calls is false, and 2 more calls were left out"]


_DSML = "｜DSML｜"
PRINTED = {
    "qwen3_coder": (
        "<tool_call>\n<function=look>\n",
        "<parameter={0}>\n{1}\n</parameter>\n",
        "</function>\n</tool_call>",
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=look>\n",
        "<parameter={0}>{1}</parameter>\n",
        "</function>\n</seed:tool_call>",
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="look">\n',
        '<parameter name="{0}">{1}</parameter>\n',
        "</invoke>\n</minimax:tool_call>",
    ),
    "glm": ("<tool_call>look\n", "<arg_key>{0}</arg_key>\n<arg_value>{1}</arg_value>\n", "</tool_call>"),
    "deepseek_v32": (
        f'<{_DSML}function_calls>\n<{_DSML}invoke name="look">\n',
        f'<{_DSML}parameter name="{{0}}" string="{{2}}">{{1}}</{_DSML}parameter>\n',
        f"</{_DSML}invoke>\n</{_DSML}function_calls>",
    ),
}
"""Name of a format -> how its templates print a call: the beginning, an argument, the end."""
EDGES = [
    *(
        "Ulm",
        "\nUlm",
        "Ulm\n",
        "\n",
        "\n\nUlm\n\n",
        "\r\nUlm\r\n",
        " Ulm ",
        "\tUlm",
        "",
        "5",
        "1e5",
        "true",
        "null",
        "[1]",
    ),
    *('{"a": 1}', '"quoted"', "'quoted'", "\\u00e9", "\\n", "a\nb", "<b>", "None", "\u2028", "\x00", "<tool_call>"),
]


@pytest.mark.parametrize("name", PRINTED)
def test_arguments_in_tags_are_read_as_they_are_printed(name: str) -> None:
    before, one, after = PRINTED[name]
    values: list[tuple[Any, Any]] = [("string", text) for text in EDGES]
    values += [(["string", "null"], "'q'"), (["string", "null"], '"q"'), (["string", "null"], None)]
    values += [("integer", 10**30), ("number", 1e5), ("number", -0.0), ("boolean", False), ("null", None)]
    values += [("array", ["a", "\nb ", ["</parameter>", "</arg_value>"]]), ("object", {"k k": {"z": ["\n", None]}})]
    for kind, value in values:
        tools = {"look": {"type": "object", "properties": {"a": {"type": kind}, "b": {"type": "string"}}}}
        text = value if isinstance(value, str) else json.dumps(value)
        call = one.format("a", text, str(isinstance(value, str)).lower()) + one.format("b", "Z", "true")
        answer = read_answer(before + call + after, AnswerReader(TOOL_FORMATS[name], None, tools))
        assert [repr(each) for each in as_calls(answer)] == [repr(("look", {"a": value, "b": "Z"}))]


@pytest.mark.parametrize("name", PRINTED)
def test_an_argument_may_have_spaces_around_its_name(name: str) -> None:
    before, one, after = PRINTED[name]
    for known, key in ((" a ", " a "), ("a", "a")):
        tools = {"look": {"type": "object", "properties": {known: {"type": "string"}}}}
        text = before + one.format(" a ", "x", "true") + after
        assert as_calls(read_answer(text, AnswerReader(TOOL_FORMATS[name], None, tools))) == [("look", {key: "x"})]


@pytest.mark.parametrize("text", ["it's", "'q'", "\\", "\\n", "\\u00e9", "a', b", "f('x')", "two\nlines", '"', ""])
def test_texts_of_lfm2_have_no_escapes(text: str) -> None:
    written = f"<|tool_call_start|>[look(place='{text}', days=2), look(place='{text}')]<|tool_call_end|>"
    answer = read_answer(written, reader_for("lfm2"))
    assert as_calls(answer) == [("look", {"place": text, "days": 2}), ("look", {"place": text})]


def test_keys_of_gemma_are_any_words() -> None:
    written = '<|tool_call>call:look{place:{k k:1,é:<|"|>a<|"|>,5:{x-y:None}}}<tool_call|>'
    assert as_calls(read_answer(written, reader_for("gemma4"))) == [
        ("look", {"place": {"k k": 1, "é": "a", "5": {"x-y": None}}})
    ]


def test_a_schema_that_refers_to_itself_is_read_in_time() -> None:
    again = {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}] * 500}
    chain = {f"c{i}": {"$ref": f"#/$defs/c{i + 1}"} for i in range(5000)}
    defs = {"a": again, "b": {"anyOf": [*again["anyOf"], {"type": "integer"}]}, **chain}
    tools = {"look": {"$defs": defs, "properties": {"a": {"$ref": "#/$defs/a"}, "b": {"$ref": "#/$defs/c0"}}}}
    before, one, after = PRINTED["glm"]
    text = before + one.format("a", "5", "") + one.format("b", "x", "") + after
    assert as_calls(read_answer(text, AnswerReader(TOOL_FORMATS["glm"], None, tools))) == [("look", {"a": 5, "b": "x"})]


def test_kimi_gives_its_calls_their_ids() -> None:
    (text,) = (text for name, text, *_ in RECORDED if name == "kimi_k2")
    assert [call.id for call in read_answer(text, reader_for("kimi_k2")).calls] == [
        "functions.look:0",
        "functions.now:1",
    ]


THOUGHTS = [
    ("think", False, "<think>\nHm, <tool_call>?\n</think>\n\nYes.", "Hm, <tool_call>?", "Yes."),
    ("think", False, "\n<think></think>\n\nYes.", "", "Yes."),
    ("think", False, " Yes, <think>.", "", " Yes, <think>."),
    ("think", True, "Hm.\n</think>\nYes.\n", "Hm.", "Yes.\n"),
    ("think", True, "Hm. ", "Hm.", ""),
    ("deepseek_r1", False, "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("deepseek_r1", False, "Hm.</think>Yes.", "Hm.", "Yes."),
    ("kimi_k3", False, "<|open|>think<|sep|>Hm.<|close|>think<|sep|>Yes.", "Hm.", "Yes."),
    ("minimax_m3", True, "Hm.</mm:think>Yes.", "Hm.", "Yes."),
    ("mistral", False, "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    ("gemma4", False, "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
    ("seed_oss", False, "<seed:think>Hm.</seed:think>Yes.", "Hm.", "Yes."),
    ("command_r7b", False, "<|START_THINKING|>Hm.<|END_THINKING|>Yes.", "Hm.", "Yes."),
    (
        "harmony",
        False,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>Oh.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        "Hm.\nOh.",
        "Yes.",
    ),
]


@pytest.mark.parametrize(("name", "inside", "text", "reasoning", "content"), THOUGHTS)
def test_reasoning_is_told_from_the_answer(name: str, inside: bool, text: str, reasoning: str, content: str) -> None:
    for at in range(len(text)):
        reader = AnswerReader(None, REASONING_FORMATS[name], inside=inside)
        answer = split_read(reader, [text[:at], text[at:]])
        assert (answer.reasoning, answer.content) == (reasoning, content)


def test_every_reasoning_format_is_tried() -> None:
    assert {name for name, *_ in THOUGHTS} == set(REASONING_FORMATS)


def test_calls_follow_reasoning() -> None:
    text = '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    answer = split_read(reader_for("hermes", "think"), list(text))
    assert (answer.reasoning, answer.content, as_calls(answer)) == ("Hm.", "", [("now", {})])


@pytest.mark.parametrize(("name", "text", "content", "calls"), RECORDED, ids=IDS)
@pytest.mark.parametrize("closed", [False, True])
def test_calls_in_reasoning_are_calls_only_if_it_never_closes(
    name: str, text: str, content: str, calls: list[tuple[str, dict[str, Any]]], closed: bool
) -> None:
    if not TOOL_FORMATS[name].begins:
        return  # such a call is a whole message, so none is in the reasoning
    whole = f"<think>\nHm.\n{text}\nSo.\n" + ("</think>\n\nYes." if closed else "")
    answer = read_answer(whole, reader_for(name, "think"))
    assert as_calls(answer) == ([] if closed else calls)
    if closed:
        assert (answer.reasoning, answer.content) == (without_edges(name, f"Hm.\n{text}\nSo."), "Yes.")
    else:
        assert answer.content == "" and answer.broken == []
        assert (answer.reasoning.startswith("Hm."), answer.reasoning.endswith("So.")) == (True, True)
        assert all(mark not in answer.reasoning for mark in TOOL_FORMATS[name].begins if mark != "<function=")
    for size in (1, 2, 7):
        pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
        assert split_read(reader_for(name, "think"), pieces) == answer


OPEN_THOUGHTS = [
    ("Hm. <tool_call>", "Hm. <tool_call>", 0, CUT_OFF),
    ('Hm. <tool_call>{"name": "no', 'Hm. <tool_call>{"name": "no', 0, CUT_OFF),
    ('<tool_call>{"name": "fly"}</tool_call>', '<tool_call>{"name": "fly"}</tool_call>', 0, "none of the tools"),
    ('Hm. `<tool_call>{"name": "now"}`', 'Hm. `<tool_call>{"name": "now"}`', 0, ""),
    ('A <tool_call>{"name": "now"}</tool_call> B <tool_call>{"name": "now"}', "A  B", 2, ""),
    ('A <tool_call>{"name": "now"}</tool_call> B <tool_call> C', "A  B <tool_call> C", 1, ""),
]


@pytest.mark.parametrize(("text", "reasoning", "num_calls", "reason"), OPEN_THOUGHTS)
def test_reasoning_that_never_closes_keeps_its_text(text: str, reasoning: str, num_calls: int, reason: str) -> None:
    for pieces in ([text], list(text)):
        answer = split_read(reader_for("hermes", "think", inside=True), pieces)
        assert (answer.reasoning, answer.content, len(answer.calls)) == (reasoning, "", num_calls)
        assert len(answer.broken) == bool(reason) and all(reason in each for each in answer.broken)


def test_the_end_of_reasoning_ends_a_call_in_it() -> None:
    text = "<think>I write <function=look>\n<parameter=place>\n and so on.</think>A <b>.</parameter>\n</function>"
    for pieces in ([text], list(text)):
        answer = split_read(reader_for("qwen3_coder", "think"), pieces)
        assert answer.reasoning == "I write <function=look>\n<parameter=place>\n and so on."
        assert (answer.content, answer.calls) == ("A <b>.</parameter>\n</function>", [])


def test_reasoning_streams_up_to_a_call_in_it() -> None:
    reader = reader_for("hermes", "think")
    seen = Answer()
    seen.add(reader.feed("<think>One. <tool_call> Two. <tool_call>{"))
    assert seen.reasoning == "One. <tool_call> Two."


def test_reasoning_tokens_are_those_up_to_its_end_mark() -> None:
    text = "<think>ab</think>cd"
    reader = AnswerReader(None, REASONING_FORMATS["think"])
    starts = [0, 7, 8, 9, 17, 18]  # <think>, a, b, </think>, c, d
    assert reader.num_reasoning_tokens(starts) == 0
    read = Answer()
    read.add(reader.feed(text[:9]))
    assert reader.num_reasoning_tokens(starts[:3]) == 3
    read.add(reader.feed(text[9:]))
    read.add(reader.finish())
    assert reader.num_reasoning_tokens(starts) == 4


def test_special_tokens_that_are_no_markers_are_left_out() -> None:
    text = "a<|im_end|>b<tool_call><|x|>"
    for pieces in ([text], list(text)):
        assert (
            split_read(reader_for("hermes", hidden=("<|im_end|>", "<tool_call>")), pieces).content
            == "ab<tool_call><|x|>"
        )


_MARKERS = sorted({mark for form in TOOL_FORMATS.values() for mark in form.markers})
_WORDS = [
    "look",
    "now",
    "functions.now:0",
    "{}",
    "[]",
    "[now()]",
    "call:now{}",
    "\n",
    " ",
    "`",
    "```",
    "place",
    "5",
    '"',
    "\\",
]
_VALUES = [
    '{"name": "look", "arguments": {"place": "Ulm"}}',
    '{"name": "now"}',
    "é",
    "😀",
    "<think>",
    "</think>",
    "text",
]
_PARTS = [*_MARKERS, *_WORDS, *_VALUES]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(sorted(TOOL_FORMATS)),
    st.lists(st.sampled_from(_PARTS), max_size=14),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_any_text_is_read_the_same_however_it_is_cut(name: str, parts: list[str], seed: int, thinks: bool) -> None:
    text, rng = "".join(parts), random.Random(seed)
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    options: dict[str, Any] = {"hidden": ("<|end|>", "<|x|>")}
    reasoning = "think" if thinks else ""
    whole = read_answer(text, reader_for(name, reasoning, **options))
    assert split_read(reader_for(name, reasoning, **options), pieces) == whole
    assert split_read(reader_for(name, reasoning, **options), list(text)) == whole
    assert all(call.name in TOOLS for call in whole.calls)
