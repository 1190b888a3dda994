"""``chairlift top``: shows a server's activity live on a terminal."""

from __future__ import annotations

import argparse
import os
import queue
import select
import shutil
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from chairlift.cli.remote_server import MAX_BYTES, NotThereError, RemoteServer, add_url_flag, parse_object
from chairlift.cli.top_view import SORTS, Line, Metrics, Snapshot, text_of, view
from chairlift.errors import ChairliftError, ConfigError, RequestError

__all__ = ["DESCRIPTION", "SUMMARY", "add_arguments", "run"]

SUMMARY: Final = "show a running server in the terminal"
DESCRIPTION: Final = """Show a running server: batch, queue, KV cache, preemption, speed, and every request.

  s  changes the order of the requests
  q  quits

ETA is the time until a waiting request starts. For a long prompt that is being computed, it is the
time until its next token. If the server is loading, hanging or unreachable, the view says so and
tries again. With --once, or if the output is not a terminal, the view is printed once as plain text."""

_ASK_SECONDS: Final = 5.0
_PIPE: Final = 120
"""Width in columns of lines that are written to a file or a pipe."""
_MAX_LISTED: Final = 500
_MAX_METRICS_BYTES: Final = 16 * MAX_BYTES
_STYLES: Final = {
    **{"title": "1", "good": "32", "watch": "33", "bad": "1;31"},
    **{"dim": "2", "busy": "36"},
}
_ENTER: Final = "\x1b[?1049h\x1b[?25l\x1b[?7l"
"""Terminal codes: alternate screen, hidden cursor, no wrapping of long lines."""
_LEAVE: Final = "\x1b[?7h\x1b[?25h\x1b[?1049l"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``chairlift top``."""
    add_url_flag(parser)
    parser.add_argument("--api-key-file", metavar="FILE", type=Path, help="file whose first line is the API key")
    parser.add_argument("--model", metavar="NAME", help="show one model of a server with many (default: all together)")
    parser.add_argument("--interval", metavar="S", type=float, default=1.0, help="seconds between updates (default: 1)")
    parser.add_argument("--once", action="store_true", help="print the view once")


def run(args: argparse.Namespace) -> int:
    """Show the server's state until the user quits. Returns 0. ``--once`` raises an error if the server cannot be
    read."""
    if not 0.1 <= args.interval <= 3600:
        raise ConfigError(f"--interval must be from 0.1 to 3600 seconds, got {args.interval:g}")
    observer = _Observer(RemoteServer(args.url, api_key_file=args.api_key_file), args.model)
    if args.once or not sys.stdout.isatty():
        return _print_once(observer, args.interval)
    return _Screen(observer, args.interval).show()


def _print_once(observer: _Observer, interval: float) -> int:
    """Print the state once. The server is read twice, because rates need two points in time."""
    before = observer.read()
    if observer.failure is not None:
        raise observer.failure
    time.sleep(interval)
    now = observer.read()
    whole = not sys.stdout.isatty()  # a file or a pipe has no width, whatever COLUMNS says
    width = _PIPE if whole else shutil.get_terminal_size((_PIPE, 24)).columns
    for line in view(now, before, width=width, height=_MAX_LISTED + 20):
        print(text_of(line) if whole else text_of(line)[:width])
    return 0


class _Observer:
    """Reads the state of a server. Only one thread may use it."""

    def __init__(self, server: RemoteServer, only: str | None = None) -> None:
        self._only = only
        """The model to show; None: all models of the server."""
        self.failure: ChairliftError | None = None
        """Error of the last read; None if it succeeded."""
        self._server = server
        self._model = self._version = ""

    def read(self) -> Snapshot:
        """Read the state of the server. Errors of the server are recorded in the snapshot and in ``failure``, not
        raised."""
        self.failure = None
        when = time.monotonic()
        seen: dict[str, Any] = {}
        try:
            seen["state"] = self._state()
            body = self._get("/metrics", (200,))[1]
            when = time.monotonic()  # rates are those of the metrics, which may come late if the server hangs
            seen["metrics"] = metrics = Metrics(body.decode("utf-8", "replace"), self._only)
            started = metrics.value("process_start_time_seconds")
            seen["uptime"] = None if started is None else max(0.0, time.time() - started)
            seen["requests"] = self._requests()
            if not self._model or metrics.values_of("model_state", "state"):  # the loaded models change
                self._model, self._version = self._names()
        except ChairliftError as error:
            self.failure = error
            self._model = ""
            seen["state"] = str(error)
        return Snapshot(when, self._server.url, model=self._model, version=self._version, **seen)

    def _get(self, path: str, statuses: Sequence[int]) -> tuple[int, bytes]:
        with self._server.request("GET", path, seconds=_ASK_SECONDS, whole=True, statuses=statuses) as response:
            body = response.read(_MAX_METRICS_BYTES)
            return response.status, body

    def _state(self) -> str:
        """State of the server: ``serving``, or a description of the problem. ``/health`` says whether requests make
        progress, ``/ready`` whether new requests are accepted."""
        for path in ("/health", "/ready"):
            try:
                status, body = self._get(path, (200, 503))
            except NotThereError:  # other servers have no /ready
                continue
            if status != 200:
                try:
                    reason = parse_object(body).get("reason")
                except RequestError:
                    reason = None
                return reason if isinstance(reason, str) else "it says that it is not healthy"
        return "serving"

    def _requests(self) -> list[dict[str, Any]] | None:
        which = "" if self._only is None else f"&model={quote(self._only, safe='')}"
        try:
            listed = parse_object(self._get(f"/v1/requests?limit={_MAX_LISTED}{which}", (200,))[1]).get("requests")
        except NotThereError:
            return None
        return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else None

    def _names(self) -> tuple[str, str]:
        """(model name, server version); both are empty if the server does not report them."""
        try:
            models = parse_object(self._get("/v1/models", (200,))[1])["data"]
            loaded = [each["id"] for each in models if each.get("state") == "loaded"]
            name = self._only or (", ".join(loaded) or "no model" if "state" in models[0] else models[0]["id"])
            return str(name), str(parse_object(self._get("/version", (200,))[1])["version"])
        except (NotThereError, LookupError, TypeError):
            return "", ""


class _Screen:
    """The terminal while it shows a server. A separate thread reads the keyboard, so keys work even while the server
    hangs."""

    def __init__(self, observer: _Observer, interval: float) -> None:
        self._observer = observer
        self._interval = interval
        self._seen: queue.SimpleQueue[Snapshot] = queue.SimpleQueue()
        self._over = threading.Event()
        self._bell, self._rope = os.pipe()
        os.set_blocking(self._rope, False)
        self._ended_by = 0
        self._sort = SORTS[0]
        self._colour = not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"

    def show(self) -> int:
        """Show the view until the user quits. Returns 0, or 128 plus the number of the signal that ended it."""
        watcher = threading.Thread(target=self._watch, name="watcher", daemon=True)
        before: Snapshot | None = None
        now: Snapshot | None = None
        with self._terminal():
            watcher.start()
            while not self._over.is_set() and not self._ended_by:
                self._draw(now, before)
                self._heed(self._pressed())
                while not self._seen.empty():
                    before = now
                    now = self._seen.get()
        self._over.set()
        return 128 + self._ended_by if self._ended_by else 0

    def _watch(self) -> None:
        while not self._over.is_set():
            self._seen.put(self._observer.read())
            os.write(self._rope, b"!")
            self._over.wait(self._interval)

    def _pressed(self) -> bytes:
        """Wait for a key, a signal or a new snapshot. Returns the keys that were pressed."""
        keyboard = [sys.stdin.fileno()] if sys.stdin.isatty() else []
        ready, _, _ = select.select([self._bell, *keyboard], [], [])
        if self._bell in ready:
            os.read(self._bell, 4096)
        if not keyboard or keyboard[0] not in ready:
            return b""
        return os.read(keyboard[0], 64) or b"q"  # the keyboard was closed

    def _heed(self, keys: bytes) -> None:
        if keys.startswith(b"\x1b"):  # an arrow, or another key without a meaning here
            return
        for key in keys.decode("ascii", "replace").lower():
            if key == "q":
                self._over.set()
            elif key == "s":
                self._sort = SORTS[(SORTS.index(self._sort) + 1) % len(SORTS)]

    def _draw(self, now: Snapshot | None, before: Snapshot | None) -> None:
        size = os.get_terminal_size(sys.stdout.fileno())  # COLUMNS and LINES do not change with the window
        width, height = size.columns or 80, size.lines or 24  # serial consoles, and some containers, do not know
        if now is None:
            lines: list[Line] = [[("asking the server ...", "")]]
        else:
            keys = f"sorted by {self._sort}: s changes it, q quits"
            lines = view(now, before, width=width, height=height, sort=self._sort, keys=keys)
        rows = "\x1b[K\r\n".join(self._paint(line, width) for line in lines)
        sys.stdout.write(f"\x1b[H{rows}\x1b[K\x1b[J")
        sys.stdout.flush()

    def _paint(self, line: Line, width: int) -> str:
        painted = []
        for text, style in line:
            text = text[:width]
            width -= len(text)
            code = _STYLES.get(style) if self._colour else None
            painted.append(f"\x1b[{code}m{text}\x1b[0m" if code and text.strip() else text)
        return "".join(painted)

    @contextmanager
    def _terminal(self) -> Iterator[None]:
        """Context manager: use the terminal inside the block, and always restore it afterwards."""

        def end(number: int, frame: object) -> None:
            self._ended_by = number

        handlers: dict[int, Any] = {signal.SIGINT: end, signal.SIGTERM: end, signal.SIGHUP: end}
        handlers[signal.SIGWINCH] = lambda number, frame: None  # only to wake up
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        bell = signal.set_wakeup_fd(self._rope, warn_on_full_buffer=False)
        keyboard = sys.stdin.fileno() if sys.stdin.isatty() else None
        settings = None if keyboard is None else termios.tcgetattr(keyboard)
        try:
            if keyboard is not None:
                tty.setcbreak(keyboard)
                quiet = termios.tcgetattr(keyboard)
                quiet[6][termios.VSUSP] = b"\x00"  # Ctrl-Z would stop it without restoring the screen
                termios.tcsetattr(keyboard, termios.TCSADRAIN, quiet)
            sys.stdout.write(_ENTER)
            yield
        finally:
            try:
                sys.stdout.write(_LEAVE)
                sys.stdout.flush()
            finally:
                if keyboard is not None and settings is not None:
                    termios.tcsetattr(keyboard, termios.TCSADRAIN, settings)
                signal.set_wakeup_fd(bell)
                for number, handler in before.items():
                    signal.signal(number, handler)
