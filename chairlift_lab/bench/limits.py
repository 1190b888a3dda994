"""Measures the limits of this machine: memory bandwidth in bytes per second, and multiply-add operations per second.

Kernels are compared with these limits (the roofline model: Williams, Waterman and Patterson, 2009). A limit is the best
of several trials, because other programs can only make a trial slower. The median shows how much slower trials became.
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
from chairlift.kernels.cpu.library import ISA_NAMES, PRODUCTS, Memory, ThreadPool, require
from chairlift.kernels.roof import GPU, Roof, product_kind
from chairlift_lab.bench.machine import HostMachine

__all__ = [
    *("Limits", "Peak", "Rate"),
    *("LimitsNow", "beyond_cache", "measure_device", "measure_limits", "thread_counts"),
]

_MOMENT: Final = 0.001
_LEAST_BUFFER: Final = 256 << 20
_CACHES: Final = 4
"""Size of the read buffer as a multiple of the last-level cache, so that no pass finds data in the cache."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rate:
    """Result of several trials of one measurement, in bytes or operations per second."""

    best: float
    median: float


@dataclasses.dataclass(frozen=True, slots=True)
class Peak:
    """Measured speed of the multiply-add instruction of one instruction set, with all operands in registers."""

    isa: str
    product: str
    """Type of the operands: ``f32``, ``bf16`` or ``int8``. On a GPU, its library's name of the dtype."""
    threads: int
    operations: Rate
    """Number of additions and multiplications per second."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Measured limits of this machine."""

    buffer_bytes: int
    """Number of bytes that each trial read from memory."""
    read: dict[int, Rate]
    """Number of threads -> bytes read per second."""
    peaks: tuple[Peak, ...]
    memory: str = "memory read"
    """Label of the memory traffic that ``read`` measures, for reports."""

    def roof(self, isa: str, dtype: torch.dtype, threads: int) -> Roof:
        """Limits for kernels of one instruction set (``isa``), dtype and number of threads.

        ``torch.int8`` stands for quantised weights of any number of bits. Raises ConfigError if these limits were not
        measured.
        """
        kind = product_kind(isa, dtype)
        for peak in self.peaks:
            same = peak.product == kind or (isa == GPU and kind != "int8")
            if same and (peak.isa, peak.threads) == (isa, threads) and threads in self.read:
                return Roof(self.read[threads].best, peak.operations.best)
        raise ConfigError(f"the limits of {isa} with {threads} threads were not measured; measure them first")


def thread_counts(maximum: int, *others: int) -> list[int]:
    """Thread counts to measure, ascending: the powers of two up to ``maximum``, ``maximum`` itself, and ``others``."""
    return sorted({*(1 << power for power in range(maximum.bit_length())), maximum, *others})


def beyond_cache(machine: HostMachine) -> int:
    """Size in bytes of a buffer that does not fit into the last-level cache, limited to a quarter of the free
    memory."""
    affordable = available_memory(torch.device("cpu")) // 4
    return min(max(_CACHES * machine.l3_bytes, _LEAST_BUFFER), affordable)


def measure_limits(machine: HostMachine, threads: int, *, quick: bool = False) -> Limits:
    """Measure the limits of this machine's processors.

    Memory is read with 1, 2, 4, ... threads, up to one per processor. The multiply-add instructions of every kernel
    path run with 1 thread and with ``threads`` threads. ``quick`` shortens the trials. Raises OSError if the compiled
    kernels are missing.
    """
    library = require()
    nbytes = beyond_cache(machine)
    memory = Memory(nbytes)
    memory.tensor(torch.uint8, (nbytes,)).fill_(1)  # unwritten pages are all the same physical page
    seconds, trials = (0.01, 5) if quick else (0.05, 7)
    read: dict[int, Rate] = {}
    peaks: list[Peak] = []
    for count in thread_counts(max(threads, machine.processors), threads):
        pool = ThreadPool(count)
        read[count] = _rate(partial(library.cl_measure_read, pool.handle, memory.address, nbytes), trials)
        for isa, kind in product(machine.isas if count in (1, threads) else (), PRODUCTS):
            path = ISA_NAMES.index(isa)
            number = PRODUCTS.index(kind)
            rate = _rate(partial(library.cl_measure_peak, pool.handle, path, number, seconds), trials)
            if rate.best > 0:  # 0: the path has no such instruction
                peaks.append(Peak(isa, kind, count, rate))
        pool.close()
    return Limits(nbytes, read, tuple(peaks))


class LimitsNow:
    """Measures the present limits for the kernels of one instruction set and dtype, within a few milliseconds per call.

    The limits of a virtual machine change over time, because its processors move between physical processors, which may
    or may not share a memory channel.
    """

    def __init__(self, pool: ThreadPool, machine: HostMachine, isa: str, dtype: torch.dtype) -> None:
        self._pool = pool
        self._path = ISA_NAMES.index(isa)
        self._product = PRODUCTS.index(product_kind(isa, dtype))
        self._memory = Memory(min(max(_CACHES * machine.l3_bytes, _LEAST_BUFFER // 4), beyond_cache(machine)))
        self._memory.tensor(torch.uint8, (self._memory.nbytes,)).fill_(1)

    def __call__(self) -> Roof:
        library = require()
        pool = self._pool.handle
        read = partial(library.cl_measure_read, pool, self._memory.address, self._memory.nbytes)
        multiply = partial(library.cl_measure_peak, pool, self._path, self._product, _MOMENT)
        return Roof(_rate(read, 2).best, _rate(multiply, 2).best)


def measure_device(device: torch.device, dtype: torch.dtype, *, quick: bool = False) -> Limits:
    """Measure the limits of a GPU with the vendor's libraries.

    Bandwidth is the bytes that a copy within the GPU's memory reads and writes. Speed is that of square matrix
    multiplications in ``dtype``. Matrices in fp8 have one scale per row and a result in bfloat16.

    ``quick`` uses small copies and matrices. Raises torch.OutOfMemoryError if less than about a gigabyte is free.
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
    """Mean time of one call of ``work``, in seconds, after a warm-up call."""

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
