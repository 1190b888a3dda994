"""Protocol between a benchmark and an engine in a child process. The module imports only the standard library, so that
every environment can run it.

The child loads its model, warms up and prints ``READY {...}`` with versions and settings. For every line ``RUN FILE``
on its standard input, it serves the requests in FILE, a JSON list of [prompt token ids, output tokens], all submitted
at once, and prints ``DONE {"seconds": ..., "output_tokens": ..., "cpu_seconds": ...}``. It exits at the end of its
standard input. Other output of an engine goes to standard error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["Child", "Place", "Requests", "Unsupported", "kv_bytes_per_token", "made", "restart_with", "serve"]

Requests = list[tuple[list[int], int]]


class Unsupported(Exception):
    """An engine cannot run a model in a precision; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Place:
    """What an engine is started for. Each ``run_ENGINE.py`` has a function ``command`` that prepares the model for its
    engine and returns the command of the child process."""

    environment: Path
    """Made by the engine's setup script."""
    model: Path
    """Directory of the model in 16 bits."""
    work: Path
    """Folder for converted models and logs."""
    rows: int = 64
    """Maximum number of requests at a time."""
    longest: int = 2048
    """Maximum number of tokens of a request, prompt and output."""

    @property
    def python(self) -> str:
        return str(self.environment / "bin" / "python")

    @property
    def kv_gib(self) -> int:
        """Whole GiB that hold 16-bit K and V of all rows at their longest."""
        config = json.loads((self.model / "config.json").read_text())
        return -(-kv_bytes_per_token(config) * self.rows * self.longest // 2**30)


def kv_bytes_per_token(config: Mapping[str, Any]) -> int:
    """Bytes of keys and values of one token in 16 bits."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * 2 * int(config["num_hidden_layers"] * config["num_key_value_heads"] * width)


def made(target: Path, command: Sequence[str], log: Path, **variables: str) -> Path:
    """``target``, which ``command`` creates unless it exists. Raises Unsupported if the command fails."""
    if not target.exists():
        with log.open("ab") as messages:
            environment = os.environ | variables
            done = subprocess.run(command, stdout=messages, stderr=messages, env=environment, check=False)
        if done.returncode or not target.exists():
            raise Unsupported(f"{Path(command[0]).name} could not make {target.name}; its messages are in {log}")
    return target


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
        with contextlib.suppress(BrokenPipeError), self._process:  # closes the pipes; the child may have ended before
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
