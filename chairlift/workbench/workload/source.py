"""Common parts of all trace files: numbered lines, none of them endless, and times as logs spell them."""

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

__all__ = ["TIME_FORMS", "Row", "Source", "parse_time"]

Row: TypeAlias = tuple[int, float, int, int, dict[str, Any]]
"""(line, seconds on any clock, prompt tokens, output tokens, other fields of a TracedRequest by name)."""

TIME_FORMS: Final = "seconds, epoch seconds or ms, ISO 8601, 10/Oct/2023:13:55:36 +0000, or 10-31 13:55:36"
"""Forms that :func:`parse_time` reads, in words."""

_LONGEST_LINE: Final = 1 << 24
_MONTHS: Final = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
_ACCESS_LOG: Final = re.compile(r"\[?(\d\d?/[A-Z][a-z]{2}/\d{4}):(\d\d):(\d\d):(\d\d)(?: ([+-])(\d\d)(\d\d))?\]?")
_NO_YEAR: Final = re.compile(r"(\d\d-\d\d \d\d:\d\d:\d\d(?:[.,]\d+)?)")
_MOST_SECONDS: Final = 1e11
"""Larger numbers are no seconds since 1970 (this is the year 5138), but ms, or yet smaller units."""


class Source:
    """Lines of an open file with their numbers. Errors name the place as ``where`` and the line."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self.path = path
        self.number = 0
        """Number of the line that was read last, from 1."""
        self.left_out: collections.Counter[str] = collections.Counter()
        """Lines or requests that are no part of the trace, by reason."""
        self.images = 0
        """Number of images in the prompts, where they have any; their tokens are not counted."""
        self._file = file
        self._ahead: list[str] = []

    @property
    def where(self) -> str:
        return f"line {self.number} of {self.path}"

    def peek(self) -> str:
        """The first line that is not blank (its beginning, if it is too long), without consuming it."""
        while piece := self._file.readline(_LONGEST_LINE):
            self._ahead.append(piece)
            if not piece.isspace():
                return piece
        return ""

    def pieces(self) -> Iterator[str]:
        """All of the text, whether or not it has lines."""
        return itertools.chain(self._ahead, iter(lambda: self._file.read(_LONGEST_LINE // 16), ""))

    def __iter__(self) -> Iterator[str]:
        """Lines with their ends. Raises ConfigError for one that is too long."""
        for line in itertools.chain(self._ahead, iter(lambda: self._file.readline(_LONGEST_LINE), "")):
            self.number += 1
            if len(line) == _LONGEST_LINE:
                raise ConfigError(f"{self.where} has more than {_LONGEST_LINE:,} characters; is it a trace?")
            yield line

    def object(self, line: str) -> dict[str, Any]:
        """The JSON object that a line is. Raises ConfigError when it is none."""
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            raise ConfigError(f"{self.where} is not valid JSON") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"{self.where} must be a JSON object, got {line.strip():.40}")
        return fields


def parse_time(value: Any) -> float:
    """Seconds since 1970, or since the start of the trace for small numbers. Raises ValueError for an invalid time.

    Without a time zone it is UTC. Log lines of Python and vLLM have no year (``10-31 13:55:36``): 2024 is used, which
    has a 29th of February.
    """
    if isinstance(value, str):
        text = value.strip()
        if text[4:5] == "-":  # saves the two attempts below where there are a million of them
            return _parse_text(text)
        try:
            value = float(text)
        except ValueError:
            return _parse_text(text)
    if type(value) not in (int, float) or not 0 <= value <= 1e300:
        raise ValueError(f"no time: {value!r:.40}")
    seconds = float(value)
    while seconds > _MOST_SECONDS:
        seconds /= 1000
    return seconds


def _parse_text(text: str) -> float:
    if "/" in text and (found := _ACCESS_LOG.fullmatch(text)):
        date, hours, minutes, seconds, sign, zone_hours, zone_minutes = found.groups()
        east = 0 if sign is None else (int(zone_hours) * 60 + int(zone_minutes)) * (-60 if sign == "-" else 60)
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
