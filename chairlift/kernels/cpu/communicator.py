"""Processes that run step programs together, and the memory that they share.

The memory is one unnamed file (memfd), so it needs no ``/dev/shm`` and disappears with the last process. Its size is
only an upper limit: the system allocates a page when it is first used.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from chairlift.errors import EngineDeadError
from chairlift.kernels.cpu.library import require

__all__ = ["MAX_RANKS", "Communicator", "shared_file"]

MAX_RANKS: Final = 64
"""Maximum number of processes: ``kMaxRanks`` of ``csrc/cpu/comm.h``."""

_FILE_BYTES: Final = 1 << 40
"""Size of the file. Only used pages take memory."""


def shared_file() -> int:
    """File descriptor of new memory for one :class:`Communicator` in each process. Raises OSError."""
    file = os.memfd_create("chairlift", os.MFD_CLOEXEC)
    os.ftruncate(file, _FILE_BYTES)
    return file


class Communicator:
    """The view of one process, number ``rank`` of ``size``, on the memory ``file`` of :func:`shared_file`.

    All processes must ask for the same memory in the same order. ``lives`` are sockets to other processes: when such a
    process ends, every wait ends. A process that lets the others wait for longer than ``patience`` seconds counts as
    ended. Functions that wait raise EngineDeadError then, and always after :meth:`end`. Raises ValueError for a rank or
    size that is not allowed.
    """

    def __init__(self, file: int, rank: int, size: int, lives: Sequence[int] = (), patience: float = 60.0) -> None:
        self._library = require()
        self.rank = rank
        self.size = size
        self.patience = patience
        self._file = os.dup(file)
        self._at = 0
        counters = self._map(self._library.cl_comm_bytes())
        sockets = (ctypes.c_int32 * len(lives))(*lives)
        handle = self._library.cl_comm_create(
            ctypes.addressof(ctypes.c_char.from_buffer(counters)), rank, size, sockets, len(lives), patience
        )
        if not handle:
            raise ValueError(f"rank {rank} of {size} processes is not possible; there may be 1 to {MAX_RANKS}")
        self.handle: int = handle
        """Address of the C struct ``cl_comm``."""
        self._kept = counters, lives
        weakref.finalize(self, _close, handle, self._file).atexit = False

    def meet(self) -> None:
        """Wait until every process has called this method as often as this one. What a process wrote to shared memory
        before is then visible to all."""
        self.check(self._library.cl_comm_meet(self.handle))

    def wait_for_readers(self) -> None:
        """In process 0: wait until all have read the last message, so that the next may be written."""
        self.check(self._library.cl_comm_wait_for_readers(self.handle))

    def send(self) -> None:
        """In process 0: tell the others that a message has been written."""
        self._library.cl_comm_send(self.handle)

    def wait_for_message(self) -> None:
        """In another process: wait for the next message of process 0, however long it takes."""
        self.check(self._library.cl_comm_wait_for_message(self.handle))

    def read(self) -> None:
        """In another process: say that the message was read."""
        self._library.cl_comm_read(self.handle)

    def look(self) -> None:
        """In process 0, between two steps: raise EngineDeadError if another process has ended, or hangs. It hangs if it
        has shown no sign of life for ``patience`` seconds in which this method was called at least every 2 seconds."""
        self.check(self._library.cl_comm_look(self.handle))

    def check_end(self) -> None:
        """Raise EngineDeadError if this process knows that another has ended. Any thread may call it."""
        self.check(self._library.cl_comm_ended(self.handle))

    def end(self) -> None:
        """End every wait of all processes. Any thread may call it."""
        self._library.cl_comm_end(self.handle)

    @property
    def waited(self) -> float:
        """Seconds that this process has waited for others in meetings and GATHER operations."""
        return float(self._library.cl_comm_waited(self.handle))

    @property
    def meetings(self) -> int:
        """Number of meetings and GATHER operations so far."""
        return int(self._library.cl_comm_meetings(self.handle))

    def tensor(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Shared memory as a tensor, zero at first."""
        memory = self._map(math.prod(shape) * dtype.itemsize)
        return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(*shape)

    def array(self, dtype: np.typing.DTypeLike, shape: Sequence[int]) -> np.ndarray[Any, Any]:
        """Shared memory as an array, zero at first."""
        kind: np.dtype[Any] = np.dtype(dtype)
        return np.frombuffer(self._map(math.prod(shape) * kind.itemsize), kind, math.prod(shape)).reshape(shape)

    def check(self, code: int) -> None:
        """Raise EngineDeadError if ``code``, the result of a function of the library, says that a process ended."""
        if code == -2:
            raise EngineDeadError(
                f"another process of tensor_parallel_size {self.size} ended, or did not answer for"
                f" {self.patience:g} s; the model must be loaded again"
            )

    def _map(self, nbytes: int) -> mmap.mmap:
        """The next bytes of the file."""
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(self._file, size, offset=self._at)
        self._at += size
        return memory


def _close(handle: int, file: int) -> None:
    require().cl_comm_destroy(handle)
    os.close(file)
