"""What a machine allows at most (the roofline model: Williams, Waterman and Patterson, 2009).

A quick measurement of it for the CPU; ``workbench.bench.limits`` has the thorough one.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch

from chairlift.kernels.cpu.library import ISA_NAMES, Memory, Pool, require

__all__ = ["ASSUMED_L3", "GPU", "Roof", "l3_bytes", "product_isa", "quick_roof"]

GPU: Final = "gpu"
"""What stands for a path where the limits are those of a device; it counts as one thread."""

ASSUMED_L3: Final = 64 << 20
"""Bytes, where the system doesn't tell."""
_CACHES, _MOST_BUFFER, _LEAST_BUFFER = 3, 512 << 20, 64 << 20
_TRIALS, _MOMENT = 3, 0.002


@dataclasses.dataclass(frozen=True, slots=True)
class Roof:
    """What bounds an operation from below: bytes per second from memory, operations per second."""

    bandwidth: float
    peak: float

    def seconds(self, nbytes: float, operations: float) -> float:
        """The least time for so many bytes and operations, when one hides behind the other perfectly."""
        return max(nbytes / self.bandwidth, operations / self.peak)


def product_isa(isa: str, dtype: torch.dtype) -> str:
    """The path whose product instruction a kernel uses: in float32 the bf16 ones do without their speciality."""
    if dtype == torch.float32 and isa not in ("avx2", GPU):
        return "avx512"
    return isa


def l3_bytes(folder: Path, processors: Iterable[int]) -> int:
    """The L3 caches of ``processors`` together, each counted once though several share it; 0 when none is described."""
    sizes: dict[str, int] = {}
    for processor in processors:
        for index in (folder / f"cpu{processor}" / "cache").glob("index*"):
            try:
                level, size, shared = (
                    (index / name).read_text().strip() for name in ("level", "size", "shared_cpu_list")
                )
                if level == "3":
                    sizes[shared] = int(size.removesuffix("K")) << 10
            except (OSError, ValueError):
                continue
    return sum(sizes.values())


def quick_roof(pool: Pool, isa: str, dtype: torch.dtype) -> Roof:
    """What bounds the kernels of a path in a dtype on the processors of ``pool``, within some 100 ms.

    A buffer larger than the last-level cache is read, and products run from registers: the best of three trials each.
    int8 is that of weights in codes, whatever their bits. Raises OSError without the compiled kernels.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cache = l3_bytes(Path("/sys/devices/system/cpu"), allowed) or ASSUMED_L3
    memory = Memory(min(max(_CACHES * cache, _LEAST_BUFFER), _MOST_BUFFER))
    memory.tensor(torch.uint8, (memory.nbytes,)).fill_(1)  # pages that nobody has written to are one and the same
    library, path, int8 = require(), ISA_NAMES.index(product_isa(isa, dtype)), int(dtype == torch.int8)
    read = max(library.cl_measure_read(pool.handle, memory.address, memory.nbytes) for _ in range(_TRIALS))
    peak = max(library.cl_measure_peak(pool.handle, path, int8, _MOMENT) for _ in range(_TRIALS))
    return Roof(read, peak)
