"""Converts a recording of steps to Chrome's trace events, to arrivals for a replay, or to step times for a cost model.

A recording consists of the lines that a :class:`~chairlift.engine.step_recorder.StepRecorder` wrote. Trace events use
the JSON object format of Perfetto and chrome://tracing. They show three "processes": the steps, the rows of the batch
(one "thread" per row), and the queue.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Final

from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.core.scheduler.output import Chunk
from chairlift.engine.step_recorder import FORMAT
from chairlift.errors import ConfigError

__all__ = ["RecordedRequest", "Recording", "read_recording", "to_perfetto"]

_ENGINE = 1
_ROWS = 2
_QUEUE = 3
_SIZES = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size", "block_bytes")
_MAX_SIZE = 1 << 32
_MAX_NAMED_ROWS = 4096
_IMAGES: Final = {
    "image tiles": ("encoded", "given up", "encoded again"),
    "image memory": ("bytes",),
    "image tiles in the queue": ("tiles",),
}
"""Counter of the trace -> its values."""
_Event = dict[str, Any]


@dataclasses.dataclass(slots=True)
class RecordedRequest:
    """One sequence of a recording. Times are seconds on the recording's clock."""

    request_id: str
    arrival: float = 0.0
    prompt_tokens: int = 0
    """Number of prompt tokens; 0 if the request came before the recording began and only its rows are known."""
    service_class: str = "default"
    cached_tokens: int = 0
    output_tokens: int = 0
    """Number of generated tokens at the request's end, or at the end of the recording."""
    started: float | None = None
    first: float | None = None
    """Time of the request's first token; None if the token is not in the recording."""
    ended: float | None = None
    reason: str = ""


@dataclasses.dataclass(slots=True)
class Recording:
    """The contents of a recording."""

    about: dict[str, Any]
    """Sizes and settings of the recorded engine, from the first line of the recording."""
    lines: list[dict[str, Any]]
    requests: dict[int, RecordedRequest]
    """Number that a request has in the lines -> the request."""
    steps: list[tuple[StepFeatures, float]]
    """(features, seconds) of each step, for fitting a cost model."""
    end: float
    """Time of the end of the last step or event, in seconds."""

    @property
    def arrivals(self) -> list[RecordedRequest]:
        """Requests whose arrival, prompt length and number of output tokens are known, in order of arrival."""
        known = [each for each in self.requests.values() if each.prompt_tokens and each.output_tokens]
        return sorted(known, key=lambda each: each.arrival)


def read_recording(data: bytes) -> Recording:
    """Parse the lines of a recording. Raises ConfigError with the number of the first invalid line."""
    lines = list(_parsed(data))
    about = lines[0].get("key") if lines else None
    if not isinstance(about, dict):
        raise ConfigError(
            f"this is not a recording of steps: its first line must be a snapshot in the format {FORMAT}, as the page"
            " /live saves it"
        )
    if about.get("format") != FORMAT:
        raise ConfigError(f"the recording is in the format {about.get('format')!r:.40}; this version reads {FORMAT}")
    pools = about.get("pools")
    sizes = [about.get(name) for name in _SIZES] + (pools if isinstance(pools, list) and pools else [None])
    if not all(type(size) is int and 0 < size < _MAX_SIZE for size in sizes) or not isinstance(
        about.get("settings"), dict
    ):
        raise ConfigError(f"the recording's first line must have settings and {', '.join(_SIZES)} and pools above 0")
    reader = _Reader()
    for number, line in enumerate(lines, 1):
        try:
            reader.take(line)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
            raise ConfigError(f"line {number} of the recording cannot be read; record it again") from None
    return Recording(about, lines, reader.requests, reader.steps, reader.end)


def _parsed(data: bytes) -> Iterator[dict[str, Any]]:
    for number, text in enumerate(data.splitlines(), 1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict):
            shown = text[:40].decode("utf-8", "replace")
            raise ConfigError(f"line {number} of the recording is not a JSON object: {shown}")
        yield line


def _images(line: dict[str, Any]) -> tuple[Any, ...]:
    """State of the images in a line: six numbers; empty if the line has none."""
    state = line.get("key", line).get("images")
    if state is None:
        return ()
    encoded, given_up, again, num_bytes, queued, lacks_room = state
    return encoded, given_up, again, num_bytes, queued, lacks_room


class _Reader:
    """Reads the lines of a recording one by one. ``rows`` maps slot -> number of the request that decodes there."""

    def __init__(self) -> None:
        self.requests: dict[int, RecordedRequest] = {}
        self.steps: list[tuple[StepFeatures, float]] = []
        self.rows: dict[int, int] = {}
        self.end = 0.0
        self._step_end = 0.0

    def take(self, line: dict[str, Any]) -> None:
        if "key" in line:
            for fields in line["key"].get("requests", ()):
                self._described(*fields)
            self.rows = dict(line["key"].get("on", self.rows.items()))
        for change in line.get("do", ()):
            self._happened(*change)
        self.end = max(self.end, line.get("at", 0.0))
        if not all(type(number) is int and number >= 0 for number in _images(line)):
            raise ValueError(line)
        if "step" not in line:
            return
        for slot in line.get("off", ()):
            self.rows.pop(slot, None)
        start, end = line["t"]
        # While rows decode there is always work. So the host time between two steps counts as part of the later step.
        begin = self._step_end if self.rows and self._step_end else max(start, self._step_end)
        self.rows.update(dict(line.get("on", ())))
        chunks = [
            Chunk(slot, at, count, samples, why, (0,) * (count - 1) if why == "verify" else ())
            for _, slot, at, count, samples, why in line.get("chunks", ())
        ]
        count = 0 if line.get("rest") else len(self.rows)
        context = line.get("ctx", 0)
        adapters = line.get("adapters", 0)
        shared = line.get("shared", 0)
        for number in (context, adapters, shared, context - shared):
            if type(number) is not int or number < 0:
                raise ValueError(number)
        features = StepFeatures.of(count, context, chunks, adapters, shared)
        self.steps.append((features, float(end - begin)))
        self._step_end = end
        self.end = max(self.end, end)
        for number in () if line.get("rest") else self.rows.values():
            self._gave(number, 1)
        for number, *_, samples, _ in line.get("chunks", ()):
            self._gave(number, samples)

    def _gave(self, number: int, tokens: int) -> None:
        """Add the output tokens of the newest step to a request."""
        request = self._request(number)
        if tokens and not request.output_tokens:
            request.first = self._step_end
        request.output_tokens += tokens

    def _request(self, number: int) -> RecordedRequest:
        return self.requests.setdefault(number, RecordedRequest(f"#{number}"))

    def _described(self, number: int, *fields: Any) -> None:
        name, arrival, prompt, _, service, _, _, started, cached, generated, _, _ = fields
        request = self._request(number)
        request.request_id = name
        request.arrival = arrival
        request.prompt_tokens = prompt
        request.service_class = service
        request.cached_tokens = cached
        request.output_tokens = generated
        request.started = started

    def _happened(self, what: str, number: int, *fields: Any) -> None:
        if what == "pause":  # the request has ended, and may be unknown here
            return
        request = self._request(number)
        if what == "add":
            request.arrival, request.request_id, request.prompt_tokens, _, request.service_class = fields
        elif what == "seen":
            request.request_id = fields[0]
        elif what == "join" and request.started is None:
            request.started, _, request.cached_tokens, _ = fields
        elif what == "end":
            request.ended, request.reason, generated = fields[:3]
            request.output_tokens = generated or request.output_tokens
            self.end = max(self.end, fields[0])


# --- Chrome's trace events -------------------------------------------------------------------------------------------


def to_perfetto(data: bytes) -> bytes:
    """The recording as trace events in JSON. Raises ConfigError for data that is not a recording."""
    recording = read_recording(data)
    writer = _Writer(recording)
    for line in recording.lines:
        writer.take(line)
    writer.close()
    trace = {"traceEvents": writer.events, "displayTimeUnit": "ms", "otherData": {"source": FORMAT}}
    return json.dumps(trace, separators=(",", ":")).encode()


class _Writer:
    """Converts the lines of a recording to trace events. A row that decodes in consecutive steps becomes a single
    event."""

    def __init__(self, recording: Recording) -> None:
        self._requests = recording.requests
        times = [line["t"][0] for line in recording.lines if "step" in line]
        known = [each.arrival for each in recording.requests.values() if each.prompt_tokens]
        self._zero = min([*times[:1], *known], default=0.0)
        self._rows: dict[int, tuple[int, float]] = {}
        """Slot -> (number of the request that decodes there, start time)."""
        self._resting: dict[int, int] = {}
        self._end = self._zero
        self._begun = False
        self.events: list[_Event] = []
        for process, name in ((_ENGINE, "engine"), (_ROWS, "rows of the batch"), (_QUEUE, "queue")):
            self._add("M", process, 0, name="process_name", args={"name": name})
        self._add("M", _ENGINE, 1, name="thread_name", args={"name": "steps"})
        for slot in range(min(_MAX_NAMED_ROWS, recording.about["max_num_seqs"])):
            self._add("M", _ROWS, slot + 1, name="thread_name", args={"name": f"row {slot}"})

    def _add(self, kind: str, process: int, thread: int, at: float | None = None, **fields: Any) -> None:
        event = {"ph": kind, "pid": process, "tid": thread, **fields}
        if at is not None:
            event["ts"] = self._micros(at)
        self.events.append(event)

    def _micros(self, at: float) -> float:
        return max(0.0, round((at - self._zero) * 1e6, 3))

    def _span(self, process: int, thread: int, begin: float, end: float, name: str, **args: Any) -> None:
        length = round(max(0.0, self._micros(end) - self._micros(begin)), 3)
        self._add("X", process, thread, begin, name=name, dur=length, args=args)

    def take(self, line: dict[str, Any]) -> None:
        for change in line.get("do", ()):
            self._happened(*change)
        if "key" in line and not self._begun:
            self._rows = {slot: (number, self._zero) for slot, number in line["key"].get("on", ())}
        if images := _images(line):
            at = line["t"][1] if "step" in line else line.get("at", self._end)
            for name, counts in zip(_IMAGES, (images[:3], images[3:4], images[4:5]), strict=True):
                self._add("C", _ENGINE, 0, at, name=name, args=dict(zip(_IMAGES[name], counts, strict=True)))
        if "step" not in line:
            return
        self._begun = True
        begin, end = max(line["t"][0], self._end), line["t"][1]
        self._move_rows(line, begin)
        self._end = end
        chunks = line.get("chunks", ())
        args = {"step": line["step"], "decodes": len(self._rows), "prompt_tokens": sum(chunk[3] for chunk in chunks)}
        self._span(_ENGINE, 1, begin, end, "step", **args)
        self._add("C", _ENGINE, 0, begin, name="rows", args={"decode": len(self._rows), "prompt": len(chunks)})
        for number, slot, start, count, _, why in chunks:
            self._span(_ROWS, slot + 1, begin, end, why, request=self._name(number), first=start, tokens=count)
        if "state" in line:
            waiting, _, free, used, cached, *_ = line["state"]
            self._add("C", _QUEUE, 0, begin, name="waiting", args={"requests": waiting})
            self._add("C", _ENGINE, 0, begin, name="KV blocks", args={"used": used, "cached": cached, "free": free})

    def _move_rows(self, line: dict[str, Any], begin: float) -> None:
        if line.get("rest"):
            for slot, (number, _) in list(self._rows.items()):
                self._stop(slot)
                self._resting[slot] = number
            return
        for slot, number in self._resting.items():
            self._rows[slot] = (number, begin)
        self._resting.clear()
        for slot in line.get("off", ()):
            self._stop(slot, begin)
        for slot, number in line.get("on", ()):
            self._rows[slot] = (number, begin)

    def _stop(self, slot: int, begin: float | None = None) -> None:
        number, since = self._rows.pop(slot, (0, None))
        if since is not None and since != begin:  # a row without decode steps in between has no event
            self._span(_ROWS, slot + 1, since, self._end, "decode", request=self._name(number))

    def _happened(self, what: str, number: int, *fields: Any) -> None:
        name = self._name(number)
        if what == "add":
            args = {"request": name, "prompt_tokens": fields[2]}
            self._add("i", _QUEUE, 0, fields[0], name="arrival", s="p", args=args)
        elif what == "pause":
            ended, tools, tokens, until = fields
            args = {
                "request": name,
                "tools": tools,
                "tokens": tokens,
                "lease_seconds": max(0.0, round(until - ended, 6)),
            }
            self._add("i", _QUEUE, 0, ended, name="pause", s="p", args=args)
        elif what == "resume":
            args = {"request": name, "pause_seconds": fields[2], "cache": fields[3]}
            self._add("i", _QUEUE, 0, fields[0], name="resume", s="p", args=args)
        elif what in ("join", "preempt", "end", "hold"):
            more: dict[str, Any] = {}
            if what == "join":
                more = {"row": fields[1], "cached_tokens": fields[2]}
            elif what == "preempt":
                more = {"how": fields[1], "for": self._name(fields[2])}
            elif what == "end":
                more = {"reason": fields[1], "causes": fields[4]}
            self._add("i", _QUEUE, 0, fields[0], name=what, s="p", args={"request": name, **more})

    def _name(self, number: int) -> str:
        found = self._requests.get(number)
        return "" if found is None else found.request_id

    def close(self) -> None:
        """End the trace event of each row that still decodes, at the end of the row's last step."""
        for slot in list(self._rows):
            self._stop(slot)
