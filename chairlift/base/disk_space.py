"""Space on a disk that a file has before anything is written to it."""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable
from typing import Final

__all__ = ["reserve_space"]

_F_PREALLOCATE: Final = 42
_F_ALLOCATEALL: Final = 4
_F_PEOFPOSMODE: Final = 3
"""Constants of macOS: reserve all of the space or none, after the end of the file's space."""
_BLOCK: Final = 512
"""Bytes that ``st_blocks`` counts."""

Reserve = Callable[[int, int], None]


def reserve_space(descriptor: int, nbytes: int) -> None:
    """Make a file at least ``nbytes`` long and reserve disk space for all of it. Its content stays, and new bytes are
    zero. Raises OSError if the disk is full. Systems without ``posix_fallocate``, as macOS, reserve space by fcntl."""
    _RESERVE(descriptor, nbytes)


def _posix(descriptor: int, nbytes: int) -> None:
    os.posix_fallocate(descriptor, 0, nbytes)


def _by_fcntl(descriptor: int, nbytes: int, control: Callable[[int, int, bytes], object] = fcntl.fcntl) -> None:
    found = os.fstat(descriptor)
    missing = nbytes - found.st_blocks * _BLOCK
    if missing > 0:
        # struct fstore: flags, mode, offset, length, bytes that were allocated
        control(descriptor, _F_PREALLOCATE, struct.pack("=Iiqqq", _F_ALLOCATEALL, _F_PEOFPOSMODE, 0, missing, 0))
    if nbytes > found.st_size:
        os.ftruncate(descriptor, nbytes)


_RESERVE: Final[Reserve] = _posix if hasattr(os, "posix_fallocate") else _by_fcntl
