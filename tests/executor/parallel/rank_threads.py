"""Processes 1 and later of a divided model as threads of the test's process, so that an engine starts sooner.

Everything else is real: the sockets, the shared memory, the frames and orders that pass over them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import IO, Any, cast

import pytest

from chairlift.errors import EngineDeadError
from chairlift.executor.parallel import processes
from chairlift.executor.parallel.orders import OrderThread
from chairlift.loading.rank_process import load_rank

__all__ = ["RankThread", "use_threads"]


class RankThread:
    """The part of ``subprocess.Popen`` that :class:`~chairlift.executor.parallel.processes.RankProcesses` uses."""

    def __init__(self, command: Sequence[str], *, pass_fds: tuple[int, int], **how: Any) -> None:
        self.pid = os.getpid()
        sock, file = map(os.dup, pass_fds)
        self._thread = threading.Thread(target=self._run, args=(socket.socket(fileno=sock), file), daemon=True)
        self._thread.start()

    def _run(self, sock: socket.socket, file: int) -> None:
        with sock, cast("IO[bytes]", sock.makefile("rwb")) as pipe:
            runner = load_rank(pipe, sock, file)
            os.close(file)
            assert runner is not None
            OrderThread(pipe, runner).start()
            try:
                runner.serve()
            except EngineDeadError:
                pass
            except BaseException:
                runner.end()
                raise

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Raises subprocess.TimeoutExpired."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("a thread", timeout or 0.0)
        return 0

    def kill(self) -> None:
        """Nothing: a thread cannot be killed. It ends when process 0 closes its socket."""


def use_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines start threads in place of processes."""
    fake = SimpleNamespace(Popen=RankThread, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(processes, "subprocess", fake)
