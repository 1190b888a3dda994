"""Processes that do not outlive the one that started them."""

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
    """Linux kills this process when ``parent``, which started it, dies. Elsewhere only if it has died already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel knew
        os._exit(1)


def has_ended(pid: int) -> bool:
    """Whether a child has ended. Its exit code stays for whoever waits for it, unlike with ``Popen.poll``."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def kill_child(pid: int) -> None:
    """End a child for which the event loop waits. asyncio's own ``kill`` polls first; where the child has just ended
    that takes its exit code from the loop, which then warns and reports 255."""
    if not has_ended(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def child_environment() -> dict[str, str]:
    """For a process with the same packages as here, wherever they were found; and none from the directory that the
    server runs in."""
    kept = {name: os.environ[name] for name in _KEPT_ENVIRONMENT if name in os.environ}
    return kept | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
