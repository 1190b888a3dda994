"""Measures the limits of this machine: bytes read from memory per second, and product instructions per second.

Kernels are compared with them (the roofline model: Williams, Waterman and Patterson, 2009). A limit is the best of
several trials, because disturbances only make a trial slower. The median shows how large they were.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Final

import torch

from chairlift.errors import ConfigError
from chairlift.executor.kv_tensors import available_memory
from chairlift.kernels.cpu.library import ISA_NAMES, Memory, Pool, require
from chairlift.kernels.roof import GPU, Roof, product_isa
from chairlift.workbench.bench.machine import Machine

__all__ = [
    *("Limits", "Peak", "Rate"),
    *("LimitsNow", "beyond_cache", "measure_device", "measure_limits", "thread_counts"),
]

_MOMENT: Final = 0.001
_LEAST_BUFFER: Final = 256 << 20
_CACHES: Final = 4
"""A buffer this many times the last-level cache leaves nothing of one pass for the next."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rate:
    """Trials of one measurement, per second."""

    best: float
    median: float


@dataclasses.dataclass(frozen=True, slots=True)
class Peak:
    """Speed of one path's product instruction, with operands in registers."""

    isa: str
    product: str
    """``bf16``, ``f32`` (what paths without a bf16 product make one from) or ``int8``."""
    threads: int
    operations: Rate
    """Additions and multiplications per second."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Measured limits of this machine."""

    buffer_bytes: int
    """Bytes of memory that each trial read."""
    read: dict[int, Rate]
    """Threads -> bytes per second."""
    peaks: tuple[Peak, ...]
    memory: str = "memory read"
    """Kind of memory traffic that ``read`` is the rate of, in words."""

    def roof(self, isa: str, dtype: torch.dtype, threads: int) -> Roof:
        """Limits for kernels of one path in a dtype; int8 means weights in codes of any number of bits. Raises
        ConfigError for limits that were not measured."""
        wanted = product_isa(isa, dtype), threads, dtype == torch.int8
        for peak in self.peaks:
            if (peak.isa, peak.threads, peak.product == "int8") == wanted and threads in self.read:
                return Roof(self.read[threads].best, peak.operations.best)
        raise ConfigError(f"the limits of {isa} with {threads} threads were not measured; measure them first")


def thread_counts(most: int, *others: int) -> list[int]:
    """1, 2, 4, ... up to ``most``, with ``most`` and ``others``, in ascending order."""
    return sorted({*(1 << power for power in range(most.bit_length())), most, *others})


def beyond_cache(machine: Machine) -> int:
    """Number of bytes to cycle through so that none stays in the last-level cache, if memory allows so many."""
    affordable = available_memory(torch.device("cpu")) // 4
    return min(max(_CACHES * machine.l3_bytes, _LEAST_BUFFER), affordable)


def measure_limits(machine: Machine, threads: int, *, quick: bool = False) -> Limits:
    """Reading of memory with 1, 2, 4, ... threads up to all, and products of every path with 1 and ``threads``.

    ``quick`` takes shorter trials. Raises OSError without the compiled kernels.
    """
    library = require()
    nbytes = beyond_cache(machine)
    memory = Memory(nbytes)
    memory.tensor(torch.uint8, (nbytes,)).fill_(1)  # unwritten pages are all the same physical page
    seconds, trials = (0.01, 5) if quick else (0.05, 7)
    read: dict[int, Rate] = {}
    peaks: list[Peak] = []
    for count in thread_counts(max(threads, machine.processors), threads):
        pool = Pool(count)
        read[count] = _rate(partial(library.cl_measure_read, pool.handle, memory.address, nbytes), trials)
        for isa, int8 in product(machine.isas if count in (1, threads) else (), (0, 1)):
            rate = _rate(partial(library.cl_measure_peak, pool.handle, ISA_NAMES.index(isa), int8, seconds), trials)
            if rate.best > 0:  # zero: the path has no such product
                name = "int8" if int8 else "bf16" if isa in ("avx512_bf16", "amx") else "f32"
                peaks.append(Peak(isa, name, count, rate))
        pool.close()
    return Limits(nbytes, read, tuple(peaks))


class LimitsNow:
    """Limits for kernels of one path in a dtype at this moment, measured within a few milliseconds.

    Processors of a virtual machine are moved about: now they share a link to memory, and now each has its own.
    """

    def __init__(self, pool: Pool, machine: Machine, isa: str, dtype: torch.dtype) -> None:
        self._pool, self._path = pool, ISA_NAMES.index(product_isa(isa, dtype))
        self._int8 = int(dtype == torch.int8)
        self._memory = Memory(min(max(_CACHES * machine.l3_bytes, _LEAST_BUFFER // 4), beyond_cache(machine)))
        self._memory.tensor(torch.uint8, (self._memory.nbytes,)).fill_(1)

    def __call__(self) -> Roof:
        library, pool = require(), self._pool.handle
        read = partial(library.cl_measure_read, pool, self._memory.address, self._memory.nbytes)
        return Roof(
            _rate(read, 2).best, _rate(partial(library.cl_measure_peak, pool, self._path, self._int8, _MOMENT), 2).best
        )


def measure_device(device: torch.device, dtype: torch.dtype, *, quick: bool = False) -> Limits:
    """Limits that a device reaches with its own libraries: bytes that a copy within its memory reads and writes, and
    products of square matrices in ``dtype``. Products of fp8 have a scale for each row, and results in bfloat16.

    ``quick`` takes small copies and matrices. Raises torch.OutOfMemoryError where less than a gigabyte is free.
    """
    nbytes, size, repeats, trials = (16 << 20, 256, 2, 3) if quick else (1 << 30, 8192, 10, 7)
    nbytes = min(nbytes, available_memory(device) // 4)
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    square = torch.randn(size, size, device=device).to(dtype)
    copied = _rate(lambda: 2 * nbytes / _seconds(lambda: target.copy_(source), device, repeats), trials)
    multiply: Callable[[], object] = partial(torch.mm, square, square, out=torch.empty_like(square))
    if dtype == torch.float8_e4m3fn:
        ones = torch.ones(size, 1, device=device)
        multiply = partial(torch._scaled_mm, square, square.t(), ones, ones.t(), out_dtype=torch.bfloat16)
    multiplied = _rate(lambda: 2 * size**3 / _seconds(multiply, device, repeats), trials)
    name = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float8_e4m3fn: "fp8"}.get(dtype, "f32")
    return Limits(nbytes, {1: copied}, (Peak(GPU, name, 1, multiplied),), "memory read and written by a copy")


def _seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Mean seconds of one repeat, after a first one that only warms up."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    work()
    wait()
    begin = time.perf_counter()
    for _ in range(repeats):
        work()
    wait()
    return (time.perf_counter() - begin) / repeats


def _rate(trial: Callable[[], float], count: int) -> Rate:
    rates = [trial() for _ in range(count)]
    return Rate(max(rates), statistics.median(rates))
