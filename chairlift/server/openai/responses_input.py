"""Translates the input items of a response to the messages of a chat.

Consecutive items of the assistant become one message with reasoning, text and tool calls. A new message begins after a
tool result or a message of another role. It also begins with reasoning or text that follows text without tool calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from chairlift.server.http.errors import ApiError
from chairlift.server.openai.protocol import ChatRequest, SampledRequest
from chairlift.server.openai.responses_tools import ResponseTools
from chairlift.server.openai.responses_types import CARRIED_REASONING, INCLUDABLE, ResponsesRequest
from chairlift.server.openai.translation import MAX_MESSAGES, Names, image_part, texts_of, wrong

__all__ = ["input_items", "listed_items", "names", "to_chat"]

_FIELDS: Final = {
    r"((?:input\[[0-9]+\]\.)?tools\[[0-9]+\](?:\.tools\[[0-9]+\])?)\.(?:function|custom)": r"\1",
    r"response_format\.json_schema\.schema": "text.format.schema",
    r"response_format\.schema": "text.format.schema",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "the messages": "the input",
    r"(input\[[0-9]+\]\.content\[[0-9]+\])\.image_url\.url": r"\1.image_url",
    "messages": "input",
}
_INSTEAD: Final = "; files and audio are not read, and images only in a user's message"
_ROLES: Final = ("user", "assistant", "system", "developer")
_TEXTS: Final = ("input_text", "output_text", "text", "refusal")
_SAME: Final = (
    *SampledRequest.__struct_fields__,
    *("parallel_tool_calls", "user", "stop", "chat_template_kwargs", "top_logprobs"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
)
"""Fields that have the same name and meaning in a chat request."""
_OTHER_CALLS: Final = {
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
    "mcp_call": "arguments",
}
"""Type of an item that is a call of a tool other than a function -> field with what the model wrote."""
_OUTPUTS: Final = (
    *("function_call_output", "custom_tool_call_output", "local_shell_call_output", "shell_call_output"),
    "apply_patch_call_output",
)
_DROPPED: Final = (
    *("web_search_call", "file_search_call", "tool_search_call"),
    *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
)
"""Types of items that can be left out: what they found is in the messages or tools after them."""
_LISTED: Final = {
    "message": ("role",),
    "reasoning": ("content",),
    "function_call": ("call_id", "namespace", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
"""Type of a stored item -> fields of the item that responses return unchanged. Other items are returned whole."""
_PREFIXES: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def names() -> Names:
    """Names of the fields of this endpoint, for error messages."""
    return Names(_FIELDS)


def input_items(payload: ResponsesRequest) -> list[Mapping[str, Any]]:
    """The input as a list of items. A plain text becomes a message of the user."""
    if isinstance(payload.input, str):
        return [{"type": "message", "role": "user", "content": payload.input}]
    return list(payload.input)


def listed_items(response_id: str, items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The stored items of a response in the form of the API. Each item gets an id, which is the same in every call."""
    listed = []
    for index, item in enumerate(items):
        kind = item.get("type") or "message"
        shown: dict[str, Any] = {
            "type": kind,
            "id": f"{_PREFIXES.get(kind, 'item')}_{response_id.removeprefix('resp_')}{index:04x}",
        }
        whole = [name for name in item if name not in shown]
        shown |= {name: item[name] for name in _LISTED.get(kind, whole) if item.get(name) is not None}
        if kind == "message":
            written = "output_text" if item.get("role") == "assistant" else "input_text"
            content = item.get("content")
            parts = [{"type": written, "text": content}] if isinstance(content, str) else content or []
            shown["content"] = [_part(part, written) for part in parts]
        if kind == "reasoning":
            shown["summary"] = item.get("summary") or []
        listed.append({**shown, "status": "completed"})
    return listed


def _part(part: Mapping[str, Any], written: str) -> dict[str, Any]:
    """A part of a message in the form of the API. ``written`` is the type for texts of the message's role."""
    kind = written if part.get("type") in (None, "text") else part["type"]
    return (
        {"annotations": [], "logprobs": [], **part, "type": kind} if kind == "output_text" else {**part, "type": kind}
    )


def to_chat(
    payload: ResponsesRequest,
    earlier: Sequence[Mapping[str, Any]],
    client_names: Names,
    ignored: list[str] | None = None,
) -> ChatRequest:
    """Translate a request to a chat whose conversation begins with the ``earlier`` items.

    ``client_names`` gets the position of each message and tool, and ``ignored`` the paths of items and tools that are
    left out. Raises ApiError with the name of a field, item or tool that is not supported.
    """
    _check(payload)
    dropped: list[str] = [] if ignored is None else ignored
    tools = ResponseTools(client_names, dropped)
    tools.add("tools", payload.tools or ())
    turns = _Turns(payload.instructions, tools, dropped)
    placed = [*(("previous_response_id", item) for item in earlier)]
    texts = isinstance(payload.input, str)
    placed += [("input" if texts else f"input[{index}]", item) for index, item in enumerate(input_items(payload))]
    for where, item in _in_context(payload, placed):
        turns.add(where, item)
    turns.end()
    messages = turns.messages
    if len(messages) > MAX_MESSAGES:
        message = f"the conversation has {len(messages):,} messages, but {MAX_MESSAGES:,} are taken; leave some out"
        raise ApiError(400, message, code="invalid_value", param="input")
    client_names.places.update(turns.places)
    logprobs = bool(payload.top_logprobs) or INCLUDABLE[0] in (payload.include or ())
    if logprobs and tools.chat_tools and payload.tool_choice != "none":
        message = "the tokens of calls are in no text, so log-probabilities are not given with tools; leave one out"
        raise ApiError(400, message, code="unsupported_parameter", param="top_logprobs")
    return ChatRequest(
        messages=messages,
        tools=tools.chat_tools or None,
        tool_choice=tools.choice(payload.tool_choice),
        max_completion_tokens=payload.max_output_tokens,
        logprobs=logprobs or None,
        reasoning_effort=payload.reasoning.effort if payload.reasoning else None,
        response_format=_form(payload.text.format if payload.text else None),
        **{name: getattr(payload, name) for name in _SAME},
    )


def _check(payload: ResponsesRequest) -> None:
    if payload.truncation not in (None, "disabled", "auto"):
        wrong("truncation", "must be auto or disabled", payload.truncation)
    context = payload.reasoning.context if payload.reasoning else None
    if context not in (None, "auto", "current_turn"):
        wrong("reasoning.context", "must be auto or current_turn: the chat template prints what it wants", context)
    for index, value in enumerate(payload.include or ()):
        if value not in INCLUDABLE:
            wrong(f"include[{index}]", f"must be one of {', '.join(INCLUDABLE)}", value)


def _in_context(
    payload: ResponsesRequest, placed: Sequence[tuple[str, Mapping[str, Any]]]
) -> list[tuple[str, Mapping[str, Any]]]:
    """The items, without the reasoning before the last message of the user if ``reasoning.context`` says so."""
    if payload.reasoning is None or payload.reasoning.context != "current_turn":
        return list(placed)
    asked = [index for index, (_, item) in enumerate(placed) if item.get("role") == "user"]
    last = asked[-1] if asked else 0
    return [each for index, each in enumerate(placed) if index >= last or each[1].get("type") != "reasoning"]


class _Turns:
    """Makes the messages of a chat from items."""

    def __init__(self, instructions: str | None, tools: ResponseTools, ignored: list[str]) -> None:
        self._tools = tools
        self._ignored = ignored
        self._images: list[dict[str, Any]] = []
        """Images of the last tool results. They become a message of the user, because templates print no images in
        results."""
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}
        self._known: set[str] = set()
        """Ids of all tool calls in the conversation so far."""
        self._opening = bool(instructions)
        """Whether only system messages came so far. If so, the next system message is merged with the instructions."""
        self._open = False
        """Whether the last message is an assistant's message to which the next item may be added."""
        if instructions:
            self._message("instructions", {"role": "system", "content": instructions})

    def end(self) -> None:
        """Add what follows the last results."""
        if self._images:
            images, self._images = self._images, []
            self._message("input", {"role": "user", "content": images})

    def add(self, where: str, item: Mapping[str, Any]) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind not in _OUTPUTS:
            self.end()
        if kind == "message":
            self._say(where, item)
        elif kind == "reasoning":
            self._think(where, item)
        elif kind == "function_call":
            self._call(where, item)
        elif kind in _OTHER_CALLS:
            self._other_call(where, item)
        elif kind in _OUTPUTS:
            self._result(where, item)
        elif kind in ("additional_tools", "tool_search_output"):
            self._tools.add(f"{where}.tools", item.get("tools") or ())
        elif kind in _DROPPED:
            self._ignored.append(where)
        else:
            known = "message, reasoning, function_call, function_call_output and the items of custom and shell tools"
            message = f"{where}.type is {str(kind)[:60]!r}, which is not supported; send {known}"
            raise ApiError(400, message, code="unsupported_content", param=f"{where}.type")
        self._opening = self._opening and kind == "message" and item.get("role") in ("system", "developer")

    def _message(self, where: str, message: dict[str, Any], open: bool = False) -> dict[str, Any]:
        self.places[f"messages[{len(self.messages)}]"] = where
        self.messages.append(message)
        self._open = open
        return message

    def _turn(self, where: str) -> dict[str, Any]:
        """The assistant's message that is open for further items, or a new one."""
        return self.messages[-1] if self._open else self._message(where, {"role": "assistant"}, open=True)

    def _say(self, where: str, item: Mapping[str, Any]) -> None:
        role = item.get("role")
        if role not in _ROLES:
            wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}", role)
        images = {"input_image": _image} if role == "user" else None
        content = texts_of(f"{where}.content", item.get("content"), _TEXTS, _INSTEAD, images)
        if role != "assistant":
            if self._opening and role != "user":
                first = self.messages[0]
                first["content"] = f"{first['content']}\n\n{_joined(content)}"
            else:
                self._message(where, {"role": role, "content": content})
            return
        if self._open and "content" in self.messages[-1] and "tool_calls" not in self.messages[-1]:
            self._open = False
        turn = self._turn(where)
        existing = turn.get("content")
        turn["content"] = content if existing is None else f"{_joined(existing)}\n{_joined(content)}"

    def _think(self, where: str, item: Mapping[str, Any]) -> None:
        parts: Any = item.get("content") or item.get("summary") or []
        kinds = ("reasoning_text", "summary_text", "text")
        name = "content" if item.get("content") else "summary"
        text = _joined(texts_of(f"{where}.{name}", parts, kinds))
        carried = item.get("encrypted_content")
        if name == "summary" and isinstance(carried, str) and carried.startswith(CARRIED_REASONING):
            text = carried.removeprefix(CARRIED_REASONING)
        elif not text and carried:
            message = f"{where}.encrypted_content cannot be read here; send the item with its content, or leave it out"
            raise ApiError(400, message, code="unsupported_content", param=f"{where}.encrypted_content")
        if not text:
            return
        if self._open and "content" in self.messages[-1] and "tool_calls" not in self.messages[-1]:
            self._open = False
        turn = self._turn(where)
        before = turn.get("reasoning_content")
        turn["reasoning_content"] = text if before is None else f"{before}\n{text}"

    def _call(self, where: str, item: Mapping[str, Any]) -> None:
        name, call_id, arguments = (item.get(key) for key in ("name", "call_id", "arguments"))
        for key, value in (("name", name), ("call_id", call_id)):
            if not isinstance(value, str) or not value:
                wrong(f"{where}.{key}", "must be a text", value)
        try:
            read = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, dict):
            wrong(f"{where}.arguments", "must be the JSON text of an object", arguments)
        full = self._tools.full_name(name, item.get("namespace")) if item.get("namespace") else name
        function = {"name": full, "arguments": arguments}
        self._add_call(where, {"id": call_id, "type": "function", "function": function})

    def _add_call(self, where: str, call: dict[str, Any]) -> None:
        calls = self._turn(where).setdefault("tool_calls", [])
        self.places[f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"] = where
        calls.append(call)
        self._known.add(str(call["id"]))

    def _other_call(self, where: str, item: Mapping[str, Any]) -> None:
        """Add the call of a custom tool, a shell, a patch or an MCP tool, whose item also has the result."""
        kind = str(item["type"])
        key = _OTHER_CALLS[kind]
        call_id = item.get("call_id") or item.get("id")
        if not isinstance(call_id, str):
            wrong(f"{where}.call_id", "must be a text", item.get("call_id"))
        given = item.get(key)
        name = item.get("name", kind.removesuffix("_call"))
        if kind == "custom_tool_call":
            if not isinstance(given, str):
                wrong(f"{where}.input", "must be a text", given)
            full = self._tools.full_name(name, item.get("namespace")) if item.get("namespace") else name
            self._add_call(where, {"id": call_id, "type": "custom", "custom": {"name": full, "input": given}})
            return
        if not isinstance(given, str if kind == "mcp_call" else dict):
            wrong(f"{where}.{key}", "must be an object, or its JSON text for an MCP tool", given)
        arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        self._add_call(where, {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        if kind == "mcp_call":
            told = item.get("output") if item.get("error") is None else f"Error: {item['error']}"
            self._result(where, {"call_id": call_id, "output": told or ""})

    def _result(self, where: str, item: Mapping[str, Any]) -> None:
        call_id = item.get("call_id") or item.get("id")
        if not isinstance(call_id, str) or call_id not in self._known:
            wrong(f"{where}.call_id", "must be that of a function_call before it; send the call, too", call_id)
        output = item.get("output")
        if item.get("type") in ("shell_call_output", "apply_patch_call_output") and not isinstance(output, str):
            output = json.dumps(output if output is not None else item.get("status"), ensure_ascii=False)
        images = {"input_image": _image}
        content = texts_of(f"{where}.output", output, _TEXTS, "; files are not read", images)
        if not isinstance(content, str):
            self._images += [part for part in content if "text" not in part]
            content = [part for part in content if "text" in part]
            content = content[0]["text"] if len(content) == 1 else content or ""
        self._message(where, {"role": "tool", "tool_call_id": call_id, "content": content})


def _image(where: str, part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("file_id") is not None:
        message = f"{where}.file_id names a file, and files are not kept here; send the image itself in image_url"
        raise ApiError(400, message, code="unsupported_content", param=f"{where}.file_id")
    return image_part(part.get("image_url"), f"{where}.image_url")


def _joined(content: str | Iterable[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _form(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """``text.format`` as the field ``response_format`` of a chat request."""
    if given is None or given.get("type") == "text":
        return None
    if given.get("type") != "json_schema":
        if given.get("type") != "json_object":
            wrong("text.format.type", "must be text, json_object or json_schema", given.get("type"))
        return {name: each for name, each in given.items() if name in ("type", "schema")}
    if "schema" not in given:
        wrong("text.format.schema", "must be a JSON schema", None)
    return {"type": "json_schema", "json_schema": {name: each for name, each in given.items() if name != "type"}}
