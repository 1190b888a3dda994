"""Converts training records of chats in common formats to one form.

The formats are OpenAI's fine-tuning files, ShareGPT, Alpaca and TRL. Uses the standard library only.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from chairlift.errors import ConfigError
from chairlift.text.tokenizer.messages import REASONING_KEYS
from chairlift_train.marks import check_pairs, message_mark

__all__ = ["MESSAGE_KEYS", "Chat", "chat_of"]

MESSAGE_KEYS: Final = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", *REASONING_KEYS})
"""Keys of a message that every chat template gets. A template gets other keys only if its text mentions them."""
_ROLES: Final = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "function_call",
}
"""Name of a speaker in ShareGPT's format -> role of the message in OpenAI's format."""
_SETTINGS: Final = ("tools", "chat_template_kwargs")


@dataclasses.dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as a training example."""

    messages: list[dict[str, Any]]
    learnt: tuple[bool, ...]
    """One entry per message: whether it is a training target when only answers are targets."""
    excluded: tuple[bool, ...]
    """One entry per message: whether a mark such as ``weight: 0`` excludes it, also when all tokens are targets."""
    fields: frozenset[str]
    """Names of the fields of the record that the conversation was made from."""
    tools: list[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Variables for the chat template, such as ``enable_thinking``."""


def chat_of(record: Mapping[str, Any]) -> Chat | None:
    """Convert a record to a chat. Returns None if the record is not in one of these formats.

    - ``messages`` or ``conversations``: a list of messages with ``role`` and ``content`` (OpenAI, TRL), or ``from`` and
      ``value`` (ShareGPT), and optionally ``system``. An answer with ``weight: 0`` or a similar mark
      (:mod:`~chairlift_train.marks`) is not a training target.
    - ``prompt`` and ``completion``, both lists of messages (TRL): the answers in the completion are targets.
    - ``instruction`` and ``output``, and optionally ``input``, ``system`` and ``history`` (Alpaca).

    A list of messages may be JSON text, as tables store it. Each format can also have ``tools`` (likewise) and
    ``chat_template_kwargs``. Raises ConfigError for a record in one of these formats with an invalid field.
    """
    name = next((name for name in ("messages", "conversations", "conversation") if name in record), "")
    if name:
        raw = _listed(record[name], name)
        messages = _with_system(record, [_message(message, f"{name}[{i}]") for i, message in enumerate(raw)])
        check_pairs(record, messages[-1].get("role") if messages else None)
        return _chat_from(record, messages, 0, {name, "system"})
    if isinstance(record.get("prompt"), list) or isinstance(record.get("completion"), list):
        parts = [[_message(m, f"{name}[{i}]") for i, m in enumerate(_listed(record.get(name), name))] for name in _PAIR]
        return _chat_from(record, [*parts[0], *parts[1]], len(parts[0]), {"prompt", "completion"})
    if "instruction" in record and "output" in record:
        return _alpaca(record)
    return None


_PAIR: Final = ("prompt", "completion")


def _chat_from(record: Mapping[str, Any], messages: list[dict[str, Any]], first: int, fields: set[str]) -> Chat:
    """Make a chat whose answers from ``messages[first]`` on are learnt, unless they are marked otherwise."""
    marks = [message_mark(message, f"messages[{index}]") for index, message in enumerate(messages)]
    excluded = tuple(mark is False for mark in marks)
    learnt = tuple(
        message.get("role") == "assistant" and index >= first and not excluded[index]
        for index, message in enumerate(messages)
    )
    given = record.get("chat_template_kwargs", {})
    if not isinstance(given, Mapping):
        raise ConfigError(f"chat_template_kwargs must be an object of variables, got {str(given)[:60]!r}")
    read = frozenset({*fields, *_SETTINGS} & set(record))
    return Chat(messages, learnt, excluded, read, _tools(record.get("tools")), dict(given))


def _alpaca(record: Mapping[str, Any]) -> Chat:
    texts = {name: record.get(name, "") for name in ("instruction", "input", "output", "system")}
    if wrong := [name for name, text in texts.items() if not isinstance(text, str)]:
        raise ConfigError(f"{wrong[0]} must be text, got {str(texts[wrong[0]])[:60]!r}")
    messages = _with_system(record, [])
    for index, turn in enumerate(_listed(record.get("history", []), "history")):
        if not isinstance(turn, Sequence) or isinstance(turn, str) or len(turn) != 2:
            raise ConfigError(f"history[{index}] must be [question, answer], got {str(turn)[:60]!r}")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    question = "\n\n".join(text for text in (texts["instruction"], texts["input"]) if text)
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": texts["output"]}]
    fields = {"instruction", "input", "output", "system", "history"}
    return _chat_from(record, messages, 0, fields)


def _with_system(record: Mapping[str, Any], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with the record's ``system`` text first unless they already begin with a system message."""
    text = record.get("system")
    if not text or (messages and messages[0].get("role") == "system"):
        return messages
    if not isinstance(text, str):
        raise ConfigError(f"system must be text, got {str(text)[:60]!r}")
    return [{"role": "system", "content": text}, *messages]


def _message(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must have role and content, or from and value; got {str(given)[:60]!r}")
    message = dict(given)
    if "from" in message and "value" in message and "role" not in message:
        speaker = message.pop("from")
        message["content"] = message.pop("value")
        message["role"] = _ROLES.get(str(speaker).lower())
        if message["role"] is None:
            raise ConfigError(f"{where}.from must be one of {', '.join(sorted(_ROLES))}; got {str(speaker)[:60]!r}")
        if message["role"] == "function_call":
            calls = _json(message.pop("content"), f"{where}.value")
            calls = calls if isinstance(calls, list) else [calls]
            message |= {"role": "assistant", "tool_calls": [_wrapped(call, f"{where}.value") for call in calls]}
    if message.get("function_call") and "tool_calls" not in message:  # OpenAI's older format of a tool call
        message["tool_calls"] = [_wrapped(message["function_call"], f"{where}.function_call")]
    message.pop("function_call", None)
    if message.get("role") == "function":
        message["role"] = "tool"
    return message


def _tools(given: Any) -> list[dict[str, Any]] | None:
    tools = _json(given, "tools") if isinstance(given, str) and given.strip() else given
    if not tools:
        return None
    return [_wrapped(tool, "tools") for tool in _listed(tools, "tools")]


def _wrapped(given: Any, where: str) -> dict[str, Any]:
    """A function definition or a function call in OpenAI's format."""
    if not isinstance(given, Mapping) or not ("function" in given or "name" in given):
        raise ConfigError(f'{where} must be {{"type": "function", "function": {{...}}}}, got {str(given)[:60]!r}')
    return dict(given) if "function" in given else {"type": "function", "function": dict(given)}


def _json(text: Any, where: str) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        raise ConfigError(f"{where} must be JSON text, got {str(text)[:60]!r}") from None


def _listed(given: Any, name: str) -> Sequence[Any]:
    if isinstance(given, str) and given.lstrip().startswith("["):  # as tables store it
        given = _json(given, name)
    if not isinstance(given, (list, tuple)):
        raise ConfigError(f"{name} must be a list, got {str(given)[:60]!r}")
    return given
