"""Runs a program with limits from outside an event loop, and a second time if something killed it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence

from chairlift.base.parent import child_environment
from chairlift.base.workers.process import Ending, ending_of

__all__ = ["run_twice"]


def run_twice(command: Sequence[str], seconds: float) -> tuple[int, bytes]:
    """Run ``command`` for at most ``seconds``. Returns (its exit status, its output). The status is that of
    SIGXCPU if the time was up. A program that a signal from outside ended runs a second time."""
    for last in (False, True):
        try:
            done = subprocess.run(
                command, env=child_environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return -signal.SIGXCPU, b""
        if last or ending_of(done.returncode) is not Ending.OUTSIDE:
            break
    return done.returncode, done.stdout
