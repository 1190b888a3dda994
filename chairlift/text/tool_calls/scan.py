"""Scanner for text that arrives in pieces. Its generators wait for more text when they need it for a decision.

Every decision depends only on the text, never on how the text was divided into pieces.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Generator, Sequence
from typing import Final, TypeVar

from chairlift.text.tool_calls.values import JsonScanner, NotReadable

__all__ = ["CUT_OFF", "CodeBlocks", "Markers", "Reading", "TextScanner", "markers_of"]

_T = TypeVar("_T")
Reading = Generator[None, None, _T]
"""A generator that yields whenever it must wait: for more text, or for the end of the text."""

CUT_OFF: Final = "the answer ends inside the call"
_SPACE: Final = re.compile(r"[ \t\r\n]+")


class Markers:
    """A set of texts to search for. The search is prepared once per set, because a model may have a thousand special
    tokens."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._pattern = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True)))) if texts else None
        self._beginnings = frozenset(text[:size] for text in texts for size in range(1, len(text)))
        self._longest = max(map(len, self._beginnings), default=0)

    def find(self, text: str, at: int) -> tuple[int, str]:
        """(offset, text) of the first marker. If there is none, the text is empty, and the offset is the first
        position at which an incomplete marker may begin."""
        places = range(max(at, len(text) - self._longest), len(text))
        pending = next((start for start in places if text[start:] in self._beginnings), len(text))
        found = None if self._pattern is None else self._pattern.search(text, at)
        return (found.start(), found[0]) if found is not None and found.start() <= pending else (pending, "")


@functools.lru_cache(maxsize=256)
def markers_of(texts: tuple[str, ...]) -> Markers:
    """:class:`Markers` for these texts, cached."""
    return Markers(texts)


class TextScanner:
    """A text, the current position in it, and a copy of the call that is being read."""

    def __init__(self) -> None:
        self.rest = ""
        self.at = 0
        self.ended = False
        self.num_bytes = 0
        """Number of UTF-8 bytes that have been read."""
        self.record: list[str] | None = None
        """Everything that was read since the beginning of a call; None outside a call."""

    def add(self, text: str) -> None:
        """Append text."""
        self.rest = self.rest[self.at :] + text
        self.at = 0

    def advance(self, to: int) -> str:
        """Read up to the offset ``to`` in ``rest``, and return the text that was read."""
        text = self.rest[self.at : to]
        self.at = to
        self.num_bytes += len(text.encode("utf-8", "replace"))
        if self.record is not None:
            self.record.append(text)
        return text

    def take_record(self) -> str:
        """End the record of a call, and return its text."""
        text = "".join(self.record or ())
        self.record = None
        return text

    def more(self) -> Reading[bool]:
        """Wait for more text. Returns False at the end of the text."""
        if self.ended:
            return False
        yield
        return True

    def wait(self) -> Reading[None]:
        """Wait for the end of the text without reading it."""
        pieces = [self.rest[self.at :]]
        self.at = len(self.rest)
        while (yield from self.more()):
            pieces.append(self.rest[self.at :])
            self.at = len(self.rest)
        self.rest = "".join(pieces)
        self.at = 0

    def skip_space(self) -> Reading[bool]:
        """Read white space. Returns False if the text ends after the white space."""
        while True:
            if (space := _SPACE.match(self.rest, self.at)) is not None:
                self.advance(space.end())
            if self.at < len(self.rest):
                return True
            if not (yield from self.more()):
                return False

    def peek(self, markers: Sequence[str]) -> Reading[str]:
        """The marker at the current position, without reading it; empty if there is none. No marker may be the
        beginning of another marker."""
        longest = max(map(len, markers))
        while True:
            view = self.rest[self.at : self.at + longest]
            for marker in markers:
                if view.startswith(marker):
                    return marker
            if not any(marker.startswith(view) for marker in markers) or not (yield from self.more()):
                return ""

    def take(self, markers: Sequence[str]) -> Reading[str]:
        """Read the marker at the current position and return it; empty if there is none."""
        marker = yield from self.peek(markers)
        self.advance(self.at + len(marker))
        return marker

    def until(self, texts: tuple[str, ...]) -> Reading[str]:
        """Text before the first of ``texts`` that occurs. This marker is read, too. Raises NotReadable at the end of
        the text."""
        markers = markers_of(texts)
        pieces = []
        while True:
            place, found = markers.find(self.rest, self.at)
            pieces.append(self.advance(place))
            if found:
                self.advance(place + len(found))
                return "".join(pieces)
            if not (yield from self.more()):
                self.advance(len(self.rest))
                raise NotReadable(CUT_OFF)

    def word(self, texts: tuple[str, ...], keep: Sequence[str] = (), max_chars: int = 192) -> Reading[tuple[str, str]]:
        """(text before a marker, marker), for the first of ``texts`` that occurs. The marker is read, except if it is
        in ``keep``. Raises NotReadable at a line break, or if the text before the marker has more than ``max_chars``
        characters."""
        markers = markers_of(texts)
        text = ""
        while True:
            remaining = self.at + max_chars - len(text)
            end, found = markers.find(self.rest, self.at)
            line = self.rest.find("\n", self.at, min(end, remaining))
            if line >= 0 or end > remaining:
                self.advance(line if line >= 0 else remaining)
                raise NotReadable("no name follows the marker")
            text += self.advance(end)
            if found:
                self.advance(end + (0 if found in keep else len(found)))
                return text, found
            if not (yield from self.more()):
                self.advance(len(self.rest))
                raise NotReadable(CUT_OFF)

    def json(self) -> Reading[str]:
        """Text of a JSON object or list. Raises NotReadable for anything else."""
        scanner = JsonScanner()
        pieces = []
        while True:
            pieces.append(self.advance(scanner.feed(self.rest, self.at)))
            if scanner.done:
                return "".join(pieces)
            if scanner.fault:
                raise NotReadable(scanner.fault)
            if not (yield from self.more()):
                raise NotReadable(CUT_OFF)

    def flow(self, markers: Markers) -> Reading[tuple[str, str]]:
        """(text, marker): text that cannot belong to a marker, and the marker that follows it, if any. Both are empty
        at the end of the text."""
        while True:
            place, found = markers.find(self.rest, self.at)
            if found or place > self.at:
                text = self.advance(place)
                self.advance(place + len(found))
                return text, found
            if not (yield from self.more()):
                return self.advance(len(self.rest)), ""


class CodeBlocks:
    """Finds out whether a position in Markdown text is inside a fenced code block or inline code."""

    _FENCE: Final = re.compile(r" {0,3}(`{3,}|~{3,})")

    def __init__(self) -> None:
        self._open = ""
        self._head = ""
        """The beginning of the current line, because a fence can only be there."""
        self._ticks = 0
        self._in_block = 0
        self._in_line = 0
        """Number of calls in the open block, and in the open code of the current line."""
        self._num_unclosed = 0

    def note_call(self) -> None:
        """Note that a call begins at the current position, inside code."""
        if self._open or self._fence() is not None:
            self._in_block += 1
        else:
            self._in_line += 1

    @property
    def num_unclosed(self) -> int:
        """Number of noted calls in code that has no end, if the text ends here."""
        in_line = self._in_line if self._ticks % 2 else 0
        return self._num_unclosed + in_line + self._in_block

    def feed(self, text: str) -> None:
        """Process further text."""
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
            self._in_block = 0
        elif self._in_line and self._ticks % 2:
            self._num_unclosed += self._in_line
        self._in_line = 0
        self._head = ""
        self._ticks = 0
