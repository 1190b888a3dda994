"""``chairlift`` commands as child processes that are forked from one process, which has imported everything already.

A new interpreter spends one or two seconds of processor time on imports. Only tests of the start itself need one.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

__all__ = ["Child", "preloaded", "run"]

_ROOT = Path(__file__).parents[1]
_STATUS = struct.Struct("i")
_MOST_BYTES = 1 << 18


class Child:
    """A command that was started; the part of ``subprocess.Popen`` that tests use."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """Exit code, -N for a child that signal N killed, or None while the child runs."""
        return self._read_status(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the child. Returns its exit code; raises TimeoutExpired after ``timeout`` seconds."""
        code = self._read_status(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it may have ended since the question
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def _read_status(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                data = self._status.recv(_STATUS.size)
            except (TimeoutError, BlockingIOError):
                return None
            (self.returncode,) = _STATUS.unpack(data)
            self._status.close()
        return self.returncode


class Preloaded:
    """The process that forks. It ends when this process ends or calls :meth:`close`."""

    def __init__(self) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.preloaded", str(theirs.fileno())],
                cwd=_ROOT,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
            )

    def start(
        self,
        argv: Sequence[str | Path],
        *,
        stdin: int | IO[bytes],
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
        environment: Mapping[str, str] | None = None,
        new_session: bool = False,
    ) -> Child:
        """Start ``chairlift ARGV`` with these files, in a session of its own if ``new_session``."""
        ours, theirs = socket.socketpair()
        wanted = {
            "argv": [str(each) for each in argv],
            "environment": dict(os.environ if environment is None else environment),
            "folder": os.getcwd(),
            "new_session": new_session,
        }
        with theirs:
            files = [each if isinstance(each, int) else each.fileno() for each in (stdin, stdout, stderr)]
            socket.send_fds(self._sock, [json.dumps(wanted).encode()], [theirs.fileno(), *files])
        (pid,) = _STATUS.unpack(ours.recv(_STATUS.size))
        return Child(pid, ours)

    def close(self) -> None:
        self._sock.close()
        self._process.wait()


@functools.cache
def preloaded() -> Preloaded:
    """The one process of this kind that this process has. It is started by the first call."""
    process = Preloaded()
    atexit.register(process.close)
    return process


def run(
    argv: Sequence[str | Path], *, timeout: float = 300, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``chairlift ARGV`` without input, and return its exit code, its output and its error output."""
    out, err = (open(os.memfd_create(name), "w+b") for name in ("out", "err"))  # noqa: SIM115
    with out, err, open(os.devnull, "rb") as nothing:
        child = preloaded().start(argv, stdin=nothing, stdout=out, stderr=err, environment=environment)
        try:
            code = child.wait(timeout)
        finally:
            child.kill()
        texts = [os.pread(each.fileno(), os.fstat(each.fileno()).st_size, 0).decode() for each in (out, err)]
    return subprocess.CompletedProcess([str(each) for each in argv], code, *texts)


# -- the process that forks --------------------------------------------------------------------------------------------


def _serve(sock: socket.socket) -> None:
    """Fork a child for each message, until the other side closes the connection. Returns in no child."""
    while True:
        data, files, _, _ = socket.recv_fds(sock, _MOST_BYTES, 4)
        if not data:
            return
        if os.fork() == 0:
            sock.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _watch(json.loads(data), *files)
        for file in files:
            os.close(file)


def _watch(wanted: dict[str, object], status: int, *files: int) -> None:
    """Fork the child, tell its process id, wait for its end, and tell its exit code. Returns in the child only."""
    with socket.socket(fileno=status) as told:
        pid = os.fork()
        if pid:
            for file in files:
                os.close(file)
            told.send(_STATUS.pack(pid))
            told.send(_STATUS.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
            os._exit(0)
    _become(wanted, files)
    atexit.register(gc.unfreeze)  # else libraries say at the exit that their objects were leaked
    from chairlift.__main__ import entry_point

    entry_point()


def _become(wanted: dict[str, object], files: Sequence[int]) -> None:
    """Take the files, the environment and the arguments of the command."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if wanted["new_session"]:
        os.setsid()
    environment, argv = wanted["environment"], wanted["argv"]
    assert isinstance(environment, dict) and isinstance(argv, list)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(str(wanted["folder"]))
    sys.argv = ["chairlift", *argv]
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", -1, "utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, "utf-8", "backslashreplace", closefd=False)


_MODULES = (
    *("chairlift.cli.main", "chairlift.llm", "chairlift.server.http.app", "chairlift.engine.process.engine_process"),
    *("chairlift.executor.select", "chairlift.executor.backends.native.native_runner", "chairlift.models.loader"),
    *("chairlift.models.fallback.model", "chairlift.models.formats.quantized_checkpoints", "chairlift.lora.bank"),
    *("chairlift.executor.sampling.sampler", "chairlift.kernels.triton.launch", "torch._dynamo"),
)
"""Modules that most commands import sooner or later."""


def _main() -> None:
    from chairlift.cli.commands import COMMANDS

    for module in (*COMMANDS.values(), *_MODULES):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # a collection in a child would copy the pages of all these objects
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that watch
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    _serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    _main()
