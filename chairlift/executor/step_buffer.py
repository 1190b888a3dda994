"""A step's arrays on their way to the device: packed into one piece of pinned memory, sent with one copy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

__all__ = ["StepBuffer"]

_ALIGNMENT = 16
"""Bytes. Triton compiles a kernel once more for arrays that lie differently."""


class StepBuffer:
    """Memory on the device that holds one step's arrays. Arrays of the same sizes always lie at the same addresses.

    Two pieces of host memory take turns: the host fills one while the copy out of the other may still be waiting.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._resize(0)

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Tensor]:
        """The arrays on the device, valid until the next call; nothing waits but for the copy before last."""
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
        """Half as much again, so that slowly growing steps do not resize every time."""
        size += size // 2
        self._memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._hosts = itertools.cycle([self._host(size) for _ in range(2)])

    def _host(self, size: int) -> tuple[Tensor, torch.cuda.Event | None]:
        pinned = self._device.type == "cuda"
        event = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned), event
