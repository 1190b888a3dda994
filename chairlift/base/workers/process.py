"""One worker process, as the server sees it, and the rule that says why a process has ended."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import signal
import sys
import time
from typing import Any, Final

from chairlift.base.parent import child_environment, has_ended, kill_child
from chairlift.base.workers.frames import HEADER, fields_of, lengths

__all__ = ["Ending", "WorkerProcess", "ending_of"]

_TICK: Final = 1 / os.sysconf("SC_CLK_TCK")
_EXIT_SECONDS: Final = 1.0
"""Seconds to wait for the exit status of a process after the end of its pipe."""
_PIPE_BUFFER: Final = 1 << 20
"""Number of bytes of a reply that are read before the pipe is paused."""
_OWN_SIGNALS: Final = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS})
"""Signals that end a worker when it has no more memory inside a library. Any other signal comes from outside: from an
operator, or from the kernel when the machine has no free memory."""


class Ending(enum.Enum):
    """Reason why a process has ended."""

    TIME = "time"
    """The kernel ended it at its limit of processor time."""
    OWN = "own"
    """It ended by itself: by an error, or at its limit of memory."""
    OUTSIDE = "outside"
    """A signal from outside ended it."""


def ending_of(code: int) -> Ending:
    """The :class:`Ending` of a process with the exit status ``code``, which is negative for a signal."""
    if code == -signal.SIGXCPU:
        return Ending.TIME
    return Ending.OUTSIDE if code < 0 and -code not in _OWN_SIGNALS else Ending.OWN


class WorkerProcess:
    """One worker process, as the server sees it."""

    def __init__(self, process: asyncio.subprocess.Process, stdin: asyncio.StreamWriter, stdout: asyncio.StreamReader):
        self._process = process
        self._stdin = stdin
        self._stdout = stdout
        self.pid = process.pid

    @classmethod
    async def start(cls, module: str) -> WorkerProcess:
        """Start the program ``module``. Raises OSError if the system cannot."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", module, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(),
            limit=_PIPE_BUFFER,
            # Ctrl-C signals the terminal's whole process group, and a worker that is still starting would not ignore it
            start_new_session=True,
        )
        if process.stdin is None or process.stdout is None:
            raise OSError("no pipes")
        return cls(process, process.stdin, process.stdout)

    @property
    def alive(self) -> bool:
        # The event loop may not have noticed the end of the process yet.
        return not (self._process.returncode is not None or self._stdout.at_eof() or has_ended(self.pid))

    def seconds_computed(self) -> float | None:
        """Processor seconds that the process has used; None if it has ended. Elapsed seconds if the system does not
        report processor time."""
        try:
            # this runs for each request, and it is twice as fast as read_text
            with open(f"/proc/{self.pid}/stat", "rb", 0) as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return time.monotonic() if self.alive else None
        return (int(fields[11]) + int(fields[12])) * _TICK

    async def ask(self, frame: bytes, max_bytes: int) -> dict[str, Any]:
        """Send a frame and return the worker's reply, which has at most ``max_bytes`` bytes.

        Raises OSError or EOFError if the process dies, and ValueError for an invalid reply.
        """
        try:
            self._stdin.write(frame)
        except RuntimeError as error:  # uvloop's way to say that the pipe is closed
            raise BrokenPipeError(str(error)) from None
        await self._stdin.drain()
        num_text, num_data = lengths(await self._stdout.readexactly(HEADER))
        if num_text + num_data > max_bytes:
            raise ValueError(f"a frame of {num_text + num_data:,} bytes, of at most {max_bytes:,}")
        body = await self._stdout.readexactly(num_text)
        return fields_of(body, await self._stdout.readexactly(num_data))

    async def ending(self) -> Ending:
        """The :class:`Ending` of a process whose pipe has ended."""
        try:
            return ending_of(await asyncio.wait_for(self._process.wait(), _EXIT_SECONDS))
        except TimeoutError:  # it closed its pipe and still runs
            return Ending.OWN

    def kill(self) -> None:
        kill_child(self.pid)

    async def wait(self) -> None:
        """Wait until a killed process has ended and its pipes are closed."""
        await self._process.wait()
        self._stdin.close()
        with contextlib.suppress(OSError):
            await self._stdin.wait_closed()
