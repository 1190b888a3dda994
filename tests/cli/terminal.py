"""A pseudo-terminal, for tests of commands that behave differently on a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time

from tests.preloaded import preloaded

__all__ = ["Terminal"]


class Terminal:
    """A ``chairlift`` command that runs in a pseudo-terminal of its own."""

    def __init__(self, *argv: str, size: tuple[int, int] = (25, 100)) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self.process = preloaded().start(argv, stdin=slave, stdout=slave, stderr=slave, new_session=True)
        os.close(slave)
        self.seen = ""

    def wait_for(self, text: str, seconds: float = 180) -> str:
        """Read until ``text`` appears. Returns all output up to it."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.master], [], [], max(0, end - time.monotonic()))
            assert ready, f"no {text!r} within {seconds} s, but {self.seen[-500:]!r}"
            try:
                self.seen += os.read(self.master, 65536).decode(errors="replace")
            except OSError:  # the other side is closed
                assert text in self.seen
        before, _, self.seen = self.seen.partition(text)
        return before

    def interrupt_at_the_prompt(self) -> None:
        """Press Ctrl-C until it has an effect. A press is lost if it comes after the prompt is printed but before keys
        are read."""
        for _ in range(30):
            self.process.send_signal(signal.SIGINT)
            if select.select([self.master], [], [], 5)[0]:
                return

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def read_to_the_end(self) -> str:
        """All remaining output until the command ends."""
        with contextlib.suppress(OSError):  # the other side is closed
            while data := os.read(self.master, 65536):
                self.seen += data.decode(errors="replace")
        return self.seen

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
