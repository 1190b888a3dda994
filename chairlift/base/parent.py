"""Processes that end together with their parent."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from typing import Final

__all__ = ["child_environment", "die_with_parent", "has_ended", "kill_child"]

_PR_SET_PDEATHSIG: Final = 1
_LOOK_SECONDS: Final = 0.5
_KEPT_ENVIRONMENT: Final = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHOME", "TZ")


def die_with_parent(parent: int) -> None:
    """End this process when its ``parent`` dies. On Linux the kernel kills it. On other systems, a thread looks every
    half second whether the process has another parent; it needs the GIL, so a long native call delays the end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_exit_after, args=(parent,), name="parent-watch", daemon=True).start()
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)


def _exit_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
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
