"""Published chat templates: each prints tools, calls and results, and what it prints of a call is read as that call.

They come from a directory of templates named in the environment (``CHAIRLIFT_TEMPLATES``), as
``vendor/llama.cpp/models/templates`` in the source distribution of llama-cpp-python, or from the package trl.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from chairlift.errors import RequestError, TemplateError
from chairlift.tokenizer import ChatTemplate
from chairlift.tool_calls import AnswerReader, check_history, check_tools, read_answer, tool_format_of
from chairlift.tool_calls.formats import Body, ToolFormat
from tests.tokenizer.published_templates import NAMED
from tests.tokenizer.test_published_templates import _files
from tests.tool_calls.recorded import as_calls

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Weather",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "description": "where"}, "days": {"type": "integer"}},
                "required": ["place"],
            },
        },
    }
]
ARGUMENTS = {"place": "Ulm", "days": 2}
CALL = {
    "id": "call_0123456789abcdefghij",
    "type": "function",
    "function": {"name": "look_up", "arguments": '{"place": "Ulm", "days": 2}'},
}
ASK = {"role": "user", "content": "Hi"}
SAID = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": CALL["id"], "content": "Rain."}
PAST_CALLS_ARE_LEFT_OUT = {"granite", "functools"}
"""Formats whose templates print no earlier calls."""


def _templates() -> list[Path]:
    folder = os.environ.get("CHAIRLIFT_TEMPLATES")
    return [*sorted(Path(folder).glob("*.jinja"))] if folder else _files()


def _render(source: str, messages: list[dict[str, Any]], opens: bool) -> str | None:
    """None where the template, or its lack of tools, makes us refuse."""
    try:
        tools = check_tools(TOOLS).offered
        return ChatTemplate(source, NAMED).render(check_history(messages), opens, tools=tools)
    except (RequestError, TemplateError):
        return None


def _printed_call(text: str, form: ToolFormat) -> str:
    """The end of a chat's text, from the last call on."""
    last = text.rindex("Ulm")
    if form.body is Body.HARMONY:
        opened = "<|start|>assistant"
        return text[text.rfind(opened, 0, last) + len(opened) :]
    return text[min(place for mark in form.begins if (place := text.rfind(mark, 0, last)) >= 0) :]


@pytest.mark.nightly
def test_published_templates_print_calls_that_are_read_again() -> None:
    files = _templates()
    if not files:
        pytest.skip("no chat templates; set CHAIRLIFT_TEMPLATES, or pip install trl")
    wrong, num_read = [], 0
    for file in files:
        source = file.read_text("utf-8")
        form = tool_format_of(source)
        whole = _render(source, [ASK, SAID, RESULT], True)
        if form is None or form.name in PAST_CALLS_ARE_LEFT_OUT or whole is None:
            continue
        if not all(word in whole for word in ("Ulm", "Rain.", "look_up", "Weather")):
            wrong.append(f"{file.name} leaves something out: {whole}")
        if form.begins or form.body is Body.HARMONY:
            num_read += 1
            answer = read_answer(_printed_call(whole, form), AnswerReader(form, None, check_tools(TOOLS).schemas))
            if as_calls(answer)[:1] != [("look_up", ARGUMENTS)]:
                wrong.append(f"{file.name}: {form.name} does not read its call: {answer}")
    assert not wrong, "\n".join(wrong)
    assert num_read
