"""Scanner for text that arrives in pieces. Its generators wait for more text where a decision needs it.

Every decision depends on the text alone, never on how it was divided into pieces.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Generator, Sequence
from typing import Final, TypeVar

from chairlift.tool_calls.values import JsonScanner, NotReadable

__all__ = ["CUT_OFF", "CodeBlocks", "Markers", "Reading", "TextScanner", "markers_of"]

_T = TypeVar("_T")
Reading = Generator[None, None, _T]
"""A generator that yields where it needs more text, or the signal that the text has ended."""

CUT_OFF: Final = "the answer ends inside the call"
_SPACE: Final = re.compile(r"[ \t\r\n]+")


class Markers:
    """Texts to search for. A set of them is prepared once, because a model may have a thousand special tokens."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._pattern = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True)))) if texts else None
        self._beginnings = frozenset(text[:size] for text in texts for size in range(1, len(text)))
        self._longest = max(map(len, self._beginnings), default=0)

    def find(self, text: str, at: int) -> tuple[int, str]:
        """(offset, text) of the first marker. Without one: the offset where the end of the text may be the beginning of
        a marker, and an empty text."""
        places = range(max(at, len(text) - self._longest), len(text))
        held = next((start for start in places if text[start:] in self._beginnings), len(text))
        found = None if self._pattern is None else self._pattern.search(text, at)
        return (found.start(), found[0]) if found is not None and found.start() <= held else (held, "")


@functools.lru_cache(maxsize=256)
def markers_of(texts: tuple[str, ...]) -> Markers:
    """The prepared markers of these texts."""
    return Markers(texts)


class TextScanner:
    """A text, the position in it, and a record of the call that is being read."""

    def __init__(self) -> None:
        self.rest = ""
        self.at = 0
        self.ended = False
        self.num_bytes = 0
        """UTF-8 bytes that were read."""
        self.record: list[str] | None = None
        """Everything read since a call began."""

    def add(self, text: str) -> None:
        """Add text."""
        self.rest = self.rest[self.at :] + text
        self.at = 0

    def advance(self, to: int) -> str:
        """Read up to an offset in ``rest``."""
        text = self.rest[self.at : to]
        self.at = to
        self.num_bytes += len(text.encode("utf-8", "replace"))
        if self.record is not None:
            self.record.append(text)
        return text

    def take_record(self) -> str:
        """End the recording, and return the recorded text."""
        text = "".join(self.record or ())
        self.record = None
        return text

    def more(self) -> Reading[bool]:
        """Wait for text. False at the end of the text."""
        if self.ended:
            return False
        yield
        return True

    def skip_space(self) -> Reading[bool]:
        """Read white space. False if the text ends after it."""
        while True:
            if (space := _SPACE.match(self.rest, self.at)) is not None:
                self.advance(space.end())
            if self.at < len(self.rest):
                return True
            if not (yield from self.more()):
                return False

    def peek(self, markers: Sequence[str]) -> Reading[str]:
        """The next marker, without reading it; empty if there is none. No marker may be the beginning of another."""
        longest = max(map(len, markers))
        while True:
            view = self.rest[self.at : self.at + longest]
            for marker in markers:
                if view.startswith(marker):
                    return marker
            if not any(marker.startswith(view) for marker in markers) or not (yield from self.more()):
                return ""

    def take(self, markers: Sequence[str]) -> Reading[str]:
        """Read the next marker and return it; empty if there is none."""
        marker = yield from self.peek(markers)
        self.advance(self.at + len(marker))
        return marker

    def until(self, texts: tuple[str, ...]) -> Reading[str]:
        """Text before the first marker, which is read too. Raises NotReadable at the end of the text."""
        markers, pieces = markers_of(texts), []
        while True:
            place, found = markers.find(self.rest, self.at)
            pieces.append(self.advance(place))
            if found:
                self.advance(place + len(found))
                return "".join(pieces)
            if not (yield from self.more()):
                self.advance(len(self.rest))
                raise NotReadable(CUT_OFF)

    def word(self, texts: tuple[str, ...], keep: Sequence[str] = (), most: int = 128) -> Reading[tuple[str, str]]:
        """(text before the first marker, marker). The marker is read unless it is in ``keep``. Raises NotReadable after
        ``most`` characters or a line break."""
        markers, text = markers_of(texts), ""
        while True:
            left = self.at + most - len(text)
            end, found = markers.find(self.rest, self.at)
            line = self.rest.find("\n", self.at, min(end, left))
            if line >= 0 or end > left:
                self.advance(line if line >= 0 else left)
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
        scanner, pieces = JsonScanner(), []
        while True:
            pieces.append(self.advance(scanner.feed(self.rest, self.at)))
            if scanner.done:
                return "".join(pieces)
            if scanner.fault:
                raise NotReadable(scanner.fault)
            if not (yield from self.more()):
                raise NotReadable(CUT_OFF)

    def flow(self, markers: Markers) -> Reading[tuple[str, str]]:
        """(text that certainly comes before any marker, marker if it follows at once). Both are empty at the end of the
        text."""
        while True:
            place, found = markers.find(self.rest, self.at)
            if found or place > self.at:
                text = self.advance(place)
                self.advance(place + len(found))
                return text, found
            if not (yield from self.more()):
                return self.advance(len(self.rest)), ""


class CodeBlocks:
    """Tells whether a place in Markdown is inside a fenced code block, or in inline code."""

    _FENCE: Final = re.compile(r" {0,3}(`{3,}|~{3,})")

    def __init__(self) -> None:
        self._open = ""
        self._head = ""
        """Beginning of the line; a fence can only be there."""
        self._ticks = 0

    def feed(self, text: str) -> None:
        """Advance by this text."""
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
