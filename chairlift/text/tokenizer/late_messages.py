"""Rearranges chats whose order a chat template refuses: instructions that come late, and turns that do not alternate.

Agents send instructions in the middle of a conversation, and several messages of the user in a row. Some templates take
instructions only at the beginning (Qwen3.5), and some demand that the user and the assistant alternate (Mistral). A
small test chat, rendered once per template and place, finds out what a template takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

__all__ = ["INSTRUCTIONS", "LateMessages", "Placed"]

INSTRUCTIONS: Final = ("system", "developer")
"""Roles of messages that instruct the model."""
_SEPARATOR: Final = "\n\n"

Placed = tuple[int, Mapping[str, Any]]
"""(index of the message in the caller's list, message)."""
Prints = Callable[[str, str, str], bool]
"""Function (role, neighbour before, neighbour after) -> whether the template prints an instruction at such a place."""


class LateMessages:
    """Moves and joins the messages of a chat for one template.

    ``prints`` tells whether the template prints an instruction between two neighbours. The neighbour before it is a
    role, ``start`` (only other instructions come before) or ``first`` (nothing comes before). The neighbour after it is
    a role or ``end``. ``renders`` tells whether the template renders messages with these roles one after another. Both
    are asked once for each argument.
    """

    def __init__(self, prints: Prints, renders: Callable[[tuple[str, ...]], bool]) -> None:
        self._prints = prints
        self._renders = renders
        self._known: dict[tuple[str, ...], bool] = {}

    def arranged(self, messages: Sequence[Mapping[str, Any]]) -> list[Placed]:
        """The messages in an order that the template takes, each with its index in ``messages``.

        Instructions that the template does not print at their place are added to the first message, in their order. If
        the first message is no instruction, they become one. A message of the user between a call and its result
        follows the result. Then messages of the user in a row are joined, and a message of the user after a tool's
        result is added to the result. Each of these happens only if the template refuses the messages otherwise.
        Nothing is left out.
        """
        placed: list[Placed] = list(enumerate(messages))
        if any(message["role"] in INSTRUCTIONS for message in messages[1:]):
            placed = self._instructions_first(placed)
        return self._alternating(self._results_first(placed))

    def _instructions_first(self, placed: list[Placed]) -> list[Placed]:
        late = [each for each in placed[1:] if each[1]["role"] in INSTRUCTIONS and not self._stays(placed, each[0])]
        if not late:
            return placed
        moved = {at for at, _ in late}
        rest = [each for each in placed if each[0] not in moved]
        at, first = rest[0]
        if first["role"] not in INSTRUCTIONS:
            at, first = late[0]
            rest.insert(0, late.pop(0))
        content = first["content"]
        for _, message in late:
            content = _joined(content, message["content"])
        return [(at, {**first, "content": content}), *rest[1:]]

    def _stays(self, placed: list[Placed], at: int) -> bool:
        others = [(index, message["role"]) for index, message in placed if message["role"] not in INSTRUCTIONS]
        before = next((role for index, role in reversed(others) if index < at), "start")
        after = next((role for index, role in others if index > at), "end")
        key = (placed[at][1]["role"], before, after)
        if key not in self._known:
            first = (key[0], "first", "user")
            if first not in self._known:
                self._known[first] = self._prints(*first)
            # A template that fails at both places fails for another reason, which its own message tells.
            self._known[key] = self._prints(*key) or not self._known[first]
        return self._known[key]

    def _results_first(self, placed: list[Placed]) -> list[Placed]:
        """The messages, with each call followed by its results. Programs warn the model in a message of the user while
        a call still runs."""
        result: list[Placed] = []
        waiting: list[Placed] = []
        for index, each in enumerate(placed):
            role = each[1]["role"]
            if role == "user" and _awaits_result(placed, index) and self._must_wait():
                waiting.append(each)
                continue
            if role != "tool":
                result += waiting
                waiting = []
            result.append(each)
        return result + waiting

    def _must_wait(self) -> bool:
        """Whether the template refuses a message of the user between a call and its result."""
        return not self._takes(("user", "calling", "user", "tool")) and self._takes(("user", "calling", "tool"))

    def _alternating(self, placed: list[Placed]) -> list[Placed]:
        result: list[Placed] = []
        for at, message in placed:
            before = result[-1] if result else None
            if before is not None and message["role"] == "user" and self._must_join(before[1], message):
                result[-1] = (before[0], {**before[1], "content": _joined(before[1]["content"], message["content"])})
            else:
                result.append((at, message))
        return result

    def _must_join(self, before: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
        """Whether the user's ``message`` must be added to the message before it, because the template refuses it."""
        role = before["role"]
        if role == "user":
            return not self._takes(("user", "user")) and self._takes(("user", "assistant", "user"))
        if role != "tool" or "content" not in before or _has_images(message["content"]):
            return False
        calls = ("user", "calling", "tool")
        return not self._takes((*calls, "user")) and self._takes((*calls, "assistant", "user"))

    def _takes(self, roles: tuple[str, ...]) -> bool:
        if roles not in self._known:
            self._known[roles] = self._renders(roles)
        return self._known[roles]


def _awaits_result(placed: Sequence[Placed], index: int) -> bool:
    """Whether a tool's result follows the message of the user at ``index``, perhaps after other messages of the
    user."""
    later = (message["role"] for _, message in placed[index + 1 :])
    return next((role for role in later if role != "user"), "") == "tool"


def _has_images(content: Any) -> bool:
    return not isinstance(content, str) and any(part["type"] == "image" for part in content)


def _joined(first: Any, second: Any) -> Any:
    """Two contents as one: texts with an empty line between them, or a list of all parts."""
    if isinstance(first, str) and isinstance(second, str):
        return first + _SEPARATOR + second
    return [*_parts(first), *_parts(second)]


def _parts(content: Any) -> list[Mapping[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
