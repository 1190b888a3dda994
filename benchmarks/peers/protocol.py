"""Protocol between a benchmark and an engine in a child process. The module imports only the standard library, so that
every environment can run it.

The child loads its model, warms up and prints ``READY {...}`` with versions and settings. For every line ``RUN FILE``
on its standard input, it serves the requests in FILE, a JSON list of [prompt token ids, output tokens], all submitted
at once, and prints ``DONE {"seconds": ..., "output_tokens": ..., "cpu_seconds": ...}``. It exits at the end of its
standard input. Other output of an engine goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["Child", "Requests", "restart_with", "serve"]

Requests = list[tuple[list[int], int]]

_WARM_UP: Requests = [([10 + i] * length, count) for i, (length, count) in enumerate([(300, 4), (40, 12), (9, 12)])]
"""Warm-up requests: a long prompt that needs several chunks, and short prompts that decode at the same time."""


def serve(
    load: Callable[[], tuple[Callable[[Requests], Sequence[int]], dict[str, Any]]],
) -> None:
    """Run the child's side of the protocol. ``load`` returns the engine and the data for READY.

    The engine serves requests and returns the number of tokens that it generated for each. Raises SystemExit when these
    numbers differ from the requested ones, because an engine that stops early would look fast.
    """
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answer, about = load()
    _timed(answer, _WARM_UP)
    print("READY", json.dumps(about), file=out)
    for line in sys.stdin:
        verb, _, path = line.strip().partition(" ")
        if verb != "RUN":
            raise SystemExit(f"expected 'RUN FILE' on standard input, got {line.strip()!r}")
        requests = [(prompt, count) for prompt, count in json.loads(Path(path).read_text())]
        print("DONE", json.dumps(_timed(answer, requests)), file=out)


def _timed(answer: Callable[[Requests], Sequence[int]], requests: Requests) -> dict[str, float]:
    """Seconds, tokens, and processor seconds of this process. If the processor seconds are much less than seconds times
    threads, another process used the processors."""
    begin, busy = time.perf_counter(), time.process_time()
    produced = list(answer(requests))
    seconds, busy = time.perf_counter() - begin, time.process_time() - busy
    if produced != [count for _, count in requests]:
        wrong = next(i for i, (got, (_, count)) in enumerate(zip(produced, requests, strict=True)) if got != count)
        raise SystemExit(f"request {wrong}: asked for {requests[wrong][1]} output tokens, got {produced[wrong]}")
    return {"seconds": seconds, "output_tokens": sum(produced), "cpu_seconds": busy}


def restart_with(variables: Mapping[str, str]) -> None:
    """Restart this script with ``variables`` in its environment, unless they are already set. The dynamic loader and
    the OpenMP runtime read them only when a process starts. Variables that the caller has set keep their values."""
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    if missing:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | missing)


class Child:
    """The benchmark's side of the protocol: an engine in its own process group, which is stopped (SIGSTOP) except while
    it works.

    It is stopped rather than idle, because threads that spin while waiting would slow the other engines. The group
    belongs to the benchmark's session. If the benchmark dies, the kernel sends SIGHUP and SIGCONT to the stopped group,
    so that no process is left.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        """Start ``command`` and wait for READY. The child's messages go to ``log``. Raises SystemExit if the child ends
        early."""
        self.name, self.log = name, log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, process_group=0
            )
        try:
            self.about: dict[str, Any] = self._read("READY")
        except BaseException:
            self.kill()
            raise
        self._signal(signal.SIGSTOP)

    def run(self, workload: Path) -> dict[str, float]:
        """Serve the requests in the file ``workload``. Returns the data of DONE. Raises SystemExit if the child ends
        early."""
        self._signal(signal.SIGCONT)
        stdin = _pipe(self._process.stdin)
        stdin.write(f"RUN {workload}\n".encode())
        stdin.flush()
        result = self._read("DONE")
        self._signal(signal.SIGSTOP)
        return {name: float(value) for name, value in result.items()}

    def kill(self) -> None:
        """Kill the whole process group, even if it is stopped."""
        with self._process:
            self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _read(self, verb: str) -> dict[str, Any]:
        line = _pipe(self._process.stdout).readline().decode()
        if not line.startswith(verb + " "):
            raise SystemExit(f"{self.name} said {line!r} instead of {verb}; its messages are in {self.log}")
        result: dict[str, Any] = json.loads(line.removeprefix(verb))
        return result


def _pipe(stream: Any) -> BinaryIO:
    if stream is None:
        raise RuntimeError("the child was started without pipes")
    pipe: BinaryIO = stream
    return pipe
