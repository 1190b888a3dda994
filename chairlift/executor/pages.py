"""Pages of memory that the operating system would otherwise allocate at their first use, while somebody waits."""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np
import numpy.typing as npt

__all__ = ["populate_pages"]

_MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later: allocates pages and leaves their content as it is."""
_PIECE = 8 << 20
"""Bytes per call of the system, so that others who change the process's memory do not wait long."""


def populate_pages(memory: npt.NDArray[np.uint8]) -> bool:
    """Have the pages of a contiguous array allocated now. The content stays, and other threads may use it meanwhile.

    Returns False if the system does not do it; its pages are then allocated at their first use, as before.
    """
    if sys.platform != "linux":  # elsewhere, the number means something else
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    begin = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    end = memory.ctypes.data + memory.nbytes
    pieces = ((at, min(_PIECE, end - at)) for at in range(begin, end, _PIECE))
    return all(madvise(at, nbytes, _MADV_POPULATE_WRITE) == 0 for at, nbytes in pieces)
