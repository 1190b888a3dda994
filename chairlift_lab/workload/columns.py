"""Reads traces with named or numbered columns: the CSV files of Azure and BurstGPT, and other logs by a mapping.

A mapping names the columns of the time, the prompt's length and the answer's length (``time``, ``input``, ``output``),
and of other fields of a :class:`~chairlift_lab.replay.traced_request.TracedRequest`. Requests with an empty prompt or
answer failed in the recorded system; they are skipped and counted.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from chairlift.errors import ConfigError
from chairlift_lab.workload.source import TIME_FORMS, Row, TraceSource, parse_time

__all__ = ["COLUMN_FORMATS", "FIELDS", "parse_columns", "read_columns", "read_pattern"]

COLUMN_FORMATS: Final[dict[str, dict[str, str]]] = {
    "azure": {"time": "TIMESTAMP", "input": "ContextTokens", "output": "GeneratedTokens"},
    "burstgpt": {
        "time": "Timestamp",
        "input": "Request tokens",
        "output": "Response tokens",
        "session": "Session ID",
    },
}
"""Name of a published trace -> (name of a field -> name of its column). The first release of BurstGPT has no ``Session
ID``."""

_REQUIRED: Final = ("time", "input", "output")
_OPTIONAL_COLUMNS: Final = {"Session ID"}


def parse_columns(text: str) -> dict[str, str]:
    """Parse a mapping such as ``time=TIMESTAMP,input=prompt_tokens,output=3`` into field -> column.

    Raises ConfigError that lists the fields.
    """
    columns: dict[str, str] = {}
    for part in text.split(","):
        field, _, column = (piece.strip() for piece in part.partition("="))
        if not column or field in columns:
            raise ConfigError(f"columns must be FIELD=COLUMN,..., each field once; got {text!r:.200}")
        columns[field] = column
    _check_fields("columns", columns)
    return columns


def read_columns(source: TraceSource, columns: Mapping[str, str]) -> Iterator[Row]:
    """Read the rows of a CSV, TSV or JSON-lines file. ``columns`` maps fields to columns.

    A column is a name, a path in JSON (``usage.prompt_tokens``), or a number from 1 in a file without a header line.
    Raises ConfigError with the line number for an invalid line.
    """
    _check_fields("columns", columns)
    head = source.peek()
    if head.lstrip().startswith("{"):
        records = _json_records(source, columns)
    else:
        records = _csv_records(source, columns, max(",\t;", key=head.count))
    for values in records:
        row = _row(source, values, columns)
        if row is not None:
            yield row


def read_pattern(source: TraceSource, pattern: str) -> Iterator[Row]:
    """Read the rows of a text log. ``pattern`` is a regular expression whose groups are named like the fields.

    The pattern may match anywhere in a line. Lines without a match are skipped. Raises ConfigError with the line number
    for an invalid line.
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"the pattern is not a regular expression: {error}; got {pattern!r:.200}") from None
    names = {name: name for name in expression.groupindex}
    _check_fields("the pattern's groups (?P<FIELD>...)", names)
    first = source.peek()
    matched = 0
    for line in source:
        found = expression.search(line.rstrip("\r\n"))
        if found is None:
            source.left_out["lines that do not match the pattern"] += 1
            continue
        matched += 1
        values = {name: text for name, text in found.groupdict().items() if text is not None}
        row = _row(source, values, names)
        if row is not None:
            yield row
    if first and not matched:
        raise ConfigError(f"no line of {source.path} matches the pattern {pattern!r:.200}; one is {first.strip():.200}")


def _check_fields(what: str, given: Mapping[str, str]) -> None:
    missing = [field for field in _REQUIRED if field not in given]
    unknown = [field for field in given if field not in FIELDS]
    if missing or unknown:
        wrong = f"{unknown[0]!r} is none of them" if unknown else f"{missing[0]!r} is missing"
        others = ", ".join(field for field in FIELDS if field not in _REQUIRED)
        raise ConfigError(f"{what} must name {', '.join(_REQUIRED)} and may name {others}; {wrong}")


# --- records: column values by field ---------------------------------------------------------------------------------


def _csv_records(source: TraceSource, columns: Mapping[str, str], delimiter: str) -> Iterator[dict[str, Any]]:
    reader = csv.reader(source, delimiter=delimiter)
    places: dict[str, int] | None = None
    try:
        for cells in reader:
            if not cells:
                continue
            if places is None:
                places = _places(source, columns, [cell.strip() for cell in cells])
                if not all(column.isdecimal() for column in columns.values()) or not _is_number(cells, places["input"]):
                    continue  # this line is the header
            try:
                yield {field: cells[place] for field, place in places.items()}
            except IndexError:
                field = next(field for field, place in places.items() if place >= len(cells))
                raise ConfigError(f"{source.where} has no {columns[field]!r}: it ends before that column") from None
    except csv.Error as error:
        raise ConfigError(f"{source.where} is not a row of columns: {error}") from None


def _places(source: TraceSource, columns: Mapping[str, str], names: list[str]) -> dict[str, int]:
    """Find the columns of a file. Returns field -> index of its column. Optional columns that the file does not have
    are left out."""
    places = {}
    for field, column in columns.items():
        if column in names:
            places[field] = names.index(column)
        elif column.isdecimal() and 1 <= int(column) <= len(names):
            places[field] = int(column) - 1
        elif column not in _OPTIONAL_COLUMNS:
            raise ConfigError(f"{source.where} has no column {column!r}; it has {', '.join(names):.200}")
    return places


def _is_number(cells: list[str], place: int) -> bool:
    try:
        float(cells[place])
    except ValueError:
        return False
    return True


def _json_records(source: TraceSource, columns: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for line in source:
        if line.isspace():
            continue
        fields = source.object(line)
        values = {}
        for field, column in columns.items():
            value: Any = fields
            for name in [column] if column in fields else column.split("."):
                value = value.get(name) if isinstance(value, dict) else None
            if value is not None:
                values[field] = value
            elif field in _REQUIRED:
                raise ConfigError(f"{source.where} has no {column!r}; it has {', '.join(fields):.200}")
        yield values


# --- values ----------------------------------------------------------------------------------------------------------


def _row(source: TraceSource, values: dict[str, Any], columns: Mapping[str, str]) -> Row | None:
    values_by_field: dict[str, Any] = {}
    for field, value in values.items():
        if field in _REQUIRED or (value != "" and value is not None):
            try:
                values_by_field[field] = FIELDS[field](value)
            except (ValueError, TypeError, OverflowError) as error:
                raise ConfigError(f"{source.where}: {columns[field]} {error}, got {value!r:.60}") from None
    time = values_by_field.pop("time")
    prompt = values_by_field.pop("input")
    output = values_by_field.pop("output")
    if not prompt or not output:
        source.left_out["requests without a prompt or an answer"] += 1
        return None
    return source.number, time, prompt, output, values_by_field


def _time(value: Any) -> float:
    try:
        return parse_time(value)
    except ValueError:
        raise ValueError(f"must be a time ({TIME_FORMS})") from None


def _integer(value: Any) -> int:
    number = value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            number = _number(value)
    if isinstance(number, bool) or not isinstance(number, (int, float)) or number != math.floor(number):
        raise ValueError("must be a whole number")
    return int(number)


def _count(value: Any) -> int:
    number = _integer(value)
    if number < 0:
        raise ValueError("must be 0 or more")
    return number


def _number(value: Any) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (ValueError, TypeError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError("must be a number")
    return number


def _text(value: Any) -> str:
    if isinstance(value, (dict, list)):
        raise ValueError("must be text")
    return str(value)


FIELDS: Final[dict[str, Callable[[Any], Any]]] = {
    "time": _time,
    "input": _count,
    "output": _count,
    "tenant": _text,
    "priority": _integer,
    "service_tier": _text,
    "ttft_ms": _number,
    "tpot_ms": _number,
    "deadline_ms": _number,
    "cancel_ms": _number,
    "gap_ms": _number,
    "session": _text,
    "turn": _count,
    "tool": _text,
    "predicted_tokens": _count,
}
"""Field -> function that converts the text of a column. Raises ValueError for an invalid text."""
