"""OpenAI's fields for the prompt cache: ``prompt_cache_options``, ``prompt_cache_retention`` and, in parts of
messages, ``prompt_cache_breakpoint``. (``prompt_cache_key`` names a session.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from chairlift.base.cache_hints import LONGEST_LEASE, MOST_LEASES
from chairlift.server.caching.breakpoints import Breakpoints
from chairlift.server.caching.marks import MARK
from chairlift.server.http.errors import ApiError
from chairlift.server.http.state import ServerState
from chairlift.server.openai.protocol import ChatRequest, PromptCacheOptions

__all__ = ["SECONDS", "PartMarking", "chat_breakpoints", "num_skipped", "whole_prompt"]

SECONDS: Final = 1800.0
"""Seconds of the ttl ``30m``, the only one that OpenAI's API has."""
_FIELD: Final = "prompt_cache_breakpoint"


class _Asks(Protocol):
    prompt_cache_retention: str | None
    prompt_cache_options: PromptCacheOptions | None


def whole_prompt(state: ServerState, payload: _Asks, has_marks: bool = False) -> float:
    """Seconds for which the whole prompt is to be kept; 0 if the request does not ask for it.

    OpenAI's API sets a breakpoint at the end of the prompt unless ``mode`` is ``explicit``. Here it does so only if the
    request has ``prompt_cache_options`` or an explicit breakpoint (``has_marks``). A retention of ``24h`` needs no
    lease where blocks are kept in files, and is as long as the longest lease otherwise.
    """
    if not state.engine.cache.enable_prefix_caching:
        return 0.0
    options = payload.prompt_cache_options
    seconds = 0.0
    if (has_marks or options is not None) and (options is None or options.mode != "explicit"):
        seconds = SECONDS
    if payload.prompt_cache_retention == "24h" and state.engine.cache.kv_store is None:
        seconds = LONGEST_LEASE
    return seconds


def chat_breakpoints(state: ServerState, chat: ChatRequest) -> Breakpoints | None:
    """The breakpoints of a chat; None if it has none. They are removed from its messages. Raises ApiError 400."""
    count = PartMarking(0)
    plain = [count.without(f"messages[{index}]", message, "content") for index, message in enumerate(chat.messages)]
    whole = whole_prompt(state, chat, count.num_seen > 0)
    if not count.num_seen:
        return Breakpoints(whole=whole) if whole else None
    marking = PartMarking(num_skipped(count.num_seen, whole))
    marked = [marking.marked(message, "content", "text") for message in chat.messages]
    chat.messages = plain
    return Breakpoints((SECONDS,) * marking.num_made, marked, chat.tools or (), whole)


def num_skipped(num_seen: int, whole: float) -> int:
    """Number of the first breakpoints that have no effect: a request writes the latest ones."""
    return max(0, num_seen - (MOST_LEASES - bool(whole)))


class PartMarking:
    """Copies messages or items, without breakpoints or with marks. The first ``num_skipped`` breakpoints get no
    mark."""

    def __init__(self, num_skipped: int) -> None:
        self._num_skipped = num_skipped
        self.num_seen = self.num_made = 0

    def without(self, where: str, message: dict[str, Any], key: str) -> dict[str, Any]:
        """The message with the parts in ``key``, without their breakpoints. Raises ApiError 400 for a breakpoint that
        is none."""
        parts = message.get(key)
        if not isinstance(parts, list) or not any(_given(part) is not None for part in parts):
            return message
        for index, part in enumerate(parts):
            given = _given(part)
            if given is None:
                continue
            self.num_seen += 1
            if not isinstance(given, Mapping) or given.get("mode") != "explicit":
                path = f"{where}.{key}[{index}].{_FIELD}"
                message_text = f'{path} must be {{"mode": "explicit"}}; got {given!r:.60}'
                raise ApiError(400, message_text, code="invalid_value", param=path)
        plain = [_plain(part) if isinstance(part, Mapping) else part for part in parts]
        return {**message, key: plain}

    def marked(self, message: dict[str, Any], key: str, text_type: str) -> dict[str, Any]:
        """The message with the parts in ``key``, with a mark in place of each breakpoint. A mark behind a part that is
        no text is a part of the type ``text_type``."""
        parts = message.get(key)
        if not isinstance(parts, list):
            return message
        made: list[Any] = []
        for part in parts:
            if _given(part) is None:
                made.append(part)
                continue
            self.num_seen += 1
            made += [_plain(part)] if self.num_seen <= self._num_skipped else self._mark(_plain(part), text_type)
        return {**message, key: made}

    def _mark(self, part: dict[str, Any], text_type: str) -> Sequence[dict[str, Any]]:
        self.num_made += 1
        if isinstance(part.get("text"), str):
            return [{**part, "text": part["text"] + MARK}]
        return [part, {"type": text_type, "text": MARK}]


def _given(part: Any) -> Any:
    return part.get(_FIELD) if isinstance(part, Mapping) else None


def _plain(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name != _FIELD}
