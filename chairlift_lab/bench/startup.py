"""``bench startup``: measures the time from the start of a new process to its first token."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from chairlift.errors import EngineDeadError

__all__ = ["measure_startup", "startup_lines"]

_CHILD: Final = """\
import json, sys, time
marks = [time.monotonic()]
settings = json.loads(sys.argv[1])
import chairlift
from chairlift import LLM, SamplingParams
marks.append(time.monotonic())
llm = LLM(**settings)
marks.append(time.monotonic())
prompt = [11, 12, 13, 14] if settings.get("skip_tokenizer_init") else "What is a KV cache?"
llm.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True))
marks.append(time.monotonic())
print(json.dumps(marks))
"""
"""Program of the measured process. It prints times of the system's monotonic clock, which its parent reads as well."""
_PHASES: Final = ("interpreter", "import", "load", "first token")
_SERVED: Final = ("server ready", "first token over HTTP")
_POLL_SECONDS: Final = 0.01
_TIMEOUT: Final = 1800.0
_PROMPT: Final = {"prompt": [11, 12, 13, 14], "max_tokens": 1, "ignore_eos": True, "stream": True}


def measure_startup(settings: Mapping[str, Any], rounds: int) -> dict[str, list[float]]:
    """Start the engine several times with ``settings``. Returns phase -> seconds in each round.

    A warm-up round is not counted. The phases of a process follow each other; ``in all`` is the sum for the process
    that uses the Python API, and ``server in all`` for the server. Raises EngineDeadError with the last output of a
    process that does not start.
    """
    seconds: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        phases = _in_python(settings) | _as_server(settings)
        if number:
            for name, value in phases.items():
                seconds.setdefault(name, []).append(round(value, 4))
    return seconds


def startup_lines(seconds: Mapping[str, Sequence[float]]) -> Iterator[str]:
    """One line of text per phase, with its median and range."""
    for name, values in seconds.items():
        yield f"{name:22} median {statistics.median(values):6.2f} s, from {min(values):.2f} to {max(values):.2f}"


def _in_python(settings: Mapping[str, Any]) -> dict[str, float]:
    begin = time.monotonic()
    command = [sys.executable, "-c", _CHILD, json.dumps(dict(settings))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise EngineDeadError(f"a fresh process did not reach its first token: {_last_words(done.stderr)}")
    marks = [begin, *json.loads(done.stdout.splitlines()[-1])]
    phases = [after - before for before, after in itertools.pairwise(marks)]
    return dict(zip(_PHASES, phases, strict=True)) | {"in all": marks[-1] - begin}


def _as_server(settings: Mapping[str, Any]) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="chairlift-startup-") as folder:
        config = Path(folder, "settings.json")
        log = Path(folder, "log")
        config.write_text(json.dumps(dict(settings)))
        port = _free_port()
        command = [sys.executable, "-m", "chairlift", "serve", "--port", str(port), "--config", str(config)]
        begin = time.monotonic()
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            _wait_ready(process, port, log)
            ready = time.monotonic()
            _first_token(port)
            end = time.monotonic()
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait()
    return dict(zip(_SERVED, (ready - begin, end - ready), strict=True)) | {"server in all": end - begin}


def _wait_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait until ``/ready`` returns status 200, so that the server accepts requests."""
    end = time.monotonic() + _TIMEOUT
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)
            with contextlib.closing(connection):
                connection.request("GET", "/ready")
                if connection.getresponse().status == 200:
                    return
        time.sleep(_POLL_SECONDS)
    raise EngineDeadError(f"the server did not become ready: {_last_words(log.read_text('utf-8', 'replace'))}")


def _first_token(port: int) -> None:
    """Request one token from the server, and wait until the token arrives."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(_PROMPT), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        line = reply.readline()
        if reply.status != 200 or not line.startswith(b"data: {"):
            raise EngineDeadError(f"the server answered {reply.status}: {line.decode('utf-8', 'replace'):.200}")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return re.sub(r"^(chairlift: error|[\w.]+Error): ", "", lines[-1]) if lines else "it said nothing"
