"""Describes tools in the messages of a chat, for chat templates that know no tools."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = ["messages_with_tools"]

_CALL: Final = "<tool_call>\n{}\n</tool_call>"
_RESULT: Final = "<tool_response>\n{}\n</tool_response>"
_HEAD: Final = (
    "You can call functions. Each line between <tools> and </tools> describes one function, with a JSON schema of its"
    " arguments.\n<tools>\n{}\n</tools>\nTo call a function, write its name and arguments in this form, once for each"
    ' call:\n<tool_call>\n{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}\n</tool_call>\nThe next message has'
    " the results, each between <tool_response> and </tool_response>. If no function helps, answer without a call."
)


def messages_with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], *, in_system: bool = True
) -> list[dict[str, Any]]:
    """Messages with the roles ``system``, ``user`` and ``assistant`` only, which say everything that ``messages`` and
    ``tools`` say.

    The tools are described at the beginning of the system message, or of the first message of the user if ``in_system``
    is false. Earlier calls are text of the assistant, in the form ``generic`` of
    :data:`chairlift.text.tool_calls.TOOL_FORMATS`, and results are messages of the user.
    """
    said: list[dict[str, Any]] = []
    for message in messages:
        plain = dict(message)
        calls = plain.pop("tool_calls", [])
        if calls:
            plain["content"] = "\n".join(filter(None, [_text(plain), *map(_call, calls)]))
        is_result = plain["role"] == "tool"
        if is_result:
            plain = {"role": "user", "content": _RESULT.format(_text(plain))}
        if (
            said
            and said[-1]["role"] == plain["role"] == "user"
            and (is_result or "</tool_response>" in _text(said[-1]))
        ):
            said[-1] = {**said[-1], "content": f"{_text(said[-1])}\n{_text(plain)}"}
        else:
            said.append(plain)
    head = _HEAD.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    role = "system" if in_system else "user"
    place = next((index for index, message in enumerate(said) if message["role"] == role), None)
    if in_system and place != 0:
        return [{"role": "system", "content": head}, *said]
    if place is None:
        return [{"role": "user", "content": head}, *said]
    content = said[place]["content"]
    if isinstance(content, str):
        said[place]["content"] = f"{head}\n\n{content}"
    else:
        said[place]["content"] = [{"type": "text", "text": head}, *content]
    return said


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # a text that is no JSON is shown as it is
            arguments = json.loads(arguments)
    return _CALL.format(json.dumps({"name": function.get("name"), "arguments": arguments}, ensure_ascii=False))


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text", "") for part in content)
