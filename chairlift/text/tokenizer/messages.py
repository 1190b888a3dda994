"""Checks chat messages from HTTP, Python and training data, and converts them to plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from chairlift.base.image_refusals import advice
from chairlift.errors import RequestError

__all__ = ["REASONING_KEYS", "normalize_messages", "plain_tools", "text_size"]

REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")
"""Keys under which clients send an assistant's reasoning. If a message has several, the first in this list is used, as
in transformers."""
_SAYS_SOMETHING: Final = ("tool_calls", "function_call", *REASONING_KEYS)
"""Keys of an assistant's message. If a message has one of them, it needs no content."""
_MAX_DEPTH: Final = 64
"""Maximum depth of nested lists and objects, the same as for request bodies."""
_LONGEST: Final = 60
"""Maximum number of characters that an error message quotes from a caller's value."""


def normalize_messages(messages: Sequence[Mapping[str, Any]], *, images: bool = False) -> list[dict[str, Any]]:
    """Copies of the messages as plain dicts, lists and strings. The chat template decides which keys it uses.

    A ``role`` is required. A ``content`` is a text or a list of text parts. It may be missing from an assistant's
    message with tool calls or reasoning. Clients send every possible field, so keys whose value is null are dropped,
    as in transformers, and an empty ``tool_calls`` is dropped, as in vLLM. With ``images`` a part may be ``{"type":
    "image"}``, a placeholder for an image. Raises :class:`~chairlift.errors.RequestError`. Its message begins with the
    path of the wrong value.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages must be a list like [{{'role': 'user', 'content': 'Hi'}}], got {type(messages).__name__}"
        )
    if not messages:
        raise RequestError("messages is empty; send at least one")
    return [_message(f"messages[{index}]", message, images) for index, message in enumerate(messages)]


def plain_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """Copies of the tools for a chat template as plain dicts, lists and strings. Raises RequestError for values of
    other types."""
    given: Any = () if tools is None else tools
    if not isinstance(given, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in given):
        raise RequestError(f"chat template variable 'tools' must be a list of objects, got {_quoted(tools)}")
    return [_plain(f"tools[{index}]", tool, 1) for index, tool in enumerate(given)]


def text_size(value: Any) -> int:
    """Total number of characters in all texts and keys of plain data."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(len, value)) + sum(map(text_size, value.values()))
    return sum(map(text_size, value)) if isinstance(value, list) else 0


def _message(where: str, message: Any, images: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content, got {type(message).__name__}")
    plain: dict[str, Any] = {}
    for key, value in message.items():
        if not isinstance(key, str):
            raise RequestError(f"{where} has a key that is no text: {str(key)[:_LONGEST]!r}; name its fields by text")
        if key == "content":
            content = _content(where, value, images)
        elif value is not None and not (key == "tool_calls" and isinstance(value, (list, tuple)) and not value):
            content = _plain(f"{where}.{key:.{_LONGEST}}", value, 1)
        else:
            continue
        if content is not None:
            plain[str.__str__(key)] = content
    if "role" not in plain:
        raise RequestError(f"{where}.role is missing; it is required: system, developer, user, assistant or tool")
    for key in ("role", "name"):
        if key in plain and not (isinstance(plain[key], str) and plain[key]):
            raise RequestError(f"{where}.{key} must be a non-empty string, got {_quoted(plain[key])}")
    calls = plain.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RequestError(
            f'{where}.tool_calls must be a list of objects ([{{"type": "function", "function": {{"name": ..., '
            f'"arguments": ...}}}}]), got {_quoted(calls)}'
        )
    if "content" not in plain and not (plain["role"] == "assistant" and any(plain.get(key) for key in _SAYS_SOMETHING)):
        got = "got null" if "content" in message else "it is missing"
        raise RequestError(
            f"{where}.content must be a string or a list of text parts, {got}; only an assistant's message with "
            "tool_calls or reasoning_content may be without"
        )
    return plain


def _content(where: str, content: Any, images: bool) -> str | list[dict[str, Any]] | None:
    if content is None:
        return None
    if isinstance(content, str):
        return str.__str__(content)
    if not isinstance(content, Sequence) or isinstance(content, bytes) or not content:
        raise RequestError(
            f"{where}.content must be a string or a list of text parts, at least one "
            f'([{{"type": "text", "text": "..."}}]), got {_quoted(content)}'
        )
    parts = []
    for index, part in enumerate(content):
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (None, None)
        if images and kind == "image" and len(part) == 1:
            parts.append({"type": "image"})
            continue
        if kind != "text" or not isinstance(text, str):
            if kind == "text":
                got = "no text"
            elif kind is None:
                got = repr(part)[:_LONGEST]
            else:
                got = f"type {str(kind)[:40]!r}"
            instead = advice(kind) if isinstance(kind, str) else ""
            raise RequestError(
                f"{where}.content[{index}] must be a text part ({{'type': 'text', 'text': '...'}}), got {got}"
                + ("; " + instead if instead else "")
            )
        # Data from Parquet files has the fields of all kinds of parts in every part, as null. These are removed,
        # because templates only check whether a part has the key "image".
        given = {key: value for key, value in part.items() if value is not None}
        parts.append(_plain(f"{where}.content[{index}]", given, 2))
    return parts


def _quoted(value: Any) -> str:
    if isinstance(value, (list, tuple)) and not value:
        return "an empty list"
    return repr(value)[:_LONGEST]


def _plain(where: str, value: Any, depth: int) -> Any:
    """Convert to exact built-in types. In the sandbox, a template could call methods of their subclasses."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int) and abs(value) < 2**64:
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if depth < _MAX_DEPTH and isinstance(value, (list, tuple)):
        return [_plain(f"{where}[{index}]", item, depth + 1) for index, item in enumerate(value)]
    if depth < _MAX_DEPTH and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str.__str__(key): _plain(f"{where}.{key:.{_LONGEST}}", v, depth + 1) for key, v in value.items()}
    raise RequestError(
        f"{where[:200]} must be text, a number of at most 64 bits, true, false, null, or a list or an object (with "
        f"names of text) of those, at most {_MAX_DEPTH} deep; got {type(value).__name__}"
    )
