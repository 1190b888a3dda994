"""Controls the OpenMP threads of PyTorch, which go on to occupy processors after an operation has ended."""

from __future__ import annotations

import ctypes
from typing import Final

__all__ = ["end_threads"]

_SOFT: Final = 1
"""Value ``omp_pause_soft`` of OpenMP's type ``omp_pause_resource_t``."""


def end_threads() -> bool:
    """End the OpenMP threads that compute PyTorch's operations for this thread. The next operation starts them again,
    which takes about 0.1 ms.

    After an operation these threads wait actively for several milliseconds. On processors that the native kernels use,
    this makes a step up to a third slower. Returns False if PyTorch's OpenMP library cannot end its threads.
    """
    try:
        pause = ctypes.CDLL(None).omp_pause_resource_all  # importing torch makes the library's names global
    except AttributeError:
        return False
    return int(pause(_SOFT)) == 0
