"""Copies the arrays of a step to the device, and its results back, through pinned host memory.

A copy from or to ordinary host memory would wait until the device has finished all earlier work.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["ReturnBuffers", "StepBuffer", "to_device"]

_ALIGNMENT = 16
"""Number of bytes of which each array's address is a multiple. Triton compiles a separate kernel for each alignment of
its arguments."""


_HostBuffer = tuple[Tensor, torch.cuda.Event | None]
"""(host memory, event). The memory is pinned if there is a GPU; the event is set when the newest copy from or to the
memory is done."""


def _host_buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> _HostBuffer:
    """Host memory for asynchronous copies from and to ``device``, and the event that tells when the newest copy is
    done."""
    pinned = device.type == "cuda"
    event = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
    return torch.empty(shape, dtype=dtype, pin_memory=pinned), event


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A copy of ``array`` on the device, queued after earlier work of the device. On the CPU: the array itself, without
    a copy."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))  # a strided array would be copied through ordinary memory
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class StepBuffer:
    """Memory on the device that holds the arrays of one step. Arrays of the same sizes always get the same addresses.

    Two host buffers are used in turns: the host fills one while the copy from the other may still be in progress.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._resize(0)

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
        """Start to copy the arrays to the device, and return them as tensors there. They are valid until the next call.
        The method waits only until the copy before the previous one is done."""
        starts = [0, *itertools.accumulate(-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)]
        if starts[-1] > len(self._memory):
            self._resize(starts[-1])
        host, copied = next(self._hosts)
        if copied is not None:
            copied.synchronize()
        filled = host.numpy()
        for start, array in zip(starts, arrays, strict=False):
            filled[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._memory[: starts[-1]].copy_(host[: starts[-1]], non_blocking=True)
        if copied is not None:
            copied.record()
        return [self._view(start, array) for start, array in zip(starts, arrays, strict=False)]

    def _view(self, start: int, array: npt.NDArray[Any]) -> Tensor:
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        return self._memory[start : start + array.nbytes].view(dtype).view(array.shape)

    def _resize(self, size: int) -> None:
        """Allocate memory for 1.5 times ``size`` bytes, so that slowly growing steps do not resize it every time."""
        size += size // 2
        self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._hosts = itertools.cycle([_host_buffer((size,), torch.uint8, self._device) for _ in range(2)])


class ReturnBuffers:
    """Host memory to which results of at most the shape ``shape`` are copied. A buffer is in use until its result has
    been read, so there are as many buffers as unread results."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._kind = shape, dtype, device
        self._free: list[_HostBuffer] = []

    def fetch(self, result: Tensor) -> Callable[[], npt.NDArray[Any]]:
        """Start to copy ``result`` to the host; later launches may overwrite it. Returns a function that waits until
        the copy is complete, and returns the copied array. Call this function once."""
        host, copied = piece = self._free.pop() if self._free else _host_buffer(*self._kind)
        host[: len(result)].copy_(result, non_blocking=True)
        if copied is not None:
            copied.record()

        def read() -> npt.NDArray[Any]:
            if copied is not None:
                copied.synchronize()
            array: npt.NDArray[Any] = host[: len(result)].numpy().copy()
            self._free.append(piece)
            return array

        return read
