"""Events of reading generated text: pieces of content and reasoning, tool calls, and calls that are not valid."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from chairlift.base.json_text import json_text

__all__ = [
    *("CONTENT", "INPUT", "REASONING"),
    *("Answer", "Broken", "Call", "CallBegun", "CallEnded", "CallPiece", "Event", "Piece", "joined"),
]

INPUT: Final = "input"
"""Name of the argument of a custom tool in the prompt."""

CONTENT: Final = "content"
REASONING: Final = "reasoning"
"""Kinds of text of a :class:`Piece`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A piece of text of the kind ``content`` or ``reasoning``."""

    kind: str
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A tool call. ``arguments`` is a JSON object as text. ``id`` is empty if the model wrote no id. ``text`` is the
    input of a custom tool; None for a function. If ``is_cut``, the output ends inside the call, and ``arguments`` and
    ``text`` have what was written until then."""

    name: str
    arguments: str
    id: str = ""
    text: str | None = None
    is_cut: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool call begins, and is never taken back. Its :class:`CallPiece` events and its :class:`CallEnded` follow,
    with no event of another call or text between them. ``id`` is empty if the model wrote no id."""

    name: str
    id: str = ""
    is_custom: bool = False
    """Whether the tool is a custom tool. The pieces are then its input; otherwise they are JSON text."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallPiece:
    """Further text of the arguments of a call, or of the input of a custom tool."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallEnded:
    """End of a call. If ``is_cut``, the output ends inside the call."""

    is_cut: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Broken:
    """The fault of a call: the reason why text that began like a call was returned as text, or why a call that has
    begun is not whole."""

    reason: str


Event = Piece | CallBegun | CallPiece | CallEnded | Broken


def joined(events: Sequence[Event]) -> list[Event]:
    """The events, with adjacent pieces of the same kind as one piece."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, Piece) and isinstance(last, Piece) and event.kind == last.kind:
            result[-1] = Piece(event.kind, last.text + event.text)
        elif isinstance(event, CallPiece) and isinstance(last, CallPiece):
            result[-1] = CallPiece(last.text + event.text)
        else:
            result.append(event)
    return result


@dataclasses.dataclass(slots=True)
class Answer:
    """The content, the reasoning and the tool calls that were read from one output."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = dataclasses.field(default_factory=list)
    broken: list[str] = dataclasses.field(default_factory=list)
    """One reason for each text that began like a call but was not valid, and for each call that is not whole."""
    _begun: CallBegun | None = dataclasses.field(default=None, repr=False)
    _pieces: list[str] = dataclasses.field(default_factory=list, repr=False)

    def add(self, events: Sequence[Event]) -> None:
        """Add the events that a reader returned."""
        for event in events:
            if isinstance(event, CallBegun):
                self._begun = event
                self._pieces = []
            elif isinstance(event, CallPiece):
                self._pieces.append(event.text)
            elif isinstance(event, CallEnded):
                self._end_call(event.is_cut)
            elif isinstance(event, Broken):
                self.broken.append(event.reason)
            elif event.kind == REASONING:
                self.reasoning += event.text
            else:
                self.content += event.text

    def _end_call(self, is_cut: bool) -> None:
        begun = self._begun
        if begun is None:
            return
        written = "".join(self._pieces)
        self._begun = None
        self._pieces = []
        if begun.is_custom:
            self.calls.append(Call(begun.name, json_text({INPUT: written}), begun.id, written, is_cut))
        else:
            self.calls.append(Call(begun.name, written, begun.id, None, is_cut))
