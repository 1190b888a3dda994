"""``chairlift trace record``: writes a running server's traffic to a trace file: lengths, times and shared prefixes,
never texts."""

from __future__ import annotations

import argparse
import json
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

from chairlift.base.writing import replacing
from chairlift.cli.flags import whole
from chairlift.cli.remote_server import MAX_BYTES, NotThereError, RemoteServer, add_url_flag, parse_object
from chairlift.errors import ChairliftError, ConfigError, EngineDeadError

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "record a running server's traffic"
DESCRIPTION: Final = """Record the traffic of a running server as a trace, until Ctrl-C or the limits below.

A trace has the times and lengths of requests, early disconnects, and the shared beginnings of prompts. The
beginnings are numbers that the server computes with a secret for this recording only. If an answer calls tools, the
trace also has their names, and how long they run: the requests are turns of one session. No other text leaves the
server.
The recording includes requests that arrive after its start, and writes each one when it has ended. With
--duration or --requests, the recording ends when its last request has ended.

  chairlift trace record --url http://127.0.0.1:8000 -o monday.jsonl --duration 10m"""

_SILENCE_SECONDS: Final = 60.0
"""Seconds without data after which the connection counts as broken. The server sends something every 15 s."""
_KEPT_SECONDS: Final = 60.0
"""Seconds for which a server keeps a recording after the recording client has disconnected."""
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 15.0
_LOOK_SECONDS: Final = 0.25
_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift trace record``."""
    add_url_flag(parser)
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, required=True, help="the trace, JSON lines")
    parser.add_argument("--duration", metavar="TIME", help="time to record, such as 90s, 10m or 2h")
    parser.add_argument("--requests", metavar="N", type=whole, help="number of requests to record")
    parser.add_argument("--block-size", metavar="N", type=whole, default=64, help="tokens per prefix id (default: 64)")
    parser.add_argument("--api-key-file", metavar="FILE", type=Path, help="file whose first line is the API key")
    parser.add_argument("--force", action="store_true", help="replace FILE if it exists")


def run(args: argparse.Namespace) -> int:
    """Record the traffic. Returns 0, or 1 when there was nothing to record. Raises ChairliftError if it cannot run."""
    duration = None if args.duration is None else _seconds(args.duration)
    if args.requests is not None and args.requests < 1:
        raise ConfigError(f"--requests must be at least 1, got {args.requests}")
    if not 16 <= args.block_size <= 512:
        raise ConfigError(f"--block-size must be from 16 to 512 tokens, got {args.block_size}")
    server = RemoteServer(args.url, api_key_file=args.api_key_file)
    trace = _TraceFile(args.output, args.block_size, force=args.force)
    feed = _Feed(server, args.block_size, duration, args.requests)
    try:
        with trace.file, _stopped_by_signals() as stopped:
            feed.start()
            try:
                _record(feed, trace, stopped)
            finally:
                feed.leave()
        feed.raise_failure()
        return trace.finish(feed)
    finally:
        if not trace.num_lines:
            trace.growing.unlink(missing_ok=True)


def _record(feed: _Feed, trace: _TraceFile, stopped: threading.Event) -> None:
    """Write records and progress until the recording ends or ``stopped`` is set."""
    shown = 0.0
    terminal = sys.stderr.isatty()
    while not stopped.is_set():
        with suppress(queue.Empty):
            record = feed.records.get(timeout=_LOOK_SECONDS)
            if record is None:
                break
            trace.write(record)
        now = time.monotonic()
        if terminal and now - shown >= _LOOK_SECONDS:
            shown = now
            print(f"\r\x1b[K{trace.progress()}{feed.state}", end="", file=sys.stderr, flush=True)
    while not feed.records.empty():  # records that had arrived when it was stopped
        if (record := feed.records.get()) is not None:
            trace.write(record)
    if terminal:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class _TraceFile:
    """The output files. FILE.recording gets each request when it ends. FILE has the same requests in order of
    arrival."""

    def __init__(self, path: Path, block_size: int, *, force: bool) -> None:
        self.path = path
        self.growing = path.with_name(f"{path.name}.recording")
        for each in (path, self.growing):
            if each.exists() and not force:
                raise ConfigError(f"{each} is there already; give another name to -o, or --force to replace it")
        try:
            self.file: BinaryIO = self.growing.open("wb", buffering=0)
        except OSError as error:
            raise ConfigError(f"cannot write {self.growing}: {error.strerror}") from None
        self.num_requests = self.num_cancelled = self.num_failed = self.num_lines = 0
        self._block_size = block_size
        self._begin = time.monotonic()
        self._tokens = [0, 0]
        self._sessions = _Sessions()

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one request, as one line per output. Raises ConfigError when the disk is full."""
        try:
            lines = self._lines(record)
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"the server's records are not of a known form; {self._remaining_records()}") from None
        size = self.file.tell()
        try:
            if self.file.write(lines) < len(lines):
                raise OSError(0, "the disk is full")
        except OSError as error:
            with suppress(OSError):
                self.file.truncate(size)  # removes an incomplete line
            raise ConfigError(f"cannot write {self.growing}: {error.strerror}; {self._remaining_records()}") from None

    def _lines(self, record: Mapping[str, Any]) -> bytes:
        if record["finish_reason"] == "error" and not record["output_tokens"]:
            self.num_failed += 1
            return b""
        fields = {
            "timestamp": round(record["arrival_seconds"] * 1000, 3),
            "input_length": record["prompt_tokens"],
            "output_length": 0,
            **{name: record[name] for name in ("cancel_ms", "tenant", "priority") if record[name]},
            **({} if record["service_tier"] == "default" else {"service_tier": record["service_tier"]}),
            **{name: record[name] for name in ("ttft_ms", "tpot_ms", "deadline_ms") if record[name]},
            "hash_ids": record["hash_ids"],
            "block_size": self._block_size,
        }
        if (number := record.get("number")) is not None:
            fields |= {"record": number}
            self._sessions.add(number, record.get("previous"), record.get("tools") or [], record.get("gap_ms"))
        self.num_requests += 1
        self.num_cancelled += record["cancel_ms"] is not None
        self.num_lines += len(record["answer_tokens"])
        self._tokens[0] += record["prompt_tokens"]
        self._tokens[1] += record["output_tokens"]
        lines = [json.dumps({**fields, "output_length": max(1, count)}) for count in record["answer_tokens"]]
        return "".join(f"{line}\n" for line in lines).encode()

    def progress(self) -> str:
        """Text for the user about the progress of the recording."""
        elapsed = time.monotonic() - self._begin
        clock = f"{elapsed // 3600:02.0f}:{elapsed // 60 % 60:02.0f}:{elapsed % 60:02.0f}"
        return f"recorded {self.num_requests:,} requests in {clock}, {self.num_requests / max(elapsed, 1e-3):.1f}/s"

    def finish(self, feed: _Feed) -> int:
        """Sort the records into the output file, and print the result. Returns the exit code."""
        from chairlift_lab.workload.formats import read_trace, write_trace

        if not self.num_lines:
            print(f"nothing was recorded: no request came and ended{feed.losses()}", file=sys.stderr)
            return 1
        try:
            self._sessions.write(self.growing)
            write_trace(self.path, read_trace(self.growing, sort=True))
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror}; {self._remaining_records()}") from None
        self.growing.unlink()
        print(f"{self.path}: {self.num_requests:,} requests, {self._tokens[0]:,} prompt tokens,", end=" ")
        print(f"{self._tokens[1]:,} output tokens, {self.num_cancelled:,} cancelled by their clients")
        if num_turns := self._sessions.num_turns:
            print(f"  {num_turns:,} requests are turns of conversations that call tools")
        if self.num_lines > self.num_requests:
            print(f"  requests with n answers are n lines: {self.num_lines:,} in all")
        if self.num_failed:
            print(f"  {self.num_failed:,} that failed before their first token are left out")
        if losses := feed.losses():
            print(f"  not complete{losses}")
        return 0

    def _remaining_records(self) -> str:
        if not self.num_lines:
            return "nothing was recorded"
        return f"the requests until then are kept in {self.growing}, in the order of their ends (read it with --sort)"


class _Sessions:
    """Which recorded requests are turns of one conversation. A request is known to be a turn only when the next one
    comes, so the lines of a recording get their sessions at its end."""

    def __init__(self) -> None:
        self._fields: dict[int, dict[str, Any]] = {}
        """Number of a record -> fields of its line: session, turn, tool and gap."""

    @property
    def num_turns(self) -> int:
        return len(self._fields)

    def add(self, number: int, previous: int | None, tools: Sequence[str], gap_ms: float | None) -> None:
        """Note that record ``number`` continues record ``previous``, if it continues any."""
        if previous is None or gap_ms is None:
            return
        before = self._fields.setdefault(previous, {"session": f"session-{previous}", "turn": 0})
        before["tool"] = " + ".join(sorted(tools))
        own = {"session": before["session"], "turn": before["turn"] + 1, "gap_ms": gap_ms}
        self._fields[number] = own | self._fields.get(number, {})

    def write(self, path: Path) -> None:
        """Add the sessions to the lines of a recording. Raises OSError."""
        if not self._fields:
            return
        with path.open() as lines, replacing(path) as file:
            for line in lines:
                fields = json.loads(line)
                file.write(json.dumps(fields | self._fields.get(fields.get("record"), {})) + "\n")


class _Feed(threading.Thread):
    """Reads the server's events, and reconnects when the connection breaks. After the last record, ``records`` gets
    None."""

    def __init__(self, server: RemoteServer, block_size: int, duration: float | None, requests: int | None) -> None:
        super().__init__(name="traffic", daemon=True)
        self.records: queue.Queue[dict[str, Any] | None] = queue.Queue(10_000)
        self.state = ""
        """Description of the connection's error; empty while the connection works."""
        self._server = server
        self._block_size = block_size
        self._ends = None if duration is None else time.monotonic() + duration
        self._left = requests
        self._leaving = threading.Event()
        self._recording = ""
        self._began_unix: float | None = None
        self._offset = 0.0
        self._last = self._count = 0
        self._numbers: dict[int, int] = {}
        """Number of a record in the server's present recording -> its number here."""
        self._num_lost = self._num_restarts = 0
        self._seconds_away = self._away_since = 0.0
        self._failure: ChairliftError | None = None

    def run(self) -> None:
        pause = _FIRST_PAUSE
        try:
            while not self._leaving.is_set():
                broke = ""
                heard = self._last
                try:
                    if self._listen():
                        return
                except NotThereError as error:
                    if not self._recording:
                        raise NotThereError(f"{self._server.url} cannot be recorded: {error}") from None
                    self._recording = ""
                    self._num_restarts = self._num_restarts + 1
                    broke = str(error)
                except ChairliftError as error:
                    if self._began_unix is None:
                        raise
                    broke = str(error)
                pause = _FIRST_PAUSE if self._last != heard else pause
                self.state = f"; {broke or 'the connection ended'}; trying again"
                self._away_since = self._away_since or time.monotonic()
                self._leaving.wait(pause)
                pause = min(_LONGEST_PAUSE, 2 * pause)
                over = 0.0 if self._ends is None else time.monotonic() - self._ends
                if over > (_KEPT_SECONDS if self._recording else 0.0):
                    return
        except ChairliftError as error:
            self._failure = error
        finally:
            self.records.put(None)

    def leave(self) -> None:
        """Close the connection and stop reading."""
        self._leaving.set()
        self._server.break_off()

    def raise_failure(self) -> None:
        """Raise the error that prevented the recording, if there is one."""
        if self._failure is not None:
            raise self._failure

    def losses(self) -> str:
        """Description of gaps in the recording; empty if it has none."""
        parts = []
        if self._num_lost:
            parts.append(f"{self._num_lost:,} requests were lost on the way")
        away = time.monotonic() - self._away_since if self._away_since else 0.0
        if self._num_restarts:
            times = f"{self._num_restarts} time{'s' * (self._num_restarts > 1)}"
            parts.append(
                f"the server forgot the recording {times}, and what ended meanwhile"
                f" (about {self._seconds_away + away:.0f} s) is missing; prompts before and after that are not known"
                " to be alike"
            )
        elif away and self._left != 0:
            parts.append(f"the server was gone in the last {away:.0f} s, and what ended then is missing")
        return "".join(f"; {part}" for part in parts)

    def _listen(self) -> bool:
        """Read one connection to its end. Returns whether the recording itself has ended."""
        if self._left is not None and self._left <= 0:
            return True
        path = f"/v1/traffic?block_size={self._block_size}"
        if self._recording:
            path = f"/v1/traffic?recording={self._recording}"
        elif self._ends is not None:
            path += f"&duration={max(0.001, self._ends - time.monotonic()):.3f}"
        if self._left is not None and not self._recording:
            path += f"&requests={self._left}"
        with self._server.request("GET", path, seconds=_SILENCE_SECONDS) as response:
            name = number = ""
            while (line := response.readline(MAX_BYTES * 8)) and not self._leaving.is_set():
                key, _, value = line.rstrip(b"\r\n").decode("utf-8", "replace").partition(": ")
                if key == "event":
                    name = value
                elif key == "id":
                    number = value
                elif key == "data" and self._take(name, number, parse_object(value.encode())):
                    return True
                elif not key:
                    name = number = ""
        return self._leaving.is_set()

    def _take(self, name: str, number: str, data: dict[str, Any]) -> bool:
        """Process one event of the server. Returns whether it is the last event of the recording."""
        if name == "start":
            began = data.get("began_unix")
            if not isinstance(began, (int, float)) or not isinstance(data.get("recording"), str):
                raise EngineDeadError("the server's recording begins in an unknown way")
            self._began_unix = began if self._began_unix is None else self._began_unix
            if data["recording"] != self._recording:
                self._recording = data["recording"]
                self._last = 0
                self._numbers = {}
                self._offset = max(0.0, began - self._began_unix)
            if self._away_since:
                self._seconds_away += time.monotonic() - self._away_since
            self.state = ""
            self._away_since = 0.0
        elif not name and re.fullmatch("[0-9]{1,15}", number):
            self._num_lost += int(number) - self._last - 1
            self._last = int(number)
            self._left = None if self._left is None else self._left - 1
            data["number"] = self._count = self._count + 1  # the server's numbers begin again with a new recording
            if isinstance(data.get("previous"), int):
                data["previous"] = self._numbers.get(data["previous"])
            self._numbers[self._last] = self._count
            if isinstance(data.get("arrival_seconds"), (int, float)):
                data["arrival_seconds"] += self._offset
            self.records.put(data)
        return name == "end"


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """Context manager: an event that Ctrl-C or SIGTERM sets inside the block. In other threads than the main thread,
    signals do not set it."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = {number: signal.signal(number, lambda *_: stopped.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < seconds <= 1e9:
        raise ConfigError(f"--duration must be a time such as 90s, 10m or 2h, got {text!r}")
    return seconds
