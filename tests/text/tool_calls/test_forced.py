"""Answers held to calls: what the grammar lets through is read as calls whose arguments satisfy their schemas."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest

from chairlift.base.structured_outputs import StructuredOutputsParams
from chairlift.errors import RequestError
from chairlift.text.grammar.compiler import GrammarCompiler
from chairlift.text.tokenizer.byte_level import byte_tokenizer
from chairlift.text.tokenizer.tokenizer import Tokenizer
from chairlift.text.tool_calls import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerReader,
    Thinking,
    check_tools,
    output_constraint,
    read_answer,
    thinking_of,
)
from chairlift.text.tool_calls.forced import calls_format, strict_calls_format
from chairlift.text.tool_calls.formats import Body
from tests.text.grammar.models import follow, of_bytes, sampled, verdict
from tests.text.tool_calls.recorded import as_calls
from tests.text.tool_calls.test_reader import PRINTED

LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a b", "c"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "deep": {
            "type": "object",
            "properties": {"x": {"type": "array", "items": {"$ref": "#/$defs/yes"}, "maxItems": 2}},
        },
        "place": {"type": "string"},
    },
    "required": ["kind", "days"],
    "$defs": {"yes": {"type": "boolean"}},
}
SHORT = {**LOOK, "properties": {name: each for name, each in LOOK["properties"].items() if name != "place"}}
"""Without a text, which a random walk does not end."""


def tools_of(schema: Any, choice: Any = "required", parallel: bool = True) -> Any:
    look = {"type": "function", "function": {"name": "look", "parameters": schema}}
    return check_tools([look, {"type": "function", "function": {"name": "now"}}], choice, parallel)


FORCED = [name for name, row in TOOL_FORMATS.items() if row.body not in (Body.PYTHON, Body.GEMMA, Body.ELEMENTS)]
_DSML = "｜DSML｜"
FIRST = '{"kind": "a b", "days": 3, "place": "Ul\\nm"}'
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "look", "arguments": {FIRST}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=kind>\na b\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n<parameter=place>\nUl\nm\n</parameter>\n</function>\n</tool_call>\n"
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    "llama3_json": f'{{"name": "look", "parameters": {FIRST}}}',
    "mistral": f"[TOOL_CALLS]look[ARGS]{FIRST}[TOOL_CALLS]now[ARGS]{{}}",
    "mistral_nemo": f'[TOOL_CALLS][{{"name": "look", "arguments": {FIRST}}}, {{"name": "now", "arguments": {{}}}}]',
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{FIRST}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": f'<{_DSML}function_calls>\n<{_DSML}invoke name="look">\n'
    f'<{_DSML}parameter name="kind" string="true">a b</{_DSML}parameter>\n'
    f'<{_DSML}parameter name="days" string="false">3</{_DSML}parameter>\n'
    f'<{_DSML}parameter name="place" string="true">Ul\nm</{_DSML}parameter>\n</{_DSML}invoke>\n'
    f'<{_DSML}invoke name="now">\n</{_DSML}invoke>\n</{_DSML}function_calls>',
    "glm": "<tool_call>look\n<arg_key>kind</arg_key>\n<arg_value>a b</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n<arg_key>place</arg_key>\n<arg_value>Ul\nm</arg_value>\n</tool_call>\n"
    "<tool_call>now\n</tool_call>",
    "harmony": f"<|channel|>commentary to=functions.look <|constrain|>json<|message|>{FIRST}",
    "kimi_k2": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{FIRST}"
    "<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="look">\n<parameter name="kind">a b</parameter>\n'
    '<parameter name="days">3</parameter>\n<parameter name="place">Ul\nm</parameter>\n</invoke>\n'
    '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    "granite": f'<|tool_call|>[{{"name": "look", "arguments": {FIRST}}}, {{"name": "now", "arguments": {{}}}}]',
    "command_r7b": f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "look", "parameters": {FIRST}}}, '
    '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}]<|END_ACTION|>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="look" index="0"<|sep|>'
    '<|open|>argument key="kind" type="string"<|sep|>a b<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="integer"<|sep|>3<|close|>argument<|sep|>'
    '<|open|>argument key="place" type="string"<|sep|>Ul\nm<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="now" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "functionary_v31": f"<function=look>{FIRST}</function><function=now>{{}}</function>",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_as_models_of_the_format_write_them_are_accepted(name: str) -> None:
    tag, text = {"format": calls_format(TOOL_FORMATS[name], tools_of(LOOK))}, WRITTEN[name]
    assert verdict(text, structural_tag=tag) == "complete"
    answer = read_answer(text, AnswerReader(TOOL_FORMATS[name], None, tools_of(LOOK).schemas))
    expected = [("look", json.loads(FIRST)), ("now", {})]
    assert as_calls(answer) == expected[: 1 if name in ("harmony", "llama3_json") else 2] and not answer.broken
    for wrong in (f"I look. {text}", text.replace("look", "fly"), text.replace("days", "daze"), text.replace("3", "x")):
        assert verdict(wrong, structural_tag=tag) == "refused"
    for few in (tools_of(LOOK, parallel=False), tools_of(LOOK, {"type": "function", "function": {"name": "look"}})):
        one = {"format": calls_format(TOOL_FORMATS[name], few)}
        assert verdict(text, structural_tag=one) == ("complete" if len(as_calls(answer)) == 1 else "refused")


@pytest.mark.parametrize("name", FORCED)
def test_every_accepted_text_is_a_valid_call(name: str) -> None:
    form, tools, seen = TOOL_FORMATS[name], tools_of(SHORT), set()
    held = output_constraint(None, tools, form, None, Thinking.NONE)
    assert held is not None
    tokenizer, compiler = of_bytes()
    made, check = compiler.compile(held.value), jsonschema_rs.validator_for(SHORT)
    for seed in range(12):
        text = sampled(made, seed, tokenizer, most=2000)
        if text is None:
            continue
        answer = read_answer(text, AnswerReader(form, None, tools.schemas, held=True))
        assert answer.calls and not answer.broken and not answer.content, text
        seen |= {call.name for call in answer.calls}
        for call in answer.calls:
            assert check.is_valid(json.loads(call.arguments)) if call.name == "look" else call.arguments == "{}"
    assert seen == {"look", "now"}


OF_TEXTS: list[tuple[Any, str, Any]] = [
    ({"$ref": "#/$defs/colour"}, "red", "red"),
    ({"allOf": [{"$ref": "#/$defs/colour"}], "default": "red"}, "red", "red"),
    ({"type": ["string"]}, '"red"', '"red"'),
    ({"type": "string"}, "</a> 5", "</a> 5"),
    ({"anyOf": [{"$ref": "#/$defs/colour"}, {"type": "null"}]}, '"red"', "red"),
    ({"anyOf": [{"$ref": "#/$defs/colour"}, {"type": "null"}]}, "null", None),
    ({"type": ["string", "null"]}, '"null"', "null"),
    ({"type": ["string", "integer"]}, '"5 </parameter></arg_value>"', "5 </parameter></arg_value>"),
    ({}, '"5"', "5"),
    ({}, "5", 5),
    ({"enum": ["1", 1]}, '"1"', "1"),
    (
        {"type": "array", "items": {"type": "string"}},
        '["</parameter>", "</arg_value>"]',
        ["</parameter>", "</arg_value>"],
    ),
]
"""(schema of an argument, its text in a tag, the value of the text)."""


@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss", "minimax_m2", "glm", "deepseek_v32"])
@pytest.mark.parametrize(("schema", "text", "value"), OF_TEXTS)
def test_an_argument_that_is_let_through_has_one_value(name: str, schema: Any, text: str, value: Any) -> None:
    colours = {"colour": {"type": "string", "enum": ["red", "blue"]}}
    tools = tools_of({"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": colours})
    before, one, after = PRINTED[name]
    is_text = text == value and schema != {} and "anyOf" not in schema
    written = before + one.format("a", text, str(is_text).lower()) + after
    assert verdict(written, structural_tag={"format": calls_format(TOOL_FORMATS[name], tools)}) == "complete"
    answer = read_answer(written, AnswerReader(TOOL_FORMATS[name], None, tools.schemas, held=True))
    assert as_calls(answer) == [("look", {"a": value})] and not answer.broken


@pytest.mark.parametrize("name", sorted(set(TOOL_FORMATS) - set(FORCED)))
def test_a_format_without_a_grammar_is_refused(name: str) -> None:
    with pytest.raises(RequestError, match=f"in the format {name}"):
        calls_format(TOOL_FORMATS[name], tools_of(LOOK))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "a"}}}, r"parameters of look.a has 'pattern'"),
        ({"properties": {"a>": {}}}, r"has 'a>'"),
        ({"properties": {}, "anyOf": [{}]}, r"has 'anyOf'"),
        ({"properties": {"a": {"enum": ["", "b"]}}}, r"has 'enum'"),
    ],
)
def test_arguments_in_tags_have_limits(schema: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        calls_format(TOOL_FORMATS["qwen3_coder"], tools_of(schema))
    assert calls_format(TOOL_FORMATS["hermes"], tools_of(schema))


def test_objects_get_no_keys_that_their_schema_does_not_name() -> None:
    inner = {"type": "object", "properties": {"x": {"type": "integer"}}}
    free = {"type": "object", "additionalProperties": {"type": "integer"}, "properties": {}}
    schema = {"properties": {"in": inner, "free": free, "list": {"type": "array", "items": inner}}}
    tag = {"format": calls_format(TOOL_FORMATS["functionary_v31"], tools_of(schema))}
    for arguments, result in (
        ('{"in": {"x": 1}, "free": {"y": 1}, "list": [{"x": 1}]}', "complete"),
        ('{"y": 1}', "refused"),
        ('{"in": {"y": 1}}', "refused"),
        ('{"list": [{"y": 1}]}', "refused"),
    ):
        assert verdict(f"<function=look>{arguments}</function>", structural_tag=tag) == result
    assert verdict('<function=now>{"y": 1}</function>', structural_tag=tag) == "refused"
    both = {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}
    tag = {"format": calls_format(TOOL_FORMATS["functionary_v31"], tools_of(both))}
    assert verdict('<function=look>{"a": 1, "b": 2}</function>', structural_tag=tag) == "complete"


# --- strict functions, where the model decides ------------------------------------------------------------------------


def strict_tools(parallel: bool = True) -> Any:
    look = {"type": "function", "function": {"name": "look", "parameters": LOOK, "strict": True}}
    return check_tools([look, {"type": "function", "function": {"name": "now"}}], "auto", parallel)


@pytest.mark.parametrize("name", sorted(set(WRITTEN) - {"harmony", "llama3_json"}))
def test_calls_of_strict_functions_satisfy_their_schemas_between_free_text(name: str) -> None:
    form = TOOL_FORMATS[name]
    made = strict_calls_format(form, strict_tools())
    assert made is not None
    text = WRITTEN[name]
    for good in ("", "Just text.", text, f"I look. {text}", f"I look.\n{text}"):
        assert verdict(good, structural_tag={"format": made}) == "complete", good
        answer = read_answer(good, AnswerReader(form, None, strict_tools().schemas, held=True))
        assert len(as_calls(answer)) == (2 if text in good and good else 0) and not answer.broken
    for wrong in (text.replace("days", "daze"), text.replace("3", "x"), text.replace("look", "fly")):
        assert verdict(f"Hm. {wrong}", structural_tag={"format": made}) == "refused", wrong
    for begin in form.begins:
        assert verdict(f"Hm. {begin} is a mark", structural_tag={"format": made}) == "refused"


def test_one_call_is_allowed_where_calls_are_not_parallel() -> None:
    made = strict_calls_format(TOOL_FORMATS["hermes"], strict_tools(parallel=False))
    assert verdict(f"Hm. {NOW}", structural_tag={"format": made}) == "complete"
    assert verdict(f"{NOW}\n{NOW}", structural_tag={"format": made}) == "refused"


def test_calls_without_their_section_are_strict_too() -> None:
    made = {"format": strict_calls_format(TOOL_FORMATS["qwen3_coder"], strict_tools())}
    bare = WRITTEN["qwen3_coder"].removeprefix("<tool_call>\n").partition("\n<tool_call>")[0]
    assert verdict(f"Hm. {bare}", structural_tag=made) == "complete"
    assert verdict(bare.replace("days", "daze"), structural_tag=made) == "refused"


def test_functions_that_are_not_strict_get_any_arguments() -> None:
    made = {"format": strict_calls_format(TOOL_FORMATS["hermes"], strict_tools())}
    assert verdict(NOW.replace("{}", '{"a": [1]}'), structural_tag=made) == "complete"


def test_reasoning_comes_before_calls_of_strict_functions() -> None:
    held = output_constraint(None, strict_tools(), TOOL_FORMATS["hermes"], THINK, Thinking.INSIDE)
    assert whole(f"Hm. <tool_call> is a mark.</think>\n\nI look. {NOW}", held) == "complete"
    assert whole("Hm.</think>\n\n<tool_call> is a mark", held) == "refused"


@pytest.mark.parametrize("name", ["pythonic", "lfm2", "gemma4", "harmony", "llama3_json"])
def test_formats_without_a_first_mark_or_a_grammar_have_no_strict_calls(name: str) -> None:
    assert strict_calls_format(TOOL_FORMATS[name], strict_tools()) is None
    assert output_constraint(None, strict_tools(), TOOL_FORMATS[name], None, Thinking.NONE) is None


# --- reasoning, calls and content -----------------------------------------------------------------------------------

THINK, HARMONY = REASONING_FORMATS["think"], REASONING_FORMATS["harmony"]
FORM = StructuredOutputsParams(json={"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def whole(text: str, held: StructuredOutputsParams | None) -> str:
    assert held is not None and held.structural_tag is not None
    return verdict(text, structural_tag=held.structural_tag)


def test_the_prompt_tells_whether_reasoning_is_open() -> None:
    ends = {"<think>\n": Thinking.INSIDE, "<think>\n\n</think>\n\n": Thinking.NONE, "assistant\n": Thinking.MAY}
    for end, found in ends.items():
        assert thinking_of(THINK, end) is found
        assert thinking_of(REASONING_FORMATS["deepseek_r1"], end) is Thinking.INSIDE
        assert thinking_of(None, end) is Thinking.NONE


@pytest.mark.parametrize("content", ['{"ok": true}', NOW])
def test_reasoning_comes_first_and_then_a_form_or_calls(content: str) -> None:
    tools, form = tools_of(LOOK), TOOL_FORMATS["hermes"]
    for asked, given in ((None, tools), (FORM, tools), (FORM, tools_of(LOOK, "auto"))):
        wanted = "complete" if content == NOW or given.choice == "auto" else "refused"
        may = output_constraint(asked, given, form, THINK, Thinking.MAY)
        assert whole(content, may) == whole(f"<think>\nHm. {{</think>\n\n{content}", may) == wanted
        assert whole(f"Hm.</think>{content}", may) == "refused"
        assert whole(f"<think>Hm.</think>{content}<think>", may) == "refused"
        inside = output_constraint(asked, given, form, THINK, Thinking.INSIDE)
        assert whole(f"Hm. {content}</think>\n\n{content}", inside) == wanted
        assert whole(content, inside) == "prefix"
        none = output_constraint(asked, given, form, None, Thinking.NONE)
        assert whole(content, none) == wanted
        assert whole(f"<think>Hm.</think>{content}", none) == "refused"


def test_other_forms_come_after_the_reasoning() -> None:
    tag = {"structures": [{"begin": "<b>", "schema": {"type": "integer"}, "end": "</b>"}], "triggers": ["<b>"]}
    nothing = check_tools(None)
    for asked, text in (
        (StructuredOutputsParams(json_object=True), "{}"),
        (StructuredOutputsParams(regex="a{3}"), "aaa"),
        (StructuredOutputsParams(choice=["red", "blue"]), "blue"),
        (StructuredOutputsParams(structural_tag=tag), "one <b>1</b>"),
        (StructuredOutputsParams(structural_tag={"format": {"type": "const_string", "value": "x"}}), "x"),
    ):
        assert output_constraint(asked, nothing, None, None, Thinking.NONE) is asked
        held = output_constraint(asked, nothing, None, THINK, Thinking.INSIDE)
        assert whole(f"Hm.</think>\n{text}", held) == "complete"
        assert whole(f"Hm.</think>\n<b>{text}", held) == "refused"
    grammar = StructuredOutputsParams(grammar='start: "x"')
    assert output_constraint(grammar, nothing, None, THINK, Thinking.MAY) is grammar
    with pytest.raises(RequestError, match="grammar cannot begin after the reasoning"):
        output_constraint(grammar, nothing, None, THINK, Thinking.INSIDE)
    assert output_constraint(None, tools_of(LOOK, "auto"), TOOL_FORMATS["hermes"], THINK, Thinking.MAY) is None


def model_with(*marks: str) -> tuple[Tokenizer, GrammarCompiler]:
    """A token per byte, and one for each of the marks."""
    own = byte_tokenizer(("<|eos|>",), eos="<|eos|>")
    own.backend.add_tokens(list(marks))
    tokenizer = Tokenizer(own.backend, {"eos_token": "<|eos|>"})
    return tokenizer, GrammarCompiler(lambda: tokenizer, tokenizer.vocab_size)


def test_messages_of_gpt_oss_have_headers() -> None:
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    tools, form = tools_of(LOOK, "auto"), TOOL_FORMATS["harmony"]
    held = output_constraint(FORM, tools, form, HARMONY, Thinking.MAY)
    assert held is not None
    tokenizer, compiler = model_with("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>")
    made = compiler.compile(held.value)
    for text, calls, content in (
        ('<|channel|>final<|message|>{"ok": true}', [], '{"ok": true}'),
        ("<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}", [("now", {})], ""),
    ):
        for before, reasoning in (("", ""), (thought, "Hm.")):
            ids = tokenizer.encode(before + text, False)
            assert follow(made, ids, tokenizer.eos_token_ids[0])[0] == "complete"
            answer = read_answer(before + text, AnswerReader(form, HARMONY, tools.schemas))
            assert (as_calls(answer), answer.content, answer.reasoning) == (calls, content, reasoning)


def test_marks_that_are_tokens_are_not_spelled_in_others() -> None:
    tokenizer, compiler = model_with("<think>", "</think>", "<tool_call>", "</tool_call>")
    held = output_constraint(None, tools_of(LOOK), TOOL_FORMATS["hermes"], THINK, Thinking.MAY)
    assert held is not None
    made, end = compiler.compile(held.value), tokenizer.eos_token_ids[0]

    def taken(*parts: str | list[int]) -> str:
        ids = [i for part in parts for i in (tokenizer.encode(part, False) if isinstance(part, str) else part)]
        return follow(made, ids, end)[0]

    assert taken("<think>a <b></think>\n\n", NOW) == taken(NOW) == "complete"
    assert taken("<think>a ", list(b"</thin"), "</think>", NOW) == "complete"
    assert taken("<think>a ", list(b"</think>")) == "refused"
    assert taken("<think>a <tool_call>") == "refused"


@pytest.mark.parametrize("name", FORCED)
def test_what_a_format_forces_is_also_let_through_after_text(name: str) -> None:
    """A strict function's call under ``auto`` has the form of a forced one, from the first mark of the call on."""
    form = TOOL_FORMATS[name]
    function = {"name": "look", "parameters": SHORT, "strict": True}
    tools = [{"type": "function", "function": function}]
    tokenizer, compiler = of_bytes()
    forced = output_constraint(None, check_tools(tools, "required", True), form, None, Thinking.NONE)
    free = strict_calls_format(form, check_tools(tools, "auto", True))
    if free is None:
        pytest.skip("the format has no grammar for calls among text")
    assert forced is not None
    made = compiler.compile(forced.value)
    calls = [call for seed in range(6) if (call := sampled(made, seed, tokenizer, most=2000)) is not None]
    assert calls
    for call in calls:
        assert verdict(f"I look. {call}", structural_tag={"format": free}) == "complete", call
