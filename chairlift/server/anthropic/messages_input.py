"""Translates Anthropic's messages, whose contents are blocks, to the messages of a chat."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from chairlift.server.anthropic.messages_types import CountTokensRequest, MessagesRequest, Metadata
from chairlift.server.http.errors import ApiError
from chairlift.server.openai.protocol import ChatRequest, SampledRequest
from chairlift.server.openai.translation import Names, image_part, texts_of, thinking_switch, wrong
from chairlift.text.tool_calls import reasoning_format_of

__all__ = ["names", "to_chat"]

_FIELDS: Final = {
    r"(tools\[[0-9]+\])\.function\.parameters": r"\1.input_schema",
    r"(tools\[[0-9]+\])\.function": r"\1",
    r"response_format\.json_schema\.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
    "thinking_token_budget": "thinking.budget_tokens",
    r"(messages\[[0-9]+\]\.content\[[0-9]+\])\.image_url\.url": r"\1.source",
}
_SAME: Final = (
    *(name for name in SampledRequest.__struct_fields__ if name != "service_tier"),
    "max_tokens",
)
"""Fields that have the same name and meaning in a chat request."""
_BILLING: Final = "x-anthropic-billing-header"
"""Prefix of a system block that the server removes. The block is not for the model. Its text changes with every call,
so no prompt would match the prefix cache."""
_Payload = CountTokensRequest | MessagesRequest
_MAX_USER: Final = 256
_INSTEAD: Final = "; PDF documents are not read, and images only in a user's message or a tool's result"
_SERVER_BLOCKS: Final = re.compile(r"server_tool_use|(web_search|web_fetch|advisor|tool_search)_tool_result")
"""Types of blocks in which Anthropic's servers keep calls of their own tools. The text after them has what the model
found, so they are dropped, and the ``Warning`` header names them."""
_KEEPS: Final = ("all", {"type": "all"})
"""Values of ``keep`` with which an edit of ``context_management`` removes nothing."""


def names() -> Names:
    """Names of the fields of Anthropic's endpoints, for error messages."""
    return Names(_FIELDS)


def to_chat(payload: _Payload, client_names: Names, template: str, ignored: list[str]) -> ChatRequest:
    """Translate a request to a chat for a model with the chat template ``template``.

    ``client_names`` gets the position of each message, and ``ignored`` the names of ignored fields. Raises ApiError
    with the name of a field, block or tool that is not supported.
    """
    _check_context(payload)
    turns = _Turns(ignored)
    if payload.system is not None:
        turns.system(payload.system)
    for index, message in enumerate(payload.messages):
        turns.add(f"messages[{index}]", message)
    client_names.places.update(turns.places)
    choice, parallel = _choice(payload.tool_choice)
    tools = _tools(payload.tools or (), payload.tool_choice, client_names, ignored)
    if payload.tool_choice and not tools and choice not in ("auto", "none"):
        why = (
            f"tool_choice.type is {payload.tool_choice['type']!r}, but there are no tools; send tools, or leave it out"
        )
        raise ApiError(400, why, code="invalid_value", param="tool_choice.type")
    config = payload.output_config
    chat = ChatRequest(
        messages=turns.messages,
        tools=tools or None,
        tool_choice=choice if tools or choice != "none" else None,
        parallel_tool_calls=parallel,
        reasoning_effort=config.effort if config else None,
        response_format=_form(config.format if config else None),
        chat_template_kwargs=_thinking(payload, template, ignored),
    )
    if turns.messages[-1]["role"] == "assistant":  # the answer continues this message
        chat.add_generation_prompt = False
        chat.continue_final_message = True
    if payload.thinking is not None:
        chat.include_reasoning = payload.thinking.display != "omitted"
    if isinstance(payload, MessagesRequest):
        for name in _SAME:
            setattr(chat, name, getattr(payload, name))
        chat.stop = payload.stop_sequences
        chat.service_tier = None if payload.service_tier == "standard_only" else payload.service_tier
        chat.user = _user(payload.metadata)
    return chat


def _user(metadata: Metadata | None) -> str | None:
    """``user_id``, cut to the length that chats allow; None if it is missing."""
    user = metadata.user_id if metadata else None
    if user is None or len(user) <= _MAX_USER:
        return user
    return hashlib.sha256(user.encode("utf-8", "replace")).hexdigest()


def _thinking(payload: _Payload, template: str, ignored: list[str]) -> dict[str, Any] | None:
    """Template variables that turn thinking on or off. If the request has no field ``thinking``, thinking is off, as in
    Anthropic's API."""
    kind = payload.thinking.type if payload.thinking else "disabled"
    if kind not in ("enabled", "adaptive", "disabled"):
        wrong("thinking.type", "must be enabled, adaptive or disabled", kind)
    switch = thinking_switch(template)
    if switch is not None:
        return {switch: kind != "disabled"}
    if payload.thinking is not None and (kind == "disabled") is (reasoning_format_of(template) is not None):
        ignored.append("thinking")  # the template has no switch for thinking
    return None


class _Turns:
    """Makes the messages of a chat from messages with blocks."""

    def __init__(self, ignored: list[str]) -> None:
        self._ignored = ignored
        self.messages: list[dict[str, Any]] = []
        self.places: dict[str, str] = {}
        self._known: set[str] = set()
        """Ids of all tool calls in the conversation so far."""

    def system(self, given: Any) -> None:
        """Add the system text, without blocks that are not meant for the model."""
        parts = texts_of("system", given, ("text",), _INSTEAD)
        texts = [parts] if isinstance(parts, str) else [part["text"] for part in parts]
        text = "\n\n".join(each for each in texts if each and not each.startswith(_BILLING))
        if text:
            self._message("system", {"role": "system", "content": text})

    def add(self, where: str, message: Mapping[str, Any]) -> None:
        role = message.get("role")
        content = message.get("content")
        if role not in ("user", "assistant", "system"):
            wrong(f"{where}.role", "must be user, assistant or system", role)
        if isinstance(content, str):
            self._message(where, {"role": role, "content": content})
            return
        if not isinstance(content, list):
            wrong(f"{where}.content", "must be a text or a list of blocks", content)
        for index, block in enumerate(content):
            if not isinstance(block, dict):
                wrong(f"{where}.content[{index}]", "must be an object with a type", block)
        if role == "assistant":
            self._assistant(where, content)
        else:
            self._others(where, role, content)

    def _message(self, where: str, message: dict[str, Any]) -> None:
        self.places[f"messages[{len(self.messages)}]"] = where
        self.messages.append(message)

    def _others(self, where: str, role: str, blocks: Sequence[Mapping[str, Any]]) -> None:
        """Add the tool results, and the texts between them, in the order of the blocks. Images of tool results follow
        in the user's message, because templates print no images in results."""
        texts: list[dict[str, Any]] = []
        images: list[dict[str, Any]] = []
        num_before = len(self.messages)
        kinds = ("text",) if role == "system" else ("text", "image", "document", "search_result", "tool_result")
        for index, block in enumerate(blocks):
            place = f"{where}.content[{index}]"
            if block.get("type") == "image" and role == "user":
                texts.append(_image(place, block))
                continue
            if block.get("type") != "tool_result" or role == "system":
                texts.append({"type": "text", "text": _text(place, block, kinds)})
                continue
            if texts:
                self._message(where, {"role": role, "content": _whole(images + texts)})
                texts = []
                images = []
            images += self._result(place, block)
        if texts or images or num_before == len(self.messages):
            self._message(where, {"role": role, "content": _whole(images + texts)})

    def _result(self, where: str, block: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Add the texts of a tool's result, and return its images."""
        call_id = block.get("tool_use_id")
        if not isinstance(call_id, str) or call_id not in self._known:
            wrong(f"{where}.tool_use_id", "must be the id of a tool_use before it; send the call, too", call_id)
        others = {"image": _image, "document": _document, "search_result": _found, "tool_reference": _reference}
        content = texts_of(f"{where}.content", block.get("content") or "", ("text",), _INSTEAD, others)
        images: list[dict[str, Any]] = []
        if not isinstance(content, str):
            images = [part for part in content if "text" not in part]
            content = _whole([part for part in content if "text" in part])
        if block.get("is_error"):
            text = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
            content = text if text.lower().startswith("error") else f"Error: {text}"
        self._message(where, {"role": "tool", "tool_call_id": call_id, "content": content})
        return images

    def _assistant(self, where: str, blocks: Sequence[Mapping[str, Any]]) -> None:
        texts: list[dict[str, Any]] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for index, block in enumerate(blocks):
            place = f"{where}.content[{index}]"
            kind = block.get("type")
            if kind == "thinking":
                if not isinstance(block.get("thinking"), str):
                    wrong(f"{place}.thinking", "must be a text", block.get("thinking"))
                thoughts.append(block["thinking"])
            elif kind == "tool_use":
                self.places[f"messages[{len(self.messages)}].tool_calls[{len(calls)}]"] = place
                calls.append(self._call(place, block))
            elif kind == "redacted_thinking" or _SERVER_BLOCKS.fullmatch(str(kind)):
                self._ignored.append(place)
            elif kind == "compaction":
                texts.append({"type": "text", "text": _summary(place, block)})
            else:
                texts.append({"type": "text", "text": _text(place, block, ("text", "thinking", "tool_use"))})
        message: dict[str, Any] = {"role": "assistant", "content": _whole(texts) if texts or not calls else None}
        if any(thoughts):
            message["reasoning_content"] = "\n".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self._message(where, message)

    def _call(self, where: str, block: Mapping[str, Any]) -> dict[str, Any]:
        for key in ("id", "name"):
            if not isinstance(block.get(key), str) or not block[key]:
                wrong(f"{where}.{key}", "must be a text", block.get(key))
        given = block.get("input")
        if not isinstance(given, dict):
            wrong(f"{where}.input", "must be an object", given)
        self._known.add(block["id"])
        function = {"name": block["name"], "arguments": json.dumps(given, ensure_ascii=False)}
        return {"id": block["id"], "type": "function", "function": function}


def _image(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """Image part of a chat message, from an image block. The block's source is base64 data or a URL."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if not isinstance(source, Mapping) or kind not in ("base64", "url"):
        message = f"{where}.source must be of type base64 or url, got {str(kind)[:60]!r}; files are not kept here"
        raise ApiError(400, message, code="unsupported_content", param=f"{where}.source")
    if kind == "url":
        return image_part(source.get("url"), f"{where}.source.url")
    for key in ("media_type", "data"):
        if not isinstance(source.get(key), str):
            wrong(f"{where}.source.{key}", "must be a text", source.get(key))
    return image_part(f"data:{source['media_type']};base64,{source['data']}", where)


def _document(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """Text part of a chat message, from a document whose source is a text or blocks of text."""
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if not isinstance(source, Mapping) or kind not in ("text", "content"):
        message = f"{where}.source must be of type text or content, got {str(kind)[:60]!r}; send the document's text"
        raise ApiError(400, message, code="unsupported_content", param=f"{where}.source")
    name = "data" if kind == "text" else "content"
    texts = texts_of(f"{where}.source.{name}", source.get(name), ("text",), _INSTEAD)
    return _titled(block, ("title", "context"), texts)


def _found(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """Text part of a chat message, from a search result."""
    texts = texts_of(f"{where}.content", block.get("content"), ("text",), _INSTEAD)
    return _titled(block, ("title", "source"), texts)


def _titled(block: Mapping[str, Any], names: Sequence[str], texts: str | list[dict[str, Any]]) -> dict[str, Any]:
    lines = [block[name] for name in names if isinstance(block.get(name), str)]
    lines += [texts] if isinstance(texts, str) else [part["text"] for part in texts]
    return {"type": "text", "text": "\n".join(lines)}


def _reference(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """Text part of a chat message, from a reference to a tool: the tool's name. Its definition is in the prompt."""
    if not isinstance(block.get("tool_name"), str):
        wrong(f"{where}.tool_name", "must be the name of a tool", block.get("tool_name"))
    return {"type": "text", "text": block["tool_name"]}


def _summary(where: str, block: Mapping[str, Any]) -> str:
    """Text of a compaction block: a summary of the conversation before it."""
    if not isinstance(block.get("content"), str):
        wrong(f"{where}.content", "must be a text", block.get("content"))
    text: str = block["content"]
    return text


def _text(where: str, block: Mapping[str, Any], kinds: Sequence[str]) -> str:
    """Text of a block of text, or of a document or search result if ``kinds``, the allowed types, has these."""
    make = {"document": _document, "search_result": _found}.get(str(block.get("type")))
    if make is not None and block["type"] in kinds:
        found: str = make(where, block)["text"]
        return found
    if block.get("type") != "text":
        message = f"{where}.type is {str(block.get('type'))[:60]!r}, which is not supported; send {', '.join(kinds)}"
        raise ApiError(400, message + _INSTEAD, code="unsupported_content", param=where)
    if not isinstance(block.get("text"), str):
        wrong(f"{where}.text", "must be a text", block.get("text"))
    text: str = block["text"]
    return text


def _whole(texts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if len(texts) > 1 or (texts and "text" not in texts[0]):
        return texts
    text: str = texts[0]["text"] if texts else ""
    return text


def _check_context(payload: _Payload) -> None:
    """Raise ApiError if the request asks the server to remove parts of the conversation, or to count down a budget."""
    place = "context_management.edits"
    edits = (payload.context_management or {}).get("edits") or []
    for index, edit in enumerate(edits if isinstance(edits, list) else [edits]):
        kind = edit.get("type") if isinstance(edit, Mapping) else None
        if kind != "clear_thinking_20251015" or edit.get("keep") not in _KEEPS:
            message = (
                f"{place}[{index}] is {edit!r:.100}, but the server removes nothing from a conversation; leave the edit"
                " out, or send the messages without the parts that the model shall not read"
            )
            raise ApiError(400, message, code="unsupported_parameter", param=f"{place}[{index}]")
    if payload.output_config is not None and payload.output_config.task_budget is not None:
        message = "output_config.task_budget is given, but no count of the tokens left is shown to the model; leave it"
        raise ApiError(400, f"{message} out", code="unsupported_parameter", param="output_config.task_budget")


def _tools(
    given: Sequence[Mapping[str, Any]], choice: Mapping[str, Any] | None, client_names: Names, ignored: list[str]
) -> list[dict[str, Any]]:
    """The tools that have a schema, for a chat. Tools that Anthropic defines are left out and added to ``ignored``.
    Raises ApiError if ``choice`` names such a tool."""
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(given):
        where = f"tools[{index}]"
        if (tool.get("type") or "custom") == "custom":
            client_names.places[f"tools[{len(tools)}]"] = where
            tools.append(_tool(where, tool))
            continue
        if choice is not None and choice.get("type") == "tool" and choice.get("name") == tool.get("name"):
            message = (
                f"tool_choice names {where}, whose type is {str(tool.get('type'))[:60]!r}, but tools that Anthropic"
                " defines are not served; send a tool with an input_schema and do yourself what it is to do"
            )
            raise ApiError(400, message, code="unsupported_parameter", param="tool_choice.name")
        ignored.append(where)
    return tools


def _tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("input_schema") is None:
        wrong(f"{where}.input_schema", "must be a JSON schema of an object", None)
    function = {name: tool.get(name) for name in ("name", "description", "strict")}
    schema = tool["input_schema"]
    if tool.get("input_examples") and isinstance(schema, Mapping):
        schema = {**schema, "examples": tool["input_examples"]}
    return {"type": "function", "function": {**function, "parameters": schema}}


def _choice(given: Mapping[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool | None]:
    """(``tool_choice``, ``parallel_tool_calls``) for a chat request."""
    if given is None:
        return None, None
    kind = given.get("type")
    single = given.get("disable_parallel_tool_use")
    if single not in (None, True, False):
        wrong("tool_choice.disable_parallel_tool_use", "must be true or false", single)
    parallel = None if single is None else not single
    if kind == "tool":
        if not isinstance(given.get("name"), str):
            wrong("tool_choice.name", "must be the name of a tool", given.get("name"))
        return {"type": "function", "function": {"name": given["name"]}}, parallel
    choices = {"auto": "auto", "any": "required", "none": "none"}
    if kind not in choices:
        wrong("tool_choice.type", "must be auto, any, tool or none", kind)
    return choices[str(kind)], parallel


def _form(given: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """``output_config.format`` as the field ``response_format`` of a chat request."""
    if given is None:
        return None
    if given.get("type") != "json_schema" or "schema" not in given:
        wrong("output_config.format", 'must be {"type": "json_schema", "schema": {...}}', given)
    return {"type": "json_schema", "json_schema": {"schema": given["schema"]}}
