"""A coding task in the shapes of Codex: the bodies that it sends to /v1/responses, one after another.

The shapes (fields, items without ids, tools) follow its public source. All texts are our own, and each is unique, so
that a test can find it in a prompt.
"""

from __future__ import annotations

import json
from typing import Any, Final

__all__ = ["BODIES", "HEADERS", "PATH", "REFUSED", "texts"]

PATH: Final = "/v1/responses"
_SESSION: Final = "019a7d3c-6a44-7f0e-8b1e-2f6f0d1c2b3a"
HEADERS: Final = {
    "accept": "text/event-stream",
    "authorization": "Bearer none",
    "originator": "codex_cli_rs",
    "session_id": _SESSION,
    "user-agent": "codex_cli_rs/0.149.0 (Linux; x86_64) xterm",
    "x-codex-turn-metadata": '{"turn_id": "1"}',
}


def _function(name: str, description: str, required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
    return {"type": "function", "name": name, "description": description, "strict": False, "parameters": parameters}


def _text(about: str) -> dict[str, Any]:
    return {"type": "string", "description": about}


_PLAN_STEP: Final = {
    "type": "object",
    "properties": {"step": {"type": "string"}, "status": _text("pending, in_progress or completed")},
    "required": ["step", "status"],
    "additionalProperties": False,
}
_PATCH_GRAMMAR: Final = r"""start: first part+ last
first: "*** Begin Patch" LF
last: "*** End Patch" LF?
part: head line+
head: "*** " ("Add" | "Update") " File: " /(.+)/ LF
line: /[ +-]/ /(.*)/ LF

%import common.LF
"""
_TOOLS: Final[list[dict[str, Any]]] = [
    _function(
        "exec_command",
        "Runs a line in a terminal.",
        ("cmd",),
        cmd=_text("the line"),
        workdir=_text("where"),
        yield_time_ms={"type": "number", "description": "how long to wait"},
        login={"type": "boolean"},
    ),
    _function(
        "write_stdin",
        "Types into a terminal that still runs.",
        ("session_id",),
        session_id={"type": "number"},
        chars=_text("the keys"),
    ),
    _function(
        "shell",
        "Runs a program with its arguments.",
        ("command",),
        command={"type": "array", "items": {"type": "string"}, "description": "program and arguments"},
        timeout_ms={"type": "number"},
    ),
    _function(
        "update_plan",
        "Replaces the plan.",
        ("plan",),
        explanation={"type": "string"},
        plan={"type": "array", "items": _PLAN_STEP, "description": "the steps"},
    ),
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Changes files. The input is the patch itself, no JSON.",
        "format": {"type": "grammar", "syntax": "lark", "definition": _PATCH_GRAMMAR},
    },
    {"type": "web_search", "external_web_access": False, "search_content_types": ["text", "image"]},
    _function("view_image", "Shows an image from the disk.", ("path",), path=_text("where it is")),
    {
        "type": "tool_search",
        "execution": "client",
        "description": "Finds tools that are not loaded.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
    {"type": "image_generation", "output_format": "png"},
    {
        "type": "namespace",
        "name": "mcp__tracker__",
        "description": "The tracker of the team.",
        "tools": [_function("find_ticket", "Finds a ticket.", ("number",), number={"type": "integer"})],
    },
    _function("mcp__notes__search-all", "Searches the notes.", (), query={"anyOf": [_text("words"), {"type": "null"}]}),
]


def _message(role: str, *given: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in given]}


def _call(number: int, name: str, /, **given: Any) -> dict[str, Any]:
    return {"type": "function_call", "name": name, "arguments": json.dumps(given), "call_id": _id(number)}


def _output(number: int, output: Any, kind: str = "function_call") -> dict[str, Any]:
    return {"type": f"{kind}_output", "call_id": _id(number), "output": output}


def _id(number: int) -> str:
    return f"call_{number:024d}"


_THOUGHT: Final = {"type": "reasoning", "summary": [], "encrypted_content": None}
"""What Codex sends back of reasoning whose text is in ``content``."""
_PATCH: Final = """*** Begin Patch
*** Update File: stock.go
@@ func list
-	fmt.Println(item)
+	if asJSON { return encode("größe", item) }
*** End Patch
"""
_WARNING: Final = _message("user", "Warning: a patch came through the shell; the tool for patches is there for it.")
"""Codex records a warning at once, so that it comes between the call and its output."""
# The items that come new with each request, in their order.
_TURNS: Final[list[list[dict[str, Any]]]] = [
    [
        _message("developer", "<permissions>Files below the directory may be written.</permissions>"),
        _message(
            "user", "# AGENTS.md\n\nUse tabs.", "<environment_context><cwd>/srv/stock</cwd></environment_context>"
        ),
        _message("user", "Give the list a flag for JSON."),
    ],
    [
        _THOUGHT,
        {**_message("assistant", "I look at the printer first."), "phase": "commentary"},
        _call(1, "exec_command", cmd="rg -n Println", yield_time_ms=1000),
        _call(2, "shell", command=["bash", "-lc", "git status --short"]),
        _output(1, "Exit code: 0\nOutput:\nstock.go:12: fmt.Println(item)"),
        _output(2, [{"type": "input_text", "text": " M go.sum"}]),
    ],
    [
        {**_THOUGHT, "summary": [{"type": "summary_text", "text": "The plan comes before the patch."}]},
        _call(3, "update_plan", plan=[{"step": "Patch the printer", "status": "in_progress"}]),
        _output(3, "The plan is kept."),
        _message("developer", "<mode>From here on, ask before you use the network.</mode>"),
    ],
    [
        {
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": _id(4),
            "name": "apply_patch",
            "input": _PATCH,
        },
        _output(4, '{"output": "Success: M stock.go", "metadata": {"exit_code": 0}}', "custom_tool_call"),
    ],
    [
        _call(5, "exec_command", cmd="apply_patch < more.patch"),
        _WARNING,
        _output(5, "Exit code: 1"),
    ],
    [
        _call(6, "exec_command", cmd="go test ./... -run Slow"),
        _output(6, "aborted by the person after 12.0s"),
        _message("user", "<turn_aborted>The person stopped the turn.</turn_aborted>"),
        _message("user", "Run only the fast tests. And look at ticket 81."),
    ],
    [
        {
            "type": "function_call",
            "namespace": "mcp__tracker__",
            "name": "find_ticket",
            "arguments": '{"number": 81}',
            "call_id": _id(7),
        },
        _output(7, [{"type": "input_text", "text": "81: JSON"}, {"type": "input_text", "text": "open since May"}]),
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "go json"}},
        {**_message("assistant", "The ticket asks for the same."), "phase": "commentary"},
        {
            "type": "local_shell_call",
            "call_id": _id(8),
            "status": "completed",
            "action": {"type": "exec", "command": ["go", "test", "-short"], "timeout_ms": None, "env": None},
        },
        _output(8, "ok stock 0.2s", "function_call"),
    ],
    [
        {**_message("assistant", "The list has its flag, and the fast tests pass."), "phase": "final_answer"},
        _message("user", "Which file did you change?"),
    ],
]
_BODY: Final = {
    "model": "fake",
    "instructions": "You are a careful programmer in a terminal.",
    "tools": _TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": _SESSION,
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-installation-id": "5d0c"},
}
_FINDINGS: Final = {
    "type": "object",
    "properties": {"findings": {"type": "array", "items": {"type": "string"}}, "correct": {"type": "boolean"}},
    "required": ["findings", "correct"],
    "additionalProperties": False,
}


def _until(turn: int) -> list[dict[str, Any]]:
    return [item for new in _TURNS[: turn + 1] for item in new]


_SUMMARY: Final = [*_until(len(_TURNS) - 2), _message("user", "Sum up for the one who goes on.")]
BODIES: Final[dict[str, dict[str, Any]]] = {
    **{f"turn {turn}": {**_BODY, "input": _until(turn)} for turn in range(len(_TURNS))},
    "compaction": {
        **_BODY,
        "input": _SUMMARY,
        "tools": [],
        "parallel_tool_calls": False,
    },
    "after compaction": {
        **_BODY,
        "input": [*_TURNS[0], _message("user", "Another one began this task. So far: the printer is patched.")],
        "service_tier": "priority",
    },
    "no reasoning": {**_BODY, "input": _until(1), "reasoning": None, "include": []},
    "review": {
        **_BODY,
        "input": _until(1),
        "tools": _TOOLS[:1],
        "text": {
            "verbosity": "low",
            "format": {"type": "json_schema", "strict": True, "name": "codex_output_schema", "schema": _FINDINGS},
        },
    },
}
"""Name -> a body. Each is sent whole and with ``stream``."""
REFUSED: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "another server's thoughts": (
        {**_BODY, "input": [*_until(0), {**_THOUGHT, "encrypted_content": "Z0FBQUFB"}]},
        "input[3].encrypted_content",
    ),
    "another server's summary": (
        {**_BODY, "input": [*_until(0), {"type": "compaction", "encrypted_content": "Z0FBQUFB"}]},
        "input[3].type",
    ),
}
"""Name -> (body that is refused because its text is on another server, field that the error names)."""


def texts(body: dict[str, Any]) -> tuple[list[str], list[str]]:
    """(texts of the history in their order, texts that may move: instructions, and warnings while a call runs)."""
    told: list[str] = []
    moved = [body["instructions"]]
    for item in body["input"]:
        if item.get("role") == "developer" or item is _WARNING:
            moved += _of_item(item)
        else:
            told += _of_item(item)
    return told, moved


def _of_item(item: dict[str, Any]) -> list[str]:
    kind = item["type"]
    if kind == "message":
        return [part["text"] for part in item["content"]]
    if kind == "function_call":
        return [item.get("namespace", "") + item["name"], *_leaves(json.loads(item["arguments"]))]
    if kind == "custom_tool_call":
        return [item["name"], item["input"]]
    if kind == "local_shell_call":
        return _leaves(item["action"]["command"])
    if not kind.endswith("_output"):
        return []  # reasoning, which the template prints or leaves out, and searches, which are left out
    parts = item["output"]
    return [parts] if isinstance(parts, str) else [part["text"] for part in parts]


def _leaves(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [leaf for each in value.values() for leaf in _leaves(each)]
    if isinstance(value, list):
        return [leaf for each in value for leaf in _leaves(each)]
    return [value if isinstance(value, str) else json.dumps(value)]
