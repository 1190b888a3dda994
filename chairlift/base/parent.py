"""Processes that end together with their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import Final

__all__ = ["child_environment", "die_with_parent", "has_ended", "kill_child"]

_PR_SET_PDEATHSIG: Final = 1
_KEPT_ENVIRONMENT: Final = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHOME", "TZ")


def die_with_parent(parent: int) -> None:
    """On Linux, let the kernel kill this process when its ``parent`` dies. On other systems, exit only if the parent is
    dead already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)


def has_ended(pid: int) -> bool:
    """Whether a child process has ended. Unlike ``Popen.poll``, this call leaves the exit code for another caller."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def kill_child(pid: int) -> None:
    """Kill a child process that the event loop waits for. asyncio's own ``kill`` polls first, and the poll may take the
    exit code; the event loop then warns and reports 255."""
    if not has_ended(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def child_environment() -> dict[str, str]:
    """Environment variables for a child process that finds the same packages as this process, but no packages in the
    working directory."""
    inherited = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
    return inherited | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
