"""Definitions of tools, and literals of arguments."""

from __future__ import annotations

from typing import Any

import pytest

from chairlift.errors import RequestError
from chairlift.text.tool_calls import TOOL_FORMATS, AnswerReader, check_history, check_tools, read_answer
from chairlift.text.tool_calls.values import NotReadable, by_schema, json_value, python_calls
from tests.text.tool_calls.recorded import TOOLS

GIVEN = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()]


def test_tools_are_copied_and_their_choice_is_read() -> None:
    tools = check_tools(GIVEN, {"type": "function", "function": {"name": "now"}}, False)
    assert (tools.choice, tools.named, tools.parallel) == ("named", "now", False)
    assert tools.schemas == TOOLS and tools.definitions[0] is not GIVEN[0]
    assert check_tools(None).choice == "auto" and not check_tools([], "none").offered
    assert not check_tools(GIVEN, "none").offered


def test_number_and_size_of_tools_are_limited() -> None:
    deep: Any = {}
    for _ in range(60):
        deep = {"properties": {"x": deep}}
    for tools, words in (
        ([{"function": {"name": f"f{i}"}} for i in range(129)], "at most 128"),
        ([{"function": {"name": "f", "parameters": deep}}], "too large"),
        ([{"function": {"name": "f", "description": "x" * 300_000}}], "too large"),
        ("look", "a list of functions"),
    ):
        with pytest.raises(RequestError, match=words):
            check_tools(tools)


def test_results_get_the_name_of_their_function() -> None:
    call = {"id": "a", "function": {"name": "look", "arguments": {}}}
    chat = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "x"}]
    assert check_history(chat)[1]["name"] == "look" and "name" not in chat[1]
    assert check_history([{**chat[0]}, {**chat[1], "name": "other"}])[1]["name"] == "other"


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("5", {"type": ["integer", "null"]}, 5),
        ("null", {"type": ["integer", "null"]}, None),
        ("None", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("true", {"type": "boolean"}, True),
        ("FALSE", {"type": "boolean"}, False),
        ("5", {"enum": ["5", "6"]}, "5"),
        ("b", {"$ref": "#/$defs/kind"}, "b"),
        ("5", {"$ref": "#/$defs/nothing"}, 5),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("{'a': True}", {"type": "object"}, {"a": True}),
        ("__import__('os')", {"type": "object"}, "__import__('os')"),
        ("Ulm", None, "Ulm"),
        ("7", None, 7),
    ],
)
def test_text_becomes_what_the_schema_says(text: str, schema: Any, value: Any) -> None:
    found = by_schema(text, schema, {"$defs": {"kind": {"enum": ["a", "b"]}}})
    assert (type(found), found) == (type(value), value)


def test_literals_are_bounded_and_never_run() -> None:
    for text in ("[f(a=1, a=2)]", "[f(1)]", "[]", "[f(a=b())]", "[f(a='x)]", "[f(a=" + "(" * 9999, "f(a=1)", "[f()] x"):
        with pytest.raises(NotReadable):
            python_calls(text)
    with pytest.raises(NotReadable):
        json_value("[" * 100_000)
    assert python_calls(r"[a.b(c='\x41\u0042\n\'', d=(1, 2), e={'k': None})]") == [
        ("a.b", {"c": "AB\n'", "d": [1, 2], "e": {"k": None}})
    ]


def test_the_choice_limits_the_tools_that_may_be_called() -> None:
    def choice(mode: str, *names: str) -> dict[str, Any]:
        tools = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    for mode in ("auto", "required"):
        tools = check_tools(GIVEN, choice(mode, "now"))
        assert (tools.choice, list(tools.schemas), len(tools.offered)) == (mode, ["now"], len(GIVEN))
    for given in (choice("none", "now"), choice("auto"), choice("auto", "fly"), {"type": "allowed_tools"}):
        with pytest.raises(RequestError, match="tool_choice"):
            check_tools(GIVEN, given)
    with pytest.raises(RequestError, match="tool_choice"):
        check_tools(GIVEN, {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["now"]}})


def test_a_name_has_up_to_128_characters_and_is_found_in_every_format() -> None:
    name = "n" * 128
    tools = check_tools([{"type": "function", "function": {"name": name}}])
    for form, text in (
        ("hermes", f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'),
        (
            "kimi_k2",
            f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{{}}"
            "<|tool_call_end|><|tool_calls_section_end|>",
        ),
        ("pythonic", f"[{name}()]"),
    ):
        reader = AnswerReader(TOOL_FORMATS[form], tools=tools.schemas)
        assert [call.name for call in read_answer(text, reader).calls] == [name]
    with pytest.raises(RequestError, match="1 to 128 characters"):
        check_tools([{"type": "function", "function": {"name": name + "n"}}])
