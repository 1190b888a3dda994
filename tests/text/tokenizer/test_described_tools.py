"""Tools in chats whose template knows none: the messages describe them, and calls and results come back as text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chairlift.errors import RequestError
from chairlift.text.tokenizer.chat_template import ChatTemplate
from chairlift.text.tokenizer.described_tools import messages_with_tools
from chairlift.text.tool_calls import AnswerReader, check_tools, read_answer, tool_format_of
from tests.text.grammar.models import bundled

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
LOOK: dict[str, Any] = {"name": "look", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": LOOK}, {"type": "function", "function": {"name": "now"}}]
CALLS = [
    {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"place": "Ulm"}'}},
    {"id": "b", "type": "function", "function": {"name": "now", "arguments": {}}},
]
ROUND: list[dict[str, Any]] = [
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "I look.", "tool_calls": CALLS},
    {"role": "tool", "content": "wet", "tool_call_id": "a", "name": "look"},
    {"role": "tool", "content": [{"type": "text", "text": "noon"}], "tool_call_id": "b", "name": "now"},
]


def test_the_model_sees_the_functions_the_calls_and_the_results() -> None:
    text = ChatTemplate(PLAIN).render([{"role": "system", "content": "Be brief."}, *ROUND], tools=TOOLS)
    system, user, assistant, results, _ = text.split("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nYou can call functions.") and system.endswith("\n\nBe brief.")
    assert all(json.dumps(tool) in system for tool in TOOLS)
    assert user.endswith("Rain?")
    assert results == (
        "<|im_start|>user\n<tool_response>\nwet\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
    )
    form = tool_format_of(PLAIN)
    assert form is not None and form.name == "generic"
    read = read_answer(assistant.partition("assistant\n")[2], AnswerReader(form, None, check_tools(TOOLS).schemas))
    assert read.content == "I look." and not read.broken
    assert [(call.name, json.loads(call.arguments)) for call in read.calls] == [("look", {"place": "Ulm"}), ("now", {})]


def test_a_chat_without_tools_is_printed_as_before() -> None:
    chat = [{"role": "user", "content": "Hi"}]
    assert ChatTemplate(PLAIN).render(chat, tools=[]) == ChatTemplate(PLAIN).render(chat)
    assert "system" not in ChatTemplate(PLAIN).render(chat)


def test_a_template_that_refuses_system_messages_gets_the_tools_from_the_user() -> None:
    text = ChatTemplate(STRICT).render([*ROUND, {"role": "user", "content": "And now?"}], tools=TOOLS)
    assert text.startswith("[user]You can call functions.") and text.endswith("</tool_response>\nAnd now?")
    assert text.count("[user]") == 2 and text.count("[assistant]") == 1


def test_the_bundled_model_says_why_it_takes_no_tools() -> None:
    template = ChatTemplate(bundled().chat_template, {"bos_token": "", "eos_token": ""})
    with pytest.raises(RequestError, match="prints only a part of a conversation"):
        template.render([{"role": "user", "content": "Hi"}], tools=TOOLS)


def test_a_template_that_names_tools_and_prints_none_is_refused() -> None:
    with pytest.raises(RequestError, match="does not print them; use a model"):
        ChatTemplate(PLAIN + "{# #}{% if tools and false %}{{ tools }}{% endif %}").render(ROUND[:1], tools=TOOLS)


def test_messages_are_not_changed_and_odd_arguments_are_shown() -> None:
    call = {"function": {"name": "look", "arguments": "no json"}}
    given = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}, {"role": "assistant", "tool_calls": [call]}]
    before = json.dumps(given)
    first, second = messages_with_tools(given, TOOLS, in_system=False)
    assert json.dumps(given) == before
    assert [part["text"] for part in first["content"]][1:] == ["Hi"]
    assert second["content"] == '<tool_call>\n{"name": "look", "arguments": "no json"}\n</tool_call>'
