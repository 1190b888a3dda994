"""A coding task in the shapes of Claude Code: the bodies that it sends to /v1/messages, one after another.

The shapes (fields, order of blocks, JSON schemas of zod 4) follow public captures of its traffic. All texts are our
own, and each is unique, so that a test can find it in a prompt.
"""

from __future__ import annotations

import json
from typing import Any, Final

__all__ = ["BODIES", "COUNTS", "HEADERS", "PATH", "REFUSED", "texts"]

PATH: Final = "/v1/messages?beta=true"
HEADERS: Final = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,"
    "prompt-caching-scope-2026-01-05,advanced-tool-use-2025-11-20,effort-2025-11-24",
    "anthropic-dangerous-direct-browser-access": "true",
    "authorization": "Bearer none",
    "user-agent": "claude-cli/2.1.69 (external, cli)",
    "x-app": "cli",
    "x-stainless-helper-method": "stream",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
    "x-stainless-timeout": "600",
}
_CACHED: Final = {"type": "ephemeral", "ttl": "1h"}
_SAFE: Final = 9007199254740991


def _schema(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    """The JSON schema that zod 4 makes of an object."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _text(about: str, **more: Any) -> dict[str, Any]:
    return {"description": about, "type": "string", **more}


_TODO: Final = {
    "type": "object",
    "properties": {
        "content": {"type": "string", "minLength": 1},
        "status": {"type": "string", "enum": ["pending", "in_progress", "completed"]},
        "activeForm": {"type": "string", "minLength": 1},
    },
    "required": ["content", "status", "activeForm"],
    "additionalProperties": False,
}
_QUESTION: Final = {
    "type": "object",
    "properties": {
        "question": _text("what to ask"),
        "header": _text("a short label"),
        "options": {
            "minItems": 2,
            "maxItems": 4,
            "type": "array",
            "items": _schema(("label", "description"), label=_text("a choice"), description=_text("its effect")),
        },
        "multiSelect": {"default": False, "type": "boolean"},
    },
    "required": ["question", "header", "options", "multiSelect"],
    "additionalProperties": False,
}
_TOOLS: Final[list[dict[str, Any]]] = [
    {
        "name": "Task",
        "description": "Gives a piece of work to a helper with its own conversation.",
        "input_schema": _schema(
            ("description", "prompt", "subagent_type"),
            description=_text("three to five words"),
            prompt=_text("the work"),
            subagent_type=_text("which helper"),
            model={"type": "string", "enum": ["sonnet", "opus", "haiku"]},
            run_in_background={"type": "boolean"},
        ),
    },
    {
        "name": "Bash",
        "description": "Runs a line in a shell.",
        "input_schema": _schema(
            ("command",),
            command=_text("the line"),
            timeout=_text("milliseconds, at most 600000") | {"type": "number"},
            description=_text("what the line does"),
            run_in_background={"type": "boolean"},
            dangerouslyDisableSandbox={"type": "boolean"},
        ),
        "eager_input_streaming": True,
    },
    {
        "name": "Glob",
        "description": "Lists files whose path matches a pattern.",
        "input_schema": _schema(("pattern",), pattern=_text("with * and **"), path=_text("where to begin")),
    },
    {
        "name": "Grep",
        "description": "Finds lines that match a regular expression.",
        "input_schema": _schema(
            ("pattern",),
            pattern=_text("a regular expression"),
            output_mode={"type": "string", "enum": ["content", "files_with_matches", "count"]},
            head_limit={"type": "number"},
            **{"-A": {"type": "number"}, "-i": {"type": "boolean"}, "-n": {"type": "boolean"}},
        ),
    },
    {
        "name": "Read",
        "description": "Reads a file, also an image or a notebook.",
        "input_schema": _schema(
            ("file_path",),
            file_path=_text("an absolute path"),
            offset={"type": "integer", "minimum": 0, "maximum": _SAFE},
            limit={"type": "integer", "exclusiveMinimum": 0, "maximum": _SAFE},
        ),
    },
    {
        "name": "Edit",
        "description": "Replaces one text of a file by another.",
        "input_schema": _schema(
            ("file_path", "old_string", "new_string"),
            file_path=_text("an absolute path"),
            old_string=_text("what to replace"),
            new_string=_text("what comes there"),
            replace_all={"default": False, "type": "boolean"},
        ),
    },
    {
        "name": "Write",
        "description": "Writes a whole file.",
        "input_schema": _schema(
            ("file_path", "content"), file_path=_text("an absolute path"), content=_text("the whole text")
        ),
    },
    {
        "name": "WebFetch",
        "description": "Reads a page and answers a question about it.",
        "input_schema": _schema(("url", "prompt"), url={"type": "string", "format": "uri"}, prompt=_text("a question")),
    },
    {
        "name": "WebSearch",
        "description": "Searches the web.",
        "input_schema": _schema(
            ("query",),
            query={"type": "string", "minLength": 2},
            allowed_domains={"type": "array", "items": {"type": "string"}},
        ),
    },
    {
        "name": "TodoWrite",
        "description": "Replaces the list of steps.",
        "input_schema": _schema(("todos",), todos={"type": "array", "items": _TODO}),
    },
    {
        "name": "AskUserQuestion",
        "description": "Asks the person who waits.",
        "input_schema": _schema(
            ("questions",),
            questions={"minItems": 1, "maxItems": 4, "type": "array", "items": _QUESTION},
            answers={
                "type": "object",
                "propertyNames": {"type": "string"},
                "additionalProperties": {"type": "string"},
            },
        ),
    },
    {
        "name": "ExitPlanMode",
        "description": "Ends the planning.",
        "input_schema": {**_schema(()), "additionalProperties": {}},
    },
    {
        "name": "ToolSearch",
        "description": "Finds tools that are not loaded yet.",
        "input_schema": _schema(
            ("query",), query=_text("names or words"), max_results={"default": 5, "type": "number"}
        ),
    },
    {
        "name": "mcp__tracker__find_ticket",
        "description": "Finds a ticket of the tracker.",
        "input_schema": {
            "type": "object",
            "properties": {"number": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}},
        },
        "defer_loading": True,
        "cache_control": _CACHED,
    },
]
_SYSTEM: Final = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.69.0f3; cc_entrypoint=cli; cch=1a2b3;"},
    {"type": "text", "text": "You work in a terminal, for one person.", "cache_control": _CACHED},
    {
        "type": "text",
        "text": "# Manner\nAnswer in few words.\n\n# Place\nThe directory is /home/ada/stock, a git checkout.",
        "cache_control": {**_CACHED, "scope": "global"},
    },
]
_USER_ID: Final = f"user_{'7c' * 32}_account_1d0c2f6e-58e1-4f1a-9d55-0c4b1f1e7a11_session_9a7d3c52-6a44-4f0e-8b1e-2f6f"


def _call(number: int, tool: str, /, **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": _id(number), "name": tool, "input": given}


def _result(number: int, content: Any, **more: Any) -> dict[str, Any]:
    return {"tool_use_id": _id(number), "type": "tool_result", "content": content, **more}


def _id(number: int) -> str:
    return f"toolu_01{number:022d}"


def _says(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **more}


def _thinks(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": "unsigned"}


def _todos(*states: str) -> list[dict[str, str]]:
    steps = (("Find the printer", "Finding the printer"), ("Add the flag", "Adding the flag"))
    pairs = zip(steps, states, strict=True)
    return [{"content": do, "status": state, "activeForm": doing} for (do, doing), state in pairs]


# The messages that come new with each request, in their order.
_TURNS: Final[list[list[dict[str, Any]]]] = [
    [
        {
            "role": "user",
            "content": "<available-deferred-tools>\nmcp__tracker__find_ticket\n</available-deferred-tools>",
        },
        {
            "role": "user",
            "content": [
                _says("<system-reminder>\nThe project's notes (CLAUDE.md): tabs, never spaces.\n</system-reminder>\n"),
                _says("Give `stock list` a flag --json.", cache_control=_CACHED),
            ],
        },
    ],
    [
        {
            "role": "assistant",
            "content": [
                _thinks("The printer of the list comes first."),
                _says("I look for the printer."),
                _call(1, "Grep", pattern=r"def print_\w+", output_mode="content"),
                _call(2, "Read", file_path="/home/ada/stock/cli.py", limit=40),
            ],
        },
        {
            "role": "user",
            "content": [
                _result(1, "cli.py:12:def print_list(items):"),
                _result(2, [_says("     1\timport sys\n     2\tdef main():\n    12\tdef print_list(items): ...")]),
                _says("<system-reminder>\nNo list of steps is kept yet.\n</system-reminder>", cache_control=_CACHED),
            ],
        },
    ],
    [
        {"role": "assistant", "content": [_call(3, "TodoWrite", todos=_todos("completed", "in_progress"))]},
        {"role": "user", "content": [_result(3, "The list of steps is written.")]},
        {"role": "system", "content": "Since the last message, setup.cfg was changed by another program."},
    ],
    [
        {
            "role": "assistant",
            "content": [
                _thinks("An edit with both lines."),
                _call(
                    4,
                    "Edit",
                    file_path="/home/ada/stock/cli.py",
                    old_string="def print_list(items):\n\tfor item in items:",
                    new_string='def print_list(items, as_json=False):\n\tif as_json:\n\t\treturn dump("größe", items)',
                ),
            ],
        },
        {
            "role": "user",
            "content": [
                _result(4, "<tool_use_error>The text to replace is not in the file.</tool_use_error>", is_error=True)
            ],
        },
    ],
    [
        {
            "role": "assistant",
            "content": [_call(5, "Bash", command="python -m pytest -q 2>&1 | tail -3", timeout=60000)],
        },
        {"role": "user", "content": [_result(5, "3 failed, 41 passed in 0.80s", is_error=False)]},
    ],
    [
        {
            "role": "assistant",
            "content": [_says("\n\nThree tests fail, for the old form."), _call(6, "Bash", command="git stash")],
        },
        {
            "role": "user",
            "content": [
                _result(6, "The person does not want this call, and it was not made.", is_error=True),
                _says("[Interrupted by the person]"),
            ],
        },
        {"role": "user", "content": [_says("Do not stash. Ask the tracker for ticket 81.")]},
    ],
    [
        {"role": "assistant", "content": [_call(7, "ToolSearch", query="select:mcp__tracker__find_ticket")]},
        {
            "role": "user",
            "content": [_result(7, [{"type": "tool_reference", "tool_name": "mcp__tracker__find_ticket"}])],
        },
        {"role": "assistant", "content": [_call(8, "mcp__tracker__find_ticket", number=81)]},
        {"role": "user", "content": [_result(8, [_says("81: the list as JSON"), _says("open since March")])]},
    ],
    [
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "c2VjcmV0"},
                _call(9, "Bash", command="true"),
                _call(
                    10, "Task", description="Review the change", prompt="Read cli.py again.", subagent_type="reviewer"
                ),
            ],
        },
        {"role": "user", "content": [_result(9, ""), _result(10, [_says("The reviewer found nothing wrong.")])]},
    ],
    [
        {"role": "assistant", "content": "The flag is there, and all tests pass."},
        {"role": "user", "content": "Thanks. Summarise the conversation for the next one."},
    ],
]


def _body(messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {
        "model": "fake",
        "messages": messages,
        "system": _SYSTEM,
        "tools": _TOOLS,
        "metadata": {"user_id": _USER_ID},
        "max_tokens": 32000,
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "medium"},
        "diagnostics": {"previous_message_id": None},
        **more,
    }


def _until(turn: int) -> list[dict[str, Any]]:
    """The messages up to a turn. Only the newest breakpoint is set: a request has at most four."""
    messages = [message for new in _TURNS[: turn + 1] for message in new]
    newest = max(index for index, message in enumerate(messages) if "cache_control" in str(message))
    return [message if index == newest else _without_breakpoints(message) for index, message in enumerate(messages)]


def _without_breakpoints(message: dict[str, Any]) -> dict[str, Any]:
    if isinstance(message["content"], str):
        return message
    blocks = [{key: value for key, value in block.items() if key != "cache_control"} for block in message["content"]]
    return {**message, "content": blocks}


_TITLE: Final = {
    "model": "fake",
    "messages": [{"role": "user", "content": [_says("Give `stock list` a flag --json.")]}],
    "system": [_SYSTEM[0], _says("Name the task in at most five words.")],
    "tools": [],
    "metadata": {"user_id": _USER_ID},
    "max_tokens": 32000,
    "temperature": 1,
    "thinking": {"type": "disabled"},
    "output_config": {
        "format": {"type": "json_schema", "schema": _schema(("title",), title={"type": "string"})},
    },
}
_PROBE: Final = {
    "model": "fake",
    "max_tokens": 1,
    "messages": [{"role": "user", "content": "quota"}],
    "metadata": {"user_id": _USER_ID},
}
BODIES: Final[dict[str, dict[str, Any]]] = {
    "probe": _PROBE,
    "title": _TITLE,
    **{f"turn {turn}": _body(_until(turn)) for turn in range(len(_TURNS))},
    "budget": _body(_until(4), thinking={"type": "enabled", "budget_tokens": 31999}, temperature=1),
    "summary": _body(_until(len(_TURNS) - 1), tools=_TOOLS[4:5], thinking={"type": "disabled"}),
}
"""Name -> a body. Each is sent whole and with ``stream``."""
COUNTS: Final[list[dict[str, Any]]] = [
    {"model": "fake", "messages": [{"role": "user", "content": "foo"}], "tools": [tool]} for tool in _TOOLS
] + [{name: BODIES["turn 3"][name] for name in ("model", "messages", "tools", "thinking")}]
"""Bodies of /v1/messages/count_tokens."""
_SEARCH: Final = {
    **_TITLE,
    "output_config": {"effort": "low"},
    "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
    "tool_choice": {"type": "tool", "name": "web_search"},
}
_PDF: Final = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}}
_PNG: Final = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
REFUSED: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "the search inside WebSearch": (_SEARCH, "tool_choice names tools[0]"),
    "a PDF document": (
        _body([*_until(3), {"role": "user", "content": [_says("Read it."), _PDF]}]),
        "messages[9].content[1].source",
    ),
    "an image for a model without vision": (
        _body([*_until(0), _TURNS[1][0], {"role": "user", "content": [_result(1, [_PNG]), _result(2, "none")]}]),
        "messages[3]",
    ),
    "an edit that removes results": (
        _body(_until(0), context_management={"edits": [{"type": "clear_tool_uses_20250919"}]}),
        "context_management.edits[0]",
    ),
}
"""Name -> (body that this server cannot answer, words of the error)."""


def texts(body: dict[str, Any]) -> tuple[list[str], list[str]]:
    """(texts of the history in their order, texts that may move: instructions)."""
    told: list[str] = []
    moved = [block["text"] for block in body.get("system", ()) if not block["text"].startswith("x-anthropic")]
    for message in body["messages"]:
        content = message["content"]
        blocks = [_says(content)] if isinstance(content, str) else content
        if message["role"] == "system":
            moved += [block["text"] for block in blocks]
            continue
        for block in blocks:
            told += _of_block(block)
    return [text for text in told if text.strip()], moved


def _of_block(block: dict[str, Any]) -> list[str]:
    if block["type"] == "text":
        return [block["text"]]
    if block["type"] == "tool_use":
        return [block["name"], *_leaves(block["input"])]
    if block["type"] != "tool_result":
        return []  # thinking, which the template prints or leaves out
    content = block["content"]
    parts = [_says(content)] if isinstance(content, str) else content
    return [part.get("text", part.get("tool_name")) for part in parts]


def _leaves(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in _leaves(each)]
    if isinstance(value, list):
        return [leaf for each in value for leaf in _leaves(each)]
    return [value if isinstance(value, str) else json.dumps(value)]
