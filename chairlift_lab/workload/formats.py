"""Reads trace files in published formats and in the formats of logs, and writes them in Chairlift's format.

Chairlift's format extends Mooncake's (FAST 2025): JSON lines with ``timestamp`` in ms, ``input_length``,
``output_length`` and ``hash_ids``, and further fields. A file is read line by line, and errors name the line.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from chairlift.base.opening import opened_bytes, opened_text
from chairlift.base.writing import replacing
from chairlift.errors import ConfigError
from chairlift_lab.replay.traced_request import PREFIX_BLOCK, TracedRequest, check_number
from chairlift_lab.workload.arrivals import AllAtOnce, Arrivals
from chairlift_lab.workload.columns import COLUMN_FORMATS, read_columns, read_pattern
from chairlift_lab.workload.source import Row, TraceSource
from chairlift_lab.workload.texts import DEFAULT_OUTPUT, TEXT_FORMATS, Said, read_texts, text_format_of, text_rows

__all__ = ["FORMATS", "LoadedTexts", "LoadedTrace", "load_texts", "load_trace", "read_trace", "write_trace"]

FORMATS: Final = {
    "chairlift": "JSON lines in Chairlift's format: as mooncake, with more fields",
    "mooncake": "JSON lines with timestamp (ms), input_length, output_length, hash_ids",
    "bailian": "JSON lines of Qwen's service: as mooncake, with seconds, chat_id, parent_chat_id, blocks of 16",
    "azure": "CSV with TIMESTAMP, ContextTokens, GeneratedTokens (2023 and 2024)",
    "burstgpt": "CSV with Timestamp, Request tokens, Response tokens, and in its second release Session ID",
    **TEXT_FORMATS,
}
"""Name of a trace format -> description, for the formats that need no mapping of columns. A file may be compressed with
gzip, or be in Parquet with columns of the same names."""

_OWN_FIELDS: Final = {
    "tenant": "",
    "priority": 0,
    "service_tier": "",
    "ttft_ms": None,
    "tpot_ms": None,
    "deadline_ms": None,
    "cancel_ms": None,
    "gap_ms": None,
    "session": "",
    "turn": 0,
    "tool": "",
    "predicted_tokens": None,
}
"""Name of a field -> default value, for the fields that have the same name in a file and in TracedRequest."""
_BAILIAN_BLOCK: Final = 16
_WHOLE_MS: Final = re.compile(r'"timestamp": *[0-9]+ *[,}]')
"""Matches a time of Mooncake's format, which is a whole number. Times in Chairlift's format have a fraction."""


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedTrace:
    """A trace that was read from a file."""

    requests: list[TracedRequest]
    """Requests in order of arrival. The first request arrives at 0."""
    format: str
    """Format of the file: a key of :data:`FORMATS`, or ``columns`` or ``pattern``."""
    notes: list[str]
    """Messages for the user about parts of the trace that were skipped or estimated."""


def read_trace(path: Path, **how: Any) -> list[TracedRequest]:
    """Read the requests of a trace file, in order of arrival. ``how`` has the keyword arguments of
    :func:`load_trace`."""
    return load_trace(path, **how).requests


def load_trace(
    path: Path,
    *,
    format: str | None = None,
    columns: Mapping[str, str] | None = None,
    pattern: str | None = None,
    arrivals: Arrivals | None = None,
    tokenizer: Callable[[str], int] | None = None,
    sort: bool = False,
    seed: int = 0,
) -> LoadedTrace:
    """Read a trace file. Raises ConfigError with the line number for an invalid line.

    Args:
        path: The file.
        format: A key of :data:`FORMATS`. By default the first line of the file determines the format.
        columns: Field -> column of a CSV, TSV or JSON-lines log; see
            :func:`~chairlift_lab.workload.columns.read_columns`.
        pattern: Regular expression that finds the fields in the lines of a text log.
        arrivals: Arrival times of the requests of a file with texts. By default all arrive at once.
        tokenizer: Function that counts the tokens of a text, for a file with texts.
        sort: Whether the lines may be in any order of time. Otherwise a decreasing time is an error.
        seed: Seed of ``arrivals``.
    """
    if format is not None and format not in FORMATS:
        raise ConfigError(f"format must be one of {', '.join(FORMATS)}; got {format!r}")
    if sum(way is not None for way in (format, columns, pattern)) > 1:
        raise ConfigError("format, columns and pattern are three ways to read a trace; give only one")
    try:
        with opened_text(path) as file:
            source = TraceSource(path, file)
            if columns is not None or pattern is not None:
                format = "pattern" if columns is None else "columns"
            elif format is None:
                format = _guess(source)
            if format not in TEXT_FORMATS and (arrivals is not None or tokenizer is not None):
                raise ConfigError(
                    f"{path} has times and lengths; arrivals and a tokenizer are only for files of texts, which have"
                    " no times and lengths"
                )
            if pattern is not None:
                rows = read_pattern(source, pattern)
            elif format in ("chairlift", "mooncake", "bailian"):
                rows = _read_jsonl(source, bailian=format == "bailian")
            elif format in TEXT_FORMATS:
                rows = text_rows(source, format, arrivals or AllAtOnce(), tokenizer, seed)
            else:
                rows = read_columns(source, COLUMN_FORMATS[format] if columns is None else columns)
            requests = _requests(path, rows, sort)
    except UnicodeDecodeError:
        raise ConfigError(f"{_line_that_is_no_text(path)} is not text in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror or error}") from None
    notes = _notes(source, estimated=format in TEXT_FORMATS and tokenizer is None)
    if not requests:
        raise ConfigError(f"the trace {path} has no requests" + "".join(f"; {note}" for note in notes[:1]))
    return LoadedTrace(requests, format, notes)


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedTexts:
    """A data set that was read from a file: requests in order of arrival, and the content of each request."""

    requests: list[TracedRequest]
    said: list[Said]
    format: str
    """Format of the file: a key of :data:`TEXT_FORMATS`."""
    notes: list[str]


def load_texts(path: Path, arrivals: Arrivals, seed: int = 0) -> LoadedTexts:
    """Read a data set with its texts. The first line of the file determines which of :data:`TEXT_FORMATS` it has.

    ``arrivals`` and ``seed`` give the arrival times of the requests. Raises ConfigError with the line number for an
    invalid line.
    """
    try:
        with opened_text(path) as file:
            source = TraceSource(path, file)
            format = text_format_of(source.peek().strip())
            if format is None:
                raise ConfigError(
                    f"{path} has no texts to send: its format must be one of {', '.join(TEXT_FORMATS)}; give a trace"
                    " of lengths and times with --trace"
                )
            found = list(read_texts(source, format, arrivals, None, seed))
            requests = _requests(path, [row for row, _ in found], False)
    except UnicodeDecodeError:
        raise ConfigError(f"{_line_that_is_no_text(path)} is not text in UTF-8") from None
    except OSError as error:
        raise ConfigError(f"cannot read the data set {path}: {error.strerror or error}") from None
    notes = _notes(source, estimated=False)
    if unsaid := sum(said.unsaid for _, said in found):
        notes.append(f"{unsaid:,} requests do not say how long their answer is: the limit is {DEFAULT_OUTPUT} tokens")
    if not requests:
        raise ConfigError(f"the data set {path} has no requests" + "".join(f"; {note}" for note in notes[:1]))
    return LoadedTexts(requests, [said for _, said in found], format, notes)


def _notes(source: TraceSource, *, estimated: bool) -> list[str]:
    notes = [f"{reason}, left out: {count:,}" for reason, count in source.left_out.items()]
    if source.images:
        notes.append(f"images in prompts: {source.images:,}; their tokens are not counted in the lengths")
    if estimated:
        notes.append("lengths are estimated, at 4 characters per token; a tokenizer would count them")
    return notes


def write_trace(path: Path, requests: Iterable[TracedRequest]) -> None:
    """Write JSON lines that :func:`read_trace` can read. Fields with their default are left out; times are rounded to 1
    us.

    An existing file is replaced only after the whole trace is written. Raises OSError.
    """
    with replacing(path) as file:
        file.writelines(map(_line, requests))


def _line(request: TracedRequest) -> str:
    fields: dict[str, Any] = {
        "timestamp": round(float(request.arrival) * 1000, 3),
        "input_length": request.prompt_tokens,
        "output_length": request.output_tokens,
    }
    for name, absent in _OWN_FIELDS.items():
        value = getattr(request, name)
        if value != absent:
            fields[name] = value
    if request.prefix_ids:
        fields["hash_ids"] = list(request.prefix_ids)
    if request.prefix_block != PREFIX_BLOCK:
        fields["block_size"] = request.prefix_block
    return json.dumps(fields) + "\n"


# --- read ------------------------------------------------------------------------------------------------------------


def _guess(source: TraceSource) -> str:
    head = source.peek().strip()
    if (texts := text_format_of(head)) is not None:
        return texts
    if head.startswith("{") and '"input_length"' not in head:  # a row of a Parquet file
        for format, columns in COLUMN_FORMATS.items():
            if f'"{columns["input"]}"' in head:
                return format
    if head.startswith("{"):
        if '"parent_chat_id"' in head:
            return "bailian"
        more = any(f'"{name}"' in head for name in (*_OWN_FIELDS, "block_size"))
        return "mooncake" if '"hash_ids"' in head and _WHOLE_MS.search(head) and not more else "chairlift"
    for format, columns in COLUMN_FORMATS.items():
        if columns["input"] in head:
            return format
    if not head:
        raise ConfigError(f"the trace {source.path} is empty")
    raise ConfigError(
        f"cannot tell from its first line what {source.path} is: {head:.80}; known formats are {', '.join(FORMATS)};"
        " for a log of your own say --columns time=NAME,input=NAME,output=NAME, or --pattern"
    )


def _read_jsonl(source: TraceSource, bailian: bool) -> Iterator[Row]:
    chats: dict[Any, tuple[str, int]] = {}
    for line in source:
        if line.isspace():
            continue
        fields = source.object(line)
        for name in ("timestamp", "input_length", "output_length"):
            if name not in fields:
                raise ConfigError(
                    f"{source.where} has no {name!r}; if it is called something else, say --columns"
                    " time=NAME,input=NAME,output=NAME"
                )
        own = {name: value for name, value in fields.items() if name in _OWN_FIELDS and value is not None}
        time = fields["timestamp"]
        hash_ids = fields["hash_ids"] if fields.get("hash_ids") is not None else []
        if not isinstance(hash_ids, list):
            raise ConfigError(f"{source.where}: hash_ids must be a list, got {hash_ids!r:.40}")
        if hash_ids:
            own["prefix_ids"] = tuple(hash_ids)
        if fields.get("block_size") is not None:
            own["prefix_block"] = fields["block_size"]
        if bailian:
            own = {"session": "", "prefix_ids": tuple(hash_ids), "prefix_block": _BAILIAN_BLOCK}
            own["session"], own["turn"] = _place_in_chat(source, chats, fields)
        try:
            check_number("timestamp", time, (int, float), 0, 1e15)
        except ConfigError as error:
            raise ConfigError(f"{source.where}: {error}") from None
        yield source.number, time if bailian else time / 1000, fields["input_length"], fields["output_length"], own


def _place_in_chat(source: TraceSource, chats: dict[Any, tuple[str, int]], fields: dict[str, Any]) -> tuple[str, int]:
    """(session, turn) of a request in Qwen's format, in which a request names its previous request, not its chat.

    The first request that names a previous request continues the session of that request. A second request that names
    the same previous request is a branch: it begins a session of its own, and shares the earlier text by prefix ids.
    """
    name = fields.get("chat_id")
    parent = fields.get("parent_chat_id")
    if type(name) not in (int, str) or type(parent) not in (int, str):
        raise ConfigError(f"{source.where}: chat_id and parent_chat_id must be numbers or text")
    before = chats.get(parent)
    if before is None:
        chats[name] = (str(name), 0)
    else:
        # The tuple marks a request that was continued already. No file can contain this key, because the names in a
        # file are numbers or texts.
        branched = ("", parent) in chats
        chats["", parent] = before
        chats[name] = (str(name) if branched else before[0], before[1] + 1)
    return chats[name]


def _requests(path: Path, rows: Iterable[Row], sort: bool) -> list[TracedRequest]:
    requests: list[TracedRequest] = []
    turns: dict[str, int] = {}
    first = last = None
    for number, time, prompt, output, own in sorted(rows, key=itemgetter(1)) if sort else rows:
        if first is None or last is None:
            first = last = time
        if time < last:
            raise ConfigError(
                f"line {number} of {path} is {last - time:,.3f} s earlier than the line above it; --sort accepts lines"
                " in any order"
            )
        last = time
        session = own.get("session")
        if isinstance(session, str) and "turn" not in own:
            own["turn"] = turns.get(session, -1) + 1
        try:
            arrival = round(time - first, 6)  # drop rounding noise: a copied trace stays equal
            request = TracedRequest(arrival=arrival, prompt_tokens=prompt, output_tokens=output, **own)
        except ConfigError as error:
            raise ConfigError(f"line {number} of {path}: {error}") from None
        if request.session:
            before = turns.get(request.session, -1)
            if request.turn <= before:
                raise ConfigError(
                    f"line {number} of {path}: turn {request.turn} of session {request.session!r:.40} comes after turn"
                    f" {before}; turns must be in order"
                )
            turns[request.session] = request.turn
        requests.append(request)
    return requests


def _line_that_is_no_text(path: Path) -> str:
    """``line N of PATH`` for the first line that is not UTF-8. Only the path if the file cannot be read again."""
    if path.is_file():
        with opened_bytes(path) as file:
            for number, line in enumerate(file, 1):
                try:
                    line.decode()
                except UnicodeDecodeError:
                    return f"line {number} of {path}"
    return str(path)
