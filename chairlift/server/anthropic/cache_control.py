"""``cache_control`` of Anthropic's Messages API: breakpoints on tools, system blocks and blocks of messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from chairlift.server.anthropic.messages_types import CountTokensRequest, MessagesRequest
from chairlift.server.caching.breakpoints import Breakpoints
from chairlift.server.caching.marks import MARK, with_mark
from chairlift.server.http.errors import ApiError
from chairlift.server.openai.protocol import ChatRequest
from chairlift.server.openai.translation import wrong

__all__ = ["SHORT", "breakpoints", "check_cache_control"]

SHORT: Final = 300.0
"""Seconds of the ttl ``5m``, the default."""
_SECONDS: Final = {"5m": SHORT, "1h": 3600.0}
_MOST: Final = 4
_MARK_BLOCK: Final = {"type": "text", "text": MARK}
_MARK_TOOL: Final = {"name": MARK, "description": MARK, "input_schema": {"type": "object", "properties": {}}}
_THINKING: Final = ("thinking", "redacted_thinking")

_Payload = TypeVar("_Payload", CountTokensRequest, MessagesRequest)


def check_cache_control(payload: CountTokensRequest | MessagesRequest) -> None:
    """Raise ApiError 400 for a ``cache_control`` that Anthropic's API would refuse."""
    _Marking(payload)


def breakpoints(payload: _Payload, to_chat: Callable[[_Payload], ChatRequest]) -> Breakpoints | None:
    """The breakpoints of a request, None if it has none. ``to_chat`` translates a request to a chat.

    The blocks of the request must have been checked. Raises ApiError 400 as :func:`check_cache_control` does.
    """
    marking = _Marking(payload)
    if not marking.seconds:
        return Breakpoints(whole=marking.whole) if marking.whole else None
    fields = {"tools": marking.tools, "system": marking.system, "messages": marking.messages}
    chat = to_chat(msgspec.structs.replace(payload, **fields))
    return Breakpoints(tuple(marking.seconds), chat.messages, chat.tools or (), marking.whole)


class _Marking:
    """A copy of the parts of a request, with a mark after each block that has a breakpoint."""

    def __init__(self, payload: CountTokensRequest | MessagesRequest) -> None:
        self._found: list[tuple[str, float]] = []
        """(path of the block, seconds) of each breakpoint, in the order of the prompt."""
        self.tools = self._tools(payload.tools)
        of_tools = len(self._found)
        self.system = self._blocks("system", payload.system)
        of_system = len(self._found) - of_tools
        self.messages = [
            {**message, "content": self._blocks(f"messages[{index}].content", message.get("content"))}
            for index, message in enumerate(payload.messages)
        ]
        self.seconds = [seconds for _, seconds in self._found]
        """Seconds of each mark."""
        if of_system and self.tools and self.tools[-1] is not _MARK_TOOL:
            # A breakpoint of the system text covers the tools too, which many templates write after it.
            self.tools = [*self.tools, _MARK_TOOL]
            self.seconds.insert(of_tools, 0.0)
        self.whole = self._of_request(payload)
        self._check()

    def _of_request(self, payload: CountTokensRequest | MessagesRequest) -> float:
        """Seconds of the breakpoint at the end of the last block, for a ``cache_control`` of the whole request."""
        if payload.cache_control is None:
            return 0.0
        seconds = _seconds("cache_control", payload.cache_control)
        content = payload.messages[-1].get("content")
        last = f"messages[{len(payload.messages) - 1}].content[{len(content) - 1 if isinstance(content, list) else 0}]"
        if self._found and self._found[-1][0] == last:
            if self._found[-1][1] != seconds:
                message = "cache_control has another ttl than the last block; give one of the two, or the same ttl"
                raise ApiError(400, message, code="invalid_value", param="cache_control.ttl")
            return seconds
        self._found.append(("", seconds))
        return seconds

    def _check(self) -> None:
        if len(self._found) > _MOST:
            message = (
                f"A maximum of {_MOST} blocks with cache_control may be provided. Found {len(self._found)}."
                " Leave out the first ones: a later breakpoint covers the blocks before it"
            )
            raise ApiError(400, message, code="invalid_value", param="cache_control")
        for (_, before), (where, seconds) in zip(self._found, self._found[1:], strict=False):
            if seconds > before:
                param = f"{where}.cache_control.ttl".removeprefix(".")
                message = (
                    f"{param}: a ttl='1h' cache_control block must not come after a ttl='5m' cache_control block. Note"
                    " that blocks are processed in the following order: `tools`, `system`, `messages`"
                )
                raise ApiError(400, message, code="invalid_value", param=param)

    def _tools(self, tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        made: list[dict[str, Any]] = []
        for index, tool in enumerate(tools or ()):
            made.append(tool)
            if self._note(f"tools[{index}]", tool):
                made.append(_MARK_TOOL)
        return None if tools is None else made

    def _blocks(self, where: str, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        made: list[Any] = []
        for index, block in enumerate(content):
            place = f"{where}[{index}]"
            if not isinstance(block, Mapping):
                made.append(block)
                continue
            if block.get("type") == "tool_result":
                block = {**block, "content": self._blocks(f"{place}.content", block.get("content"))}
            made += _marked(place, block) if self._note(place, block) else [block]
        return made

    def _note(self, where: str, block: Mapping[str, Any]) -> bool:
        control = block.get("cache_control")
        if control is None:
            return False
        self._found.append((where, _seconds(f"{where}.cache_control", control)))
        return True


def _seconds(where: str, control: Any) -> float:
    if not isinstance(control, Mapping):
        wrong(where, 'must be an object such as {"type": "ephemeral"}', control)
    if control.get("type") != "ephemeral":
        wrong(f"{where}.type", "must be ephemeral", control.get("type"))
    ttl = control.get("ttl")
    if ttl is None:
        return SHORT
    if not isinstance(ttl, str) or ttl not in _SECONDS:
        wrong(f"{where}.ttl", "must be 5m or 1h", ttl)
    return _SECONDS[ttl]


def _marked(where: str, block: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The block with a mark at its end, or followed by a block with a mark."""
    kind = block.get("type")
    if kind in _THINKING:
        message = f"{where}.cache_control: thinking blocks have no breakpoints; set one on a block before or after it"
        raise ApiError(400, message, code="invalid_value", param=f"{where}.cache_control")
    if kind == "text" and not block.get("text"):
        message = f"{where}.cache_control: cache_control cannot be set for empty text blocks; leave the block out"
        raise ApiError(400, message, code="invalid_value", param=f"{where}.cache_control")
    if kind == "text" and isinstance(block["text"], str):
        return [{**block, "text": block["text"] + MARK}]
    if kind == "tool_use" and isinstance(block.get("input"), Mapping):
        return [{**block, "input": {**block["input"], MARK: MARK}}]
    if kind == "tool_result":
        return [{**block, "content": with_mark(block.get("content"), _MARK_BLOCK)}]
    return [block, _MARK_BLOCK]
