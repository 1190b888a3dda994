"""Published chat templates: each prints tools, calls and results, and what it prints of a call is read as that call.

They come from a directory of templates named in the environment (``CHAIRLIFT_TEMPLATES``), or from the source
distribution of llama-cpp-python, which is downloaded and kept with other temporary files.
"""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import pytest

from chairlift.errors import RequestError, TemplateError
from chairlift.text.tokenizer import ChatTemplate
from chairlift.text.tool_calls import AnswerReader, check_history, check_tools, read_answer, tool_format_of
from chairlift.text.tool_calls.formats import GENERIC, Body, ToolFormat
from tests.text.tokenizer.published_templates import NAMED
from tests.text.tool_calls.recorded import as_calls

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
SOURCES = "llama-cpp-python==0.3.36"
PAST_CALLS_ARE_LEFT_OUT = {"granite", "functools"}
"""Formats whose templates print no earlier calls."""


@functools.cache
def _templates() -> list[Path]:
    kept = Path(tempfile.gettempdir()) / "chairlift-test-templates"
    folder = Path(os.environ.get("CHAIRLIFT_TEMPLATES") or kept)
    if folder == kept and not kept.is_dir():
        _download(kept)
    return sorted(folder.glob("*.jinja"))


def _download(target: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--no-binary",
            ":all:",
            "-d",
            name,
            SOURCES,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        archives = list(Path(name).glob("*.tar.gz"))
        if done.returncode or not archives:
            pytest.skip(f"{SOURCES} could not be downloaded; set CHAIRLIFT_TEMPLATES")
        found = Path(name, "found")
        found.mkdir()
        with tarfile.open(archives[0]) as tar:
            for member in tar:
                if member.isfile() and "models/templates/" in member.name and member.name.endswith(".jinja"):
                    read = tar.extractfile(member)
                    found.joinpath(Path(member.name).name).write_bytes(read.read() if read else b"")
        found.rename(target)


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
def test_templates_that_print_no_tools_have_the_form_in_which_tools_are_described() -> None:
    described = []
    for file in _templates():
        source = file.read_text("utf-8")
        whole = _render(source, [ASK], True)
        if whole is not None and "<tools>" in whole and "<tools>" not in source:
            described.append(file.name)
            assert tool_format_of(source) is GENERIC, file.name
    assert len(described) >= 3


@pytest.mark.nightly
def test_published_templates_print_calls_that_are_read_again() -> None:
    wrong, num_read = [], 0
    for file in _templates():
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


# --- any arguments ----------------------------------------------------------------------------------------------------

_SIGNS = [*" \t\n\r", *"\"'`\\{}[]()<>/=:,;|&#%", *"aZ05é😀\u2028\x00", "\r\n", "\\n", "\\u00e9", "null", "true", "1e5"]
_NUMBERS = [0, -1, 2**53 + 1, 10**25, 0.5, 1e5, -0.0, 1e-7, 1e300, 3.0]


def _text(rng: random.Random) -> str:
    return "".join(rng.choice(_SIGNS) for _ in range(rng.randrange(6)))


def _value(rng: random.Random, kind: str, depth: int = 0) -> Any:
    if kind == "string":
        return _text(rng)
    if kind in ("array", "object"):
        kinds = ["string", "number", "boolean", "null", *(["array", "object"] if depth < 3 else [])]
        values = [_value(rng, rng.choice(kinds), depth + 1) for _ in range(rng.randrange(4))]
        return (
            values
            if kind == "array"
            else {rng.choice(("k", "k k", "5", "é")) + str(i): v for i, v in enumerate(values)}
        )
    numbers = [each for each in _NUMBERS if isinstance(each, int) or kind == "number"]
    return {"boolean": rng.random() < 0.5, "null": None}.get(kind, rng.choice(numbers))


@pytest.mark.nightly
def test_any_arguments_that_a_template_prints_are_read_again() -> None:
    """But for a text with the mark that ends a value, which no reader can tell from the end. It must not become another
    value: such a call is text."""
    wrong, names, num_read = [], ["string", "integer", "number", "boolean", "null", "array", "object"], 0
    for file in _templates():
        source = file.read_text("utf-8")
        form, rng = tool_format_of(source), random.Random(file.name)
        if form is None or form.name in PAST_CALLS_ARE_LEFT_OUT or not (form.begins or form.body is Body.HARMONY):
            continue
        template = ChatTemplate(source, NAMED)
        # Elements have no nulls, and no types of what is inside arrays and objects.
        known = names[:4] if form.body is Body.ELEMENTS else names
        for _ in range(300):
            kinds = [rng.choice(known) for _ in range(3)]
            if rng.random() < 0.3:
                kinds[1] = "mark"
            arguments = {
                f"a{i}": f"x{rng.choice(form.markers)}{_text(rng)}" if kind == "mark" else _value(rng, kind)
                for i, kind in enumerate(kinds)
            }
            properties = {f"a{i}": {"type": "string" if kind == "mark" else kind} for i, kind in enumerate(kinds)}
            tool = {"name": "look_up", "parameters": {"type": "object", "properties": properties}}
            tools = check_tools([{"type": "function", "function": tool}])
            call = {**CALL, "function": {"name": "look_up", "arguments": json.dumps(arguments)}}
            try:
                messages = check_history([ASK, {**SAID, "tool_calls": [call]}])
                whole = template.render(messages, False, tools=tools.offered)
            except (RequestError, TemplateError):
                break
            opened = "<|start|>assistant"
            marks = (opened,) if form.body is Body.HARMONY else (form.call,) if form.bare_call else form.begins
            begin = max(whole.rfind(mark, 0, whole.rindex("look_up") + 1) for mark in marks)
            text = whole[begin + (len(opened) if form.body is Body.HARMONY else 0) :]
            answer = read_answer(text, AnswerReader(form, None, tools.schemas))
            read = [json.dumps(each, sort_keys=True) for _, each in as_calls(answer)]
            num_read += len(read)
            if read != [json.dumps(arguments, sort_keys=True)] and ("mark" not in kinds or read):
                wrong.append(f"{file.name}: {arguments} is read as {read} {answer.broken}: {text[:300]!r}")
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong[:20])
    assert num_read > 1000
