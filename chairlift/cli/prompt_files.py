"""Reads files of prompts for ``chairlift generate``: JSON lines in several common forms, and plain text."""

from __future__ import annotations

import codecs
import dataclasses
import difflib
import gzip
import json
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from chairlift.base.opening import opened_text
from chairlift.base.outputs import RequestOutput
from chairlift.base.sampling_params import SamplingParams, is_parameter
from chairlift.errors import ConfigError

__all__ = ["Job", "line_jobs", "read_prompts_file", "text_job"]

_JSON_ENDINGS: Final = {".json", ".jsonl", ".ndjson"}
_FORMS: Final = ("prompt", "messages", "turns")
_PARAMETERS: Final = tuple(SamplingParams.__dataclass_fields__)
_ALIKE: Final = 0.8
"""Minimum similarity (0 to 1) at which an unknown key counts as a misspelt sampling parameter."""
_URLS: Final = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}
_SILENT: Final = frozenset(
    ("model", "user", "metadata", "store", "stream", "stream_options", "service_tier", "safety_identifier")
)
"""Fields of OpenAI's requests that are ignored, because they do not change the output."""


@dataclasses.dataclass(slots=True)
class Job:
    """One prompt, its position in the input, and its result."""

    index: int
    place: str
    """Position of the job in its input, such as ``line 3``, for messages."""
    prompt: Any = None
    id: Any = None
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Sampling parameters of this prompt. They take precedence over the command's."""
    is_chat: bool = False
    turns: list[str] = dataclasses.field(default_factory=list)
    """Later messages of the user in this conversation. Each is sent after the previous answer."""
    answers: list[str] = dataclasses.field(default_factory=list)
    """Texts of the answers to all turns except the last."""
    copied: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Keys of the input that are copied to the output record unchanged."""
    error: str | None = None
    output: RequestOutput | None = None

    @property
    def done(self) -> bool:
        """Whether the job has an error, or an answer to its last turn."""
        return self.error is not None or self.output is not None


def read_prompts_file(name: str, prompt_field: str | None = None) -> list[Job]:
    """Jobs for the prompts of a file, or of standard input (``-``).

    The file has JSON lines or plain text with one prompt per line, both optionally compressed with gzip; or it is
    Parquet. It is read as JSON if its name has a JSON ending or its first line begins with a brace. ``prompt_field``
    names the key of the prompt. Raises ConfigError if the file cannot be read. An error in one line becomes the error
    of its job.
    """
    raw = _content(name)
    lines = _lines(raw)
    if not lines:
        return []
    endings = set(Path(name).suffixes[-2:])
    if prompt_field is None and not endings & _JSON_ENDINGS and lines[0][1].lstrip()[:1] not in (b"{", b"["):
        return [_line_job(index, number, line) for index, (number, line) in enumerate(lines)]
    if lines[0][1].lstrip()[:1] == b"[" and (records := _array(raw)) is not None:
        return [_parse(Job(i, f"record {i + 1}"), record, prompt_field) for i, record in enumerate(records)]
    return [_parse_line(Job(i, f"line {number}"), line, prompt_field) for i, (number, line) in enumerate(lines)]


def line_jobs(name: str) -> list[Job]:
    """Create a job for each line that is not blank. The line is the prompt."""
    return [_line_job(index, number, line) for index, (number, line) in enumerate(_lines(_content(name)))]


def text_job(index: int, place: str, prompt: str) -> Job:
    """A job for a prompt given as text. It gets an error if the text's bytes were not valid UTF-8."""
    return Job(index, place, prompt, error=_not_utf8(prompt) if prompt else "the prompt is empty; write something")


def _content(name: str) -> bytes:
    try:
        raw = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        if raw.startswith(b"\x1f\x8b"):
            return gzip.decompress(raw)
        if raw.startswith(b"PAR1") and name != "-":
            with opened_text(Path(name)) as text:
                return text.read().encode()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ConfigError(f"the prompts file {name} cannot be decompressed ({error}); copy it again") from None
    except OSError as error:
        raise ConfigError(f"cannot read the prompts file {name}: {error.strerror}") from None
    return raw


def _lines(raw: bytes) -> list[tuple[int, bytes]]:
    """(number from 1, bytes) of each line that is not blank. Lines are bytes, so that a line with invalid UTF-8 does
    not make the other lines unreadable."""
    lines = raw.removeprefix(codecs.BOM_UTF8).split(b"\n")
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _line_job(index: int, number: int, line: bytes) -> Job:
    try:
        return text_job(index, f"line {number}", line.decode().rstrip("\r"))
    except UnicodeDecodeError as error:
        problem = f"not UTF-8 text (byte 0x{line[error.start]:02X} at position {error.start}); convert or remove it"
        return Job(index, f"line {number}", line.decode("utf-8", "replace").rstrip("\r"), error=problem)


def _not_utf8(argument: str) -> str | None:
    """Error message for an argument whose bytes are not UTF-8, with the offset of the first invalid byte. None if the
    argument is valid."""
    raw = argument.encode("utf-8", "surrogateescape")
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8 text (byte 0x{raw[error.start]:02X} at position {error.start}); convert or remove it"
    return None


def _array(raw: bytes) -> list[Any] | None:
    """The records of a file that is one JSON array of objects; None for any other file."""
    try:
        records = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return records if isinstance(records, list) and any(isinstance(each, dict) for each in records) else None


def _parse_line(job: Job, line: bytes, prompt_field: str | None) -> Job:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        job.error = f"not valid JSON ({error})"
        return job
    return _parse(job, record, prompt_field)


def _parse(job: Job, record: Any, prompt_field: str | None) -> Job:
    """Fill a job from its record: the prompt in any of the known forms, its sampling parameters, and the keys to copy
    to the output."""
    if not isinstance(record, dict):
        job.error = f"must be an object with {_wanted()}"
        return job
    if prompt_field is None and isinstance(record.get("body"), dict):
        return _parse_batch(job, record)
    given = [name for name in _FORMS if name in record] if prompt_field is None else [prompt_field]
    if len(given) != 1 or given[0] not in record:
        keys = ", ".join(map(str, record))
        hint = f"; or name the key with the prompt: --prompt-field NAME, of {keys:.200}" if record and not given else ""
        expected = _wanted() if prompt_field is None else f"{prompt_field!r}, which --prompt-field names"
        job.error = f"must be an object with {expected}{hint}"
        return job
    job.id = record.pop("id", None)
    _set_prompt(job, given[0], record.pop(given[0]))
    check_spelling = prompt_field is None  # otherwise the records are anybody's, with keys of their own
    known = {key for key in record if is_parameter(key) or (check_spelling and _is_misspelt(key))}
    job.fields = {key: value for key, value in record.items() if key in known}
    job.copied |= {key: value for key, value in record.items() if key not in known}
    return job


def _wanted() -> str:
    return 'either "prompt" (text or token ids), "messages", "turns" (texts), or "body" (OpenAI\'s batches)'


def _is_misspelt(key: str) -> bool:
    return bool(difflib.get_close_matches(key, _PARAMETERS, n=1, cutoff=_ALIKE))


def _set_prompt(job: Job, form: str, value: Any) -> None:
    if form == "turns":
        if not isinstance(value, list) or not value or not all(isinstance(turn, str) and turn for turn in value):
            job.error = f"turns must be a list of texts, and not empty, got {str(value)[:40]!r}"
            return
        job.copied["turns"] = value
        job.turns = value[1:]
        value = [{"role": "user", "content": value[0]}]
    job.prompt = value
    job.is_chat = form in ("messages", "turns") or _are_messages(value)
    if not job.is_chat and (not isinstance(value, (str, list)) or not value):
        job.error = f"{form} must be text or a list of token ids, and not empty, got {str(value)[:40]!r}"


def _response_messages(body: dict[str, Any]) -> list[dict[str, str]] | None:
    """Messages of a body for /v1/responses, whose ``input`` and ``instructions`` are removed. None if the input has
    items other than texts."""
    given = body.pop("input")
    instructions = body.pop("instructions", None)
    messages = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for item in given if isinstance(given, list) and given else [None]:
        if not isinstance(item, Mapping) or item.get("type", "message") != "message":
            return None
        content = item.get("content")
        if isinstance(content, list):
            parts: list[Any] = [part.get("text") if isinstance(part, Mapping) else None for part in content]
            content = "".join(parts) if all(isinstance(part, str) for part in parts) else None
        if not isinstance(content, str) or not isinstance(item.get("role"), str):
            return None
        messages.append({"role": item["role"], "content": content})
    return messages


def _are_messages(value: Any) -> bool:
    return isinstance(value, Sequence) and bool(value) and isinstance(value[0], Mapping)


def _parse_batch(job: Job, record: dict[str, Any]) -> Job:
    """Fill a job from a line of an OpenAI batch file: ``custom_id``, ``url``, and ``body`` with the fields of a
    request."""
    body = dict(record.pop("body"))
    job.id = record.pop("custom_id", None)
    usual = next((url for url, form in _URLS.items() if form in body), "/v1/completions")
    url = record.get("url", usual)
    form = _URLS.get(url) if isinstance(url, str) else None
    if form is None or form not in body:
        wants = f"a body with {form!r}" if form else f"url {' or '.join(_URLS)}"
        job.error = f"must have {wants}, got {str(url)[:60]!r} and a body with {', '.join(body):.100}"
        return job
    if form == "input":
        job.prompt, job.is_chat, job.error = _response_messages(body), True, None
        if job.prompt is None:
            job.error = "body.input has other items than texts; send the file to a server's /v1/batches"
            return job
    else:
        _set_prompt(job, form, body.pop(form))
    job.copied |= record
    ignored = {key: body.pop(key) for key in list(body) if key in _SILENT}
    if ignored:
        job.copied["body"] = ignored
    for theirs in ("max_completion_tokens", "max_output_tokens"):
        if theirs in body:
            body["max_tokens"] = body.pop(theirs)
    if isinstance(body.get("logprobs"), bool):
        top = body.pop("top_logprobs", 0)
        if body.pop("logprobs"):
            body["logprobs"] = top
    strange = next((key for key in body if not is_parameter(key) and not _is_misspelt(key)), None)
    if strange is not None:
        job.error = job.error or f"body.{strange} is not read here; send the file to a server's /v1/batches"
    job.fields = body
    return job
