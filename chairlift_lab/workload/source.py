"""Helpers for readers of trace files: numbered lines of bounded length, and times in the formats of logs."""

from __future__ import annotations

import collections
import datetime
import functools
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TextIO, TypeAlias

from chairlift.errors import ConfigError

__all__ = ["TIME_FORMS", "Row", "TraceSource", "parse_time"]

Row: TypeAlias = tuple[int, float, int, int, dict[str, Any]]
"""A request in a trace file: (line number, arrival in seconds from any start, prompt tokens, output tokens, other
fields of a TracedRequest)."""

TIME_FORMS: Final = "seconds, epoch seconds or ms, ISO 8601, 10/Oct/2023:13:55:36 +0000, or 10-31 13:55:36"
"""Time formats that :func:`parse_time` accepts, for error messages."""

_LONGEST_LINE: Final = 1 << 24
_MONTHS: Final = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
_ACCESS_LOG: Final = re.compile(r"\[?(\d\d?/[A-Z][a-z]{2}/\d{4}):(\d\d):(\d\d):(\d\d)(?: ([+-])(\d\d)(\d\d))?\]?")
_NO_YEAR: Final = re.compile(r"(\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?)")
_MAX_SECONDS: Final = 1e11
"""Maximum number that is read as seconds since 1970 (the year 5138). Larger numbers are in ms or a smaller unit."""


class TraceSource:
    """Iterator over the lines of an open file that counts the lines. :attr:`where` is used in error messages."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self.path = path
        self.number = 0
        """Number of the line that was read last. The first line has number 1."""
        self.left_out: collections.Counter[str] = collections.Counter()
        """Reason -> number of lines or requests that were skipped for this reason."""
        self.images = 0
        """Number of images in all prompts. The prompt lengths do not include the tokens of images."""
        self._file = file
        self._ahead: list[str] = []

    @property
    def where(self) -> str:
        return f"line {self.number} of {self.path}"

    def peek(self) -> str:
        """The first line that is not blank, or its beginning if the line is too long. The line is not consumed."""
        while piece := self._file.readline(_LONGEST_LINE):
            self._ahead.append(piece)
            if not piece.isspace():
                return piece
        return ""

    def pieces(self) -> Iterator[str]:
        """The whole text in pieces of limited size, for files that are not organised in lines."""
        return itertools.chain(self._ahead, iter(lambda: self._file.read(_LONGEST_LINE // 16), ""))

    def __iter__(self) -> Iterator[str]:
        """The lines with their line ends. Raises ConfigError for a line that is too long."""
        for line in itertools.chain(self._ahead, iter(lambda: self._file.readline(_LONGEST_LINE), "")):
            self.number += 1
            if len(line) == _LONGEST_LINE:
                raise ConfigError(f"{self.where} has more than {_LONGEST_LINE:,} characters; is it a trace?")
            yield line

    def object(self, line: str) -> dict[str, Any]:
        """Parse a line as a JSON object. Raises ConfigError when the line is not a JSON object."""
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            raise ConfigError(f"{self.where} is not valid JSON") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"{self.where} must be a JSON object, got {line.strip():.40}")
        return fields


def parse_time(value: Any) -> float:
    """Convert a time to seconds: since 1970, or since the start of the trace if the file counts from there.

    A time without a time zone is read as UTC. Logs of Python and vLLM omit the year (``10-31 13:55:36``); the year 2024
    is used, because it has a 29th of February. Raises ValueError for an invalid time.
    """
    if isinstance(value, str):
        text = value.strip()
        if text[4:5] == "-":  # an ISO date: skipping float() saves time in traces with a million lines
            return _parse_text(text)
        try:
            value = float(text)
        except ValueError:
            return _parse_text(text)
    if type(value) not in (int, float) or not 0 <= value <= 1e300:
        raise ValueError(f"no time: {value!r:.40}")
    seconds = float(value)
    while seconds > _MAX_SECONDS:
        seconds /= 1000
    return seconds


def _parse_text(text: str) -> float:
    if "/" in text and (found := _ACCESS_LOG.fullmatch(text)):
        date, hours, minutes, seconds, sign, zone_hours, zone_minutes = found.groups()
        east = 0
        if sign is not None:
            east = (int(zone_hours) * 60 + int(zone_minutes)) * 60
        if sign == "-":
            east = -east
        return _midnight(date) + int(hours) * 3600 + int(minutes) * 60 + int(seconds) - east
    if text[2:3] == "-" and (found := _NO_YEAR.fullmatch(text)):
        text = f"2024-{found[1]}"
    when = datetime.datetime.fromisoformat(text)
    return (when if when.tzinfo else when.replace(tzinfo=datetime.UTC)).timestamp()


@functools.lru_cache(maxsize=64)
def _midnight(date: str) -> float:
    day, month, year = date.split("/")
    if month not in _MONTHS:
        raise ValueError(f"no month: {month}")
    return datetime.datetime(int(year), _MONTHS.index(month) + 1, int(day), tzinfo=datetime.UTC).timestamp()
