"""Text that comes in pieces, read by generators that wait for more where a decision needs it.

Every decision depends on the text alone, never on where its pieces were cut.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Generator, Sequence
from typing import Final, TypeVar

from chairlift.tool_calls.values import JsonScanner, NotReadable

__all__ = ["CUT_OFF", "CodeBlocks", "Reading", "TextScanner"]

_T = TypeVar("_T")
Reading = Generator[None, None, _T]
"""Yields where it needs more text, or the word that there is none."""

CUT_OFF: Final = "the answer ends inside the call"
_SPACE: Final = re.compile(r"[ \t\r\n]+")


@functools.lru_cache(maxsize=256)
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(each) for each in sorted(markers, key=len, reverse=True)))


@functools.lru_cache(maxsize=256)
def _beginnings(markers: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """Every text that a marker may go on from, and the length of the longest."""
    found = frozenset(marker[:size] for marker in markers for size in range(1, len(marker)))
    return found, max(map(len, found), default=0)


def _held(text: str, at: int, markers: tuple[str, ...]) -> int:
    """Where the end of a text begins that may be the beginning of a marker."""
    beginnings, longest = _beginnings(markers)
    places = range(max(at, len(text) - longest), len(text))
    return next((start for start in places if text[start:] in beginnings), len(text))


class TextScanner:
    """A text, how far it was read, and what of it belongs to the call that is being read."""

    def __init__(self) -> None:
        self.rest = ""
        self.at = 0
        self.ended = False
        self.num_bytes = 0
        """UTF-8 bytes that were read."""
        self.record: list[str] | None = None
        """Everything read since a call began."""

    def add(self, text: str) -> None:
        """More text has come."""
        self.rest = self.rest[self.at :] + text
        self.at = 0

    def advance(self, to: int) -> str:
        """Read up to a place in ``rest``."""
        text = self.rest[self.at : to]
        self.at = to
        self.num_bytes += len(text.encode("utf-8", "replace"))
        if self.record is not None:
            self.record.append(text)
        return text

    def take_record(self) -> str:
        """What was recorded; nothing is recorded any more."""
        text = "".join(self.record or ())
        self.record = None
        return text

    def more(self) -> Reading[bool]:
        """Wait for text; False when there is no more."""
        if self.ended:
            return False
        yield
        return True

    def skip_space(self) -> Reading[bool]:
        """Read white space; False when the text ends behind it."""
        while True:
            if (space := _SPACE.match(self.rest, self.at)) is not None:
                self.advance(space.end())
            if self.at < len(self.rest):
                return True
            if not (yield from self.more()):
                return False

    def peek(self, markers: Sequence[str]) -> Reading[str]:
        """The marker that comes next, which is not read; empty when none does. None begins with another."""
        longest = max(map(len, markers))
        while True:
            view = self.rest[self.at : self.at + longest]
            for marker in markers:
                if view.startswith(marker):
                    return marker
            if not any(marker.startswith(view) for marker in markers) or not (yield from self.more()):
                return ""

    def take(self, markers: Sequence[str]) -> Reading[str]:
        """The same, and the marker is read."""
        marker = yield from self.peek(markers)
        self.advance(self.at + len(marker))
        return marker

    def until(self, markers: tuple[str, ...], keep: Sequence[str] = ()) -> Reading[str]:
        """The text before the first marker, which is read unless it is one to ``keep``. Raises NotReadable at the end
        of the text."""
        pieces = []
        while True:
            found, held = _pattern(markers).search(self.rest, self.at), _held(self.rest, self.at, markers)
            if found is not None and found.start() <= held:
                pieces.append(self.advance(found.start()))
                self.advance(found.start() if found[0] in keep else found.end())
                return "".join(pieces)
            pieces.append(self.advance(held))
            if not (yield from self.more()):
                self.advance(len(self.rest))
                raise NotReadable(CUT_OFF)

    def word(self, markers: tuple[str, ...], keep: Sequence[str] = (), most: int = 128) -> Reading[tuple[str, str]]:
        """(text, marker) as :meth:`until`, of one line and ``most`` characters. Raises NotReadable for more, where the
        text is too long or has a line break."""
        text = ""
        while True:
            left = self.at + most - len(text)
            found, held = _pattern(markers).search(self.rest, self.at), _held(self.rest, self.at, markers)
            end = found.start() if found is not None and found.start() <= held else held
            line = self.rest.find("\n", self.at, min(end, left))
            if line >= 0 or end > left:
                self.advance(line if line >= 0 else left)
                raise NotReadable("no name follows the marker")
            text += self.advance(end)
            if found is not None and end == found.start():
                if found[0] not in keep:
                    self.advance(found.end())
                return text, found[0]
            if not (yield from self.more()):
                self.advance(len(self.rest))
                raise NotReadable(CUT_OFF)

    def json(self) -> Reading[str]:
        """The text of a JSON object or list. Raises NotReadable where it is none."""
        scanner, pieces = JsonScanner(), []
        while True:
            pieces.append(self.advance(scanner.feed(self.rest, self.at)))
            if scanner.done:
                return "".join(pieces)
            if scanner.fault:
                raise NotReadable(scanner.fault)
            if not (yield from self.more()):
                raise NotReadable(CUT_OFF)

    def flow(self, markers: tuple[str, ...]) -> Reading[tuple[str, str]]:
        """The text that is certain to come before any marker, and the marker where it follows at once. Returns with
        text, a marker, or neither where the text has ended."""
        while True:
            found = _pattern(markers).search(self.rest, self.at) if markers else None
            held = _held(self.rest, self.at, markers)
            if found is not None and found.start() <= held:
                text = self.advance(found.start())
                self.advance(found.end())
                return text, found[0]
            if held > self.at:
                return self.advance(held), ""
            if not (yield from self.more()):
                return self.advance(len(self.rest)), ""


class CodeBlocks:
    """Whether a place in Markdown is inside a code block between fences, or in code within a line."""

    _FENCE: Final = re.compile(r" {0,3}(`{3,}|~{3,})")

    def __init__(self) -> None:
        self._open = ""
        self._head = ""
        """The beginning of the line; a fence is there or nowhere."""
        self._ticks = 0

    def feed(self, text: str) -> None:
        """Go on by this text."""
        lines = text.split("\n")
        for index, line in enumerate(lines):
            if index:
                self._end_line()
            self._head += line[: 64 - len(self._head)]
            self._ticks += line.count("`")

    @property
    def inside(self) -> bool:
        return bool(self._open) or self._fence() is not None or self._ticks % 2 == 1

    def _fence(self) -> re.Match[str] | None:
        found = self._FENCE.match(self._head)
        if found is not None and found[1][0] == "`" and self._ticks > len(found[1]):
            return None
        return found

    def _end_line(self) -> None:
        found = self._fence()
        if found is not None and not self._open:
            self._open = found[1]
        elif found is not None and found[1].startswith(self._open) and not self._head[found.end() :].strip():
            self._open = ""
        self._head, self._ticks = "", 0
