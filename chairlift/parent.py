"""Processes that do not outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG: Final = 1


def die_with_parent(parent: int) -> None:
    """Linux kills this process when ``parent``, which started it, dies. Elsewhere only if it has died already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the kernel knew
        os._exit(1)
