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
from chairlift.server.openai.responses_types import INCLUDABLE, ResponsesRequest
from chairlift.server.openai.translation import MAX_MESSAGES, Names, image_part, texts_of, wrong

__all__ = ["input_items", "listed_items", "names", "to_chat"]

_FIELDS: Final = {
    r"(tools\[[0-9]+\])\.function": r"\1",
    r"response_format\.json_schema\.schema": "text.format.schema",
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
)
"""Fields that have the same name and meaning in a chat request."""
_LISTED: Final = {
    "message": ("role",),
    "reasoning": ("content",),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
}
"""Type of a stored item -> fields of the item that responses return unchanged."""
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
            "id": f"{_PREFIXES[kind]}_{response_id.removeprefix('resp_')}{index:04x}",
        }
        shown |= {name: item[name] for name in _LISTED[kind] if name in item}
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


def to_chat(payload: ResponsesRequest, earlier: Sequence[Mapping[str, Any]], client_names: Names) -> ChatRequest:
    """Translate a request to a chat whose conversation begins with the ``earlier`` items.

    ``client_names`` gets the position of each message. Raises ApiError with the name of a field, item or tool that is
    not supported.
    """
    _check(payload)
    turns = _Turns(payload.instructions)
    placed = [*(("previous_response_id", item) for item in earlier)]
    texts = isinstance(payload.input, str)
    placed += [("input" if texts else f"input[{index}]", item) for index, item in enumerate(input_items(payload))]
    for where, item in placed:
        turns.add(where, item)
    messages = turns.messages
    if len(messages) > MAX_MESSAGES:
        message = f"the conversation has {len(messages):,} messages, but {MAX_MESSAGES:,} are taken; leave some out"
        raise ApiError(400, message, code="invalid_value", param="input")
    client_names.places = turns.places
    logprobs = bool(payload.top_logprobs) or INCLUDABLE[0] in (payload.include or ())
    if logprobs and payload.tools and payload.tool_choice != "none":
        message = "the tokens of calls are in no text, so log-probabilities are not given with tools; leave one out"
        raise ApiError(400, message, code="unsupported_parameter", param="top_logprobs")
    return ChatRequest(
        messages=messages,
        tools=[_tool(f"tools[{index}]", tool) for index, tool in enumerate(payload.tools or ())] or None,
        tool_choice=_choice(payload.tool_choice),
        max_completion_tokens=payload.max_output_tokens,
        logprobs=logprobs or None,
        reasoning_effort=payload.reasoning.effort if payload.reasoning else None,
        response_format=_form(payload.text.format if payload.text else None),
        **{name: getattr(payload, name) for name in _SAME},
    )


def _check(payload: ResponsesRequest) -> None:
    if payload.truncation not in (None, "disabled"):
        message = f"truncation is {payload.truncation!r}, but nothing is left out of a conversation; send 'disabled'"
        raise ApiError(400, message, code="unsupported_parameter", param="truncation")
    for index, value in enumerate(payload.include or ()):
        if value not in INCLUDABLE:
            wrong(f"include[{index}]", f"must be one of {', '.join(INCLUDABLE)}", value)


class _Turns:
    """Makes the messages of a chat from items."""

    def __init__(self, instructions: str | None) -> None:
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

    def add(self, where: str, item: Mapping[str, Any]) -> None:
        kind = item.get("type") or ("message" if "role" in item else None)
        if kind == "message":
            self._say(where, item)
        elif kind == "reasoning":
            self._think(where, item)
        elif kind == "function_call":
            self._call(where, item)
        elif kind == "function_call_output":
            self._result(where, item)
        else:
            known = "message, reasoning, function_call and function_call_output"
            why = (
                "items are not kept by their id: send the item itself" if kind == "item_reference" else f"send {known}"
            )
            message = f"{where}.type is {str(kind)[:60]!r}, which is not supported; {why}"
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
        if not text and item.get("encrypted_content"):
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
        calls = self._turn(where).setdefault("tool_calls", [])
        self.places[f"messages[{len(self.messages) - 1}].tool_calls[{len(calls)}]"] = where
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
        self._known.add(str(call_id))

    def _result(self, where: str, item: Mapping[str, Any]) -> None:
        call_id = item.get("call_id")
        if not isinstance(call_id, str) or call_id not in self._known:
            wrong(f"{where}.call_id", "must be that of a function_call before it; send the call, too", call_id)
        content = texts_of(f"{where}.output", item.get("output"), _TEXTS, "; images and files are not read")
        self._message(where, {"role": "tool", "tool_call_id": call_id, "content": content})


def _image(where: str, part: Mapping[str, Any]) -> dict[str, Any]:
    if part.get("file_id") is not None:
        message = f"{where}.file_id names a file, and files are not kept here; send the image itself in image_url"
        raise ApiError(400, message, code="unsupported_content", param=f"{where}.file_id")
    return image_part(part.get("image_url"), f"{where}.image_url")


def _joined(content: str | Iterable[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    kind = tool.get("type", "function")
    if kind != "function":
        message = (
            f"{where}.type is {str(kind)[:60]!r}, but built-in and custom tools are not served; leave it out, or send a"
            " function and do yourself what it is to do"
        )
        raise ApiError(400, message, code="unsupported_parameter", param=f"{where}.type")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _choice(given: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """``tool_choice`` as a chat request writes it: the function's name is one level deeper."""
    if given is None or isinstance(given, str):
        return given
    kind = given.get("type")
    tools = given.get("tools")
    if kind == "function":
        return {"type": "function", "function": {"name": given.get("name")}}
    if kind == "allowed_tools" and isinstance(tools, list):
        chosen = [_choice(tool) if isinstance(tool, dict) else tool for tool in tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": given.get("mode"), "tools": chosen}}
    allowed = '"auto", "none", "required", {"type": "function", "name": ...} or {"type": "allowed_tools", ...}'
    return wrong("tool_choice", f"must be {allowed}", given)


def _form(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """``text.format`` as the field ``response_format`` of a chat request."""
    if given is None or given.get("type") == "text":
        return None
    if given.get("type") != "json_schema":
        if given.get("type") != "json_object":
            wrong("text.format.type", "must be text, json_object or json_schema", given.get("type"))
        return {"type": "json_object"}
    if "schema" not in given:
        wrong("text.format.schema", "must be a JSON schema", None)
    return {"type": "json_schema", "json_schema": {name: each for name, each in given.items() if name != "type"}}
