from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch

from chairlift.errors import ConfigError
from chairlift.executor.kv_tensors import available_memory
from chairlift.kernels.cpu.library import default_threads, supported_isas
from chairlift.kernels.roof import GPU, Roof, l3_bytes, product_kind
from chairlift_lab.bench import machine as machines
from chairlift_lab.bench.limits import (
    Limits,
    Peak,
    Rate,
    beyond_cache,
    measure_device,
    measure_limits,
    thread_counts,
)
from chairlift_lab.bench.machine import HostMachine, describe_machine
from tests.native import needs_kernels
from tests.rowwise import needs_rowwise_products

GIB = 1 << 30


@pytest.fixture(scope="module")
def machine() -> HostMachine:
    return describe_machine()


def rate(value: float) -> Rate:
    return Rate(value, value)


def test_a_roof_is_the_longer_of_two_times() -> None:
    roof = Roof(bandwidth=10.0, peak=100.0)
    assert roof.seconds(50, 100) == 5
    assert roof.seconds(50, 1000) == 10


@pytest.mark.parametrize(
    ("most", "others", "counts"),
    [(1, (), [1]), (2, (), [1, 2]), (6, (), [1, 2, 4, 6]), (8, (3,), [1, 2, 3, 4, 8]), (4, (4,), [1, 2, 4])],
)
def test_thread_counts_have_powers_of_two_up_to_all(most: int, others: tuple[int, ...], counts: list[int]) -> None:
    assert thread_counts(most, *others) == counts


def test_float32_is_held_against_float32_products() -> None:
    isas = ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")
    assert [product_kind(isa, torch.float32) for isa in isas] == ["f32"] * 5
    assert [product_kind(isa, torch.bfloat16) for isa in isas] == ["f32", "f32", "f32", "bf16", "bf16"]
    assert [product_kind(isa, torch.int8) for isa in isas] == ["int8"] * 5


def test_the_roof_of_a_path_uses_its_peak_and_bandwidth() -> None:
    peaks = [Peak("amx", "f32", 2, rate(5.0)), Peak("amx", "bf16", 2, rate(9.0)), Peak("amx", "int8", 2, rate(18.0))]
    limits = Limits(GIB, {1: rate(1.0), 2: rate(2.0)}, tuple(peaks))
    assert limits.roof("amx", torch.bfloat16, 2) == Roof(2.0, 9.0)
    assert limits.roof("amx", torch.float32, 2) == Roof(2.0, 5.0)
    for isa, threads in (("avx2", 2), ("amx", 1)):
        with pytest.raises(ConfigError, match=f"{isa} with {threads} threads were not measured"):
            limits.roof(isa, torch.bfloat16, threads)


def test_the_machine_describes_itself(machine: HostMachine) -> None:
    assert machine.cpu
    assert machine.processors == default_threads()
    assert machine.l3_bytes >= 1 << 20
    assert machine.memory_bytes > 1 << 28
    assert machine.isas == supported_isas()
    assert 0 <= machine.busy <= 1


def test_an_l3_cache_that_processors_share_counts_once(tmp_path: Path) -> None:
    for processor, shared in enumerate(["0-1", "0-1", "2-3", "2-3"]):
        for index, (level, size) in enumerate([("1", "32K"), ("2", "1024K"), ("3", "2048K")]):
            folder = tmp_path / f"cpu{processor}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, value in (("level", level), ("size", size), ("shared_cpu_list", shared)):
                (folder / name).write_text(value + "\n")
    assert l3_bytes(tmp_path, [0, 1]) == 2 << 20
    assert l3_bytes(tmp_path, range(4)) == 4 << 20
    (tmp_path / "cpu2" / "cache" / "index2" / "size").write_text("unknown")
    assert l3_bytes(tmp_path, [2]) == 0
    assert l3_bytes(tmp_path / "nowhere", [0]) == 0


def test_processor_name_and_flags_are_read_from_cpuinfo(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("model name\t: One\nflags\t\t: fma avx2\n\nmodel name\t: Two\nflags\t\t: amx_tile\n")
    assert machines._cpuinfo(path) == ("One", {"fma", "avx2"})
    assert machines._cpuinfo(tmp_path / "nowhere") == ("", frozenset())


@needs_kernels
def test_measured_limits_are_plausible(machine: HostMachine) -> None:
    limits = measure_limits(machine, 1, quick=True)
    affordable = available_memory(torch.device("cpu")) // 4
    assert limits.buffer_bytes == beyond_cache(machine) >= min(4 * machine.l3_bytes, affordable)
    assert list(limits.read) == thread_counts(machine.processors)
    assert {peak.isa for peak in limits.peaks} == set(machine.isas)
    for isa, dtype in product(machine.isas, (torch.float32, torch.bfloat16, torch.int8)):
        assert (isa, product_kind(isa, dtype)) in {(peak.isa, peak.product) for peak in limits.peaks}
    for read in limits.read.values():
        assert 1e8 < read.median <= read.best < 1e13
    for peak in limits.peaks:
        assert peak.threads == 1
        assert 1e8 < peak.operations.median <= peak.operations.best < 1e14
    assert limits.roof(machine.isas[-1], torch.bfloat16, 1).bandwidth == limits.read[1].best


def check_device(device: torch.device, dtype: torch.dtype, *, quick: bool) -> None:
    limits = measure_device(device, dtype, quick=quick)
    roof = limits.roof(GPU, dtype, 1)
    assert 1e8 < roof.bandwidth < 1e14
    assert 1e8 < roof.peak < 1e16
    assert limits.read[1].best >= limits.read[1].median
    with pytest.raises(ConfigError, match="measure them first"):
        limits.roof("avx2", dtype, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_the_limits_of_a_device_are_measured(dtype: torch.dtype) -> None:
    if dtype == torch.float8_e4m3fn:
        needs_rowwise_products(torch.device("cpu"))
    check_device(torch.device("cpu"), dtype, quick=True)


@pytest.mark.gpu
def test_the_limits_of_a_gpu_are_measured() -> None:
    check_device(torch.device("cuda"), torch.bfloat16, quick=False)
