"""Numbers that macOS and the BSDs tell about the machine (``sysctl``)."""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["sysctl_number"]


def sysctl_number(name: str, library: Any = None) -> int | None:
    """The integer that the system has under ``name``, for example ``hw.memsize``. None if the system has no sysctl, as
    Linux, or no such name. ``library`` has the function ``sysctlbyname``; the C library if it is None."""
    function = getattr(ctypes.CDLL(None) if library is None else library, "sysctlbyname", None)
    if function is None:
        return None
    value = ctypes.c_uint64(0)  # integers of 4 bytes fill its lower half: all supported machines are little-endian
    size = ctypes.c_size_t(ctypes.sizeof(value))
    done = function(name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0))
    return value.value if done == 0 else None
