"""A real ``chairlift serve``: its processes, their resources, and its exit."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.preloaded import Child, preloaded

__all__ = ["PATIENCE", "Held", "ServerProcess", "alive", "metrics_of"]

PATIENCE = 120.0
"""Seconds after which an event that was expected is considered missing."""
_LOOK = 0.02
_READY = re.compile(r"ready at http://127\.0\.0\.1:(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Resources of the server's processes that a request could leave behind."""

    tasks: int
    """Number of tasks of the API process's event loop."""
    sockets: int
    """Number of sockets of the API process and the engine."""
    files: int
    """Number of file descriptors of the API process and the engine."""
    threads: int
    """Number of threads of the API process and the engine."""


class ServerProcess:
    """``chairlift serve MODEL FLAGS`` on a free port, as a context manager. It is killed at the end if it still
    runs."""

    def __init__(self, model: str = "hashlm", *flags: str, environment: dict[str, str] | None = None) -> None:
        self.model = model
        self.flags = flags
        self.port = 0
        self._environment = environment
        self._folder = tempfile.TemporaryDirectory(prefix="chairlift-e2e-")
        self._log = Path(self._folder.name, "log")
        self._process: Child | subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if kind is not None and self._log.exists():
            print(f"--- log of {self.model} {' '.join(self.flags)}\n{self.log()[-4000:]}", file=sys.stderr)
        self._folder.cleanup()

    def start(self, port: int = 0) -> None:
        """Start the server, or start it again after it has ended, and wait until it is ready."""
        before = len(self.log())
        argv = ["serve", self.model, "--port", str(port), *self.flags]
        with self._log.open("ab") as log, open(os.devnull, "rb") as nothing:
            if self._environment is None:
                self._process = preloaded().start(argv, stdin=nothing, stdout=log, stderr=log, new_session=True)
            else:  # it may have what an interpreter does at its start
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "chairlift", *argv],
                    stdin=nothing,
                    stdout=log,
                    stderr=log,
                    process_group=0,
                    env=os.environ | self._environment,
                )
        end = time.monotonic() + 2 * PATIENCE
        while (found := _READY.search(self.log()[before:])) is None:
            if self._process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"the server did not start: {self.log()[before:]}")
            time.sleep(_LOOK)
        self.port = int(found[1])

    def log(self) -> str:
        """Output of the server so far."""
        return self._log.read_text("utf-8", "replace") if self._log.exists() else ""

    # -- its processes ---------------------------------------------------------------------------------------------

    @property
    def process(self) -> Child | subprocess.Popen[bytes]:
        """The API process."""
        if self._process is None:
            raise AssertionError("the server was not started")
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    def children(self) -> list[int]:
        """Running child processes of the API process."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == self.pid]

    def engine_pid(self) -> int | None:
        """Process id of the engine; None if there is none."""
        found = [pid for pid in self.children() if "chairlift.engine.process.engine_process" in _command_line(pid)]
        if len(found) > 1:
            raise AssertionError(f"there are several engines: {found}")
        return found[0] if found else None

    def engine(self) -> int:
        """Process id of the engine, which must exist."""
        pid = self.engine_pid()
        if pid is None:
            raise AssertionError("there is no engine")
        return pid

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def ended(self, seconds: float = PATIENCE) -> int:
        """Wait for the end of the API process. Returns its exit code."""
        end = time.monotonic() + seconds
        while (code := self.process.poll()) is None:
            if time.monotonic() > end:
                raise AssertionError(f"the server still runs after {seconds:g} s")
            await asyncio.sleep(_LOOK)
        return code

    # -- what they hold --------------------------------------------------------------------------------------------

    def held(self, tasks: int) -> Held:
        """Resources that the processes hold now. ``tasks`` is the number of tasks according to ``/metrics``."""
        pids = [self.pid, self.engine()]
        files = [name for pid in pids for name in _files(pid)]
        threads = sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids)
        return Held(tasks, sum(name.startswith("socket:") for name in files), len(files), threads)

    def num_files(self) -> int:
        """Number of open file descriptors of the API process."""
        return len(_files(self.pid))

    def memory(self) -> int:
        """Resident memory of the API process in bytes."""
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def alive(pid: int) -> bool:
    """Whether a process runs. A zombie, which has ended but was not waited for, does not run."""
    try:
        return _stat(pid)[0] not in "ZX"
    except OSError:
        return False


def metrics_of(text: str) -> dict[str, float]:
    """Name -> value of ``/metrics``, summed over the labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the process state on. The name, which comes before the state, may contain any
    character."""
    return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()


def _parent(pid: int) -> int | None:
    try:
        state, parent = _stat(pid)[:2]
    except OSError:
        return None
    return None if state in "ZX" else int(parent)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""


def _files(pid: int) -> list[str]:
    names: list[Any] = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            names.append(os.readlink(entry.path))
        except OSError:  # closed meanwhile
            continue
    return names
