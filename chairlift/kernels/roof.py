"""Limits of a machine (the roofline model: Williams, Waterman and Patterson, 2009).

This module measures the CPU's limits quickly; ``chairlift_lab.bench.limits`` measures them thoroughly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch

from chairlift.base.processors import allowed_processors
from chairlift.kernels.cpu.library import ARM64_ISAS, ISA_NAMES, PRODUCTS, Memory, ThreadPool, require

__all__ = ["ASSUMED_L3", "GPU", "Roof", "l3_bytes", "product_kind", "quick_roof"]

GPU: Final = "gpu"
"""Used for the GPU where a function expects the name of an instruction-set path. The number of threads is then 1."""

ASSUMED_L3: Final = 64 << 20
"""Size of the L3 cache in bytes that is assumed if the system does not report it."""
_CACHES = 3
_MAX_BUFFER = 512 << 20
_MIN_BUFFER = 64 << 20
_TRIALS = 3
_MOMENT = 0.002


@dataclasses.dataclass(frozen=True, slots=True)
class Roof:
    """Limits of a machine for one kind of operation: the bytes per second that it reads from memory, and the operations
    per second that it computes."""

    bandwidth: float
    peak: float

    def seconds(self, nbytes: float, operations: float) -> float:
        """Minimum time in seconds to read ``nbytes`` from memory and to compute ``operations``, if the two overlap
        perfectly."""
        return max(nbytes / self.bandwidth, operations / self.peak)


def product_kind(isa: str, dtype: torch.dtype) -> str:
    """Kind of matrix multiplication (one of :data:`PRODUCTS`) with which the kernels of path ``isa`` multiply
    ``dtype``. Paths without instructions for bf16 multiply float32."""
    if dtype == torch.int8:
        return "int8"
    return "f32" if dtype == torch.float32 or isa in ("avx2", "avx512", "avx512_vnni", *ARM64_ISAS) else "bf16"


def l3_bytes(folder: Path, processors: Iterable[int]) -> int:
    """Total size in bytes of the L3 caches of ``processors``, each cache counted once; 0 if the system describes
    none."""
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


def quick_roof(pool: ThreadPool, isa: str, dtype: torch.dtype) -> Roof:
    """Measure the limits of a path and dtype on the processors of ``pool``. It takes about 100 ms.

    It reads a buffer that is larger than the last-level cache, and multiplies registers; the result is the best of
    three trials. The dtype int8 means weights in codes of any number of bits. Raises OSError without the compiled
    kernels.
    """
    cache = l3_bytes(Path("/sys/devices/system/cpu"), allowed_processors()) or ASSUMED_L3
    memory = Memory(min(max(_CACHES * cache, _MIN_BUFFER), _MAX_BUFFER))
    memory.tensor(torch.uint8, (memory.nbytes,)).fill_(1)  # unwritten pages are all the same physical page
    library = require()
    path = ISA_NAMES.index(isa)
    product = PRODUCTS.index(product_kind(isa, dtype))
    read = max(library.cl_measure_read(pool.handle, memory.address, memory.nbytes) for _ in range(_TRIALS))
    peak = max(library.cl_measure_peak(pool.handle, path, product, _MOMENT) for _ in range(_TRIALS))
    return Roof(read, peak)
