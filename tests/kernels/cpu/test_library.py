"""The binding: it agrees with the header, memory lives as long as somebody looks at it, and pools can be had."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import shutil
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chairlift.base.sampling_params import PARAMETERS
from chairlift.kernels.cpu import library
from chairlift.kernels.cpu.packing import PANEL
from tests.native import needs_kernels

HEADER = re.sub(r"//[^\n]*", "", (Path(__file__).parents[3] / "csrc" / "cpu" / "chairlift_cpu.h").read_text())
STRUCTS = {
    "cl_op": library.OpStruct,
    "cl_kv_layer": library.KVLayer,
    "cl_program": library.Program,
    "cl_batch": library.BatchStruct,
}
C_TYPES: dict[str, Any] = {
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "void": None,
}
NUMPY_TYPES = {"int32_t": "int32", "uint64_t": "uint64", "float": "float32", "double": "float64"}


def declared(struct: str) -> list[tuple[str, str]]:
    """(type, name) of each field of a struct in the header, in order."""
    body = re.search(r"typedef struct \{([^{}]*)\} " + struct + ";", HEADER)
    assert body is not None
    fields: list[tuple[str, str]] = []
    for declaration in body[1].split(";")[:-1]:
        parts = re.fullmatch(r"\s*(.*?[\s*])(\w+(?:,\s*\w+)*)", declaration)
        if parts is None:  # pointers declared together would need a star each
            raise AssertionError(f"cannot read {declaration!r}")
        fields += [(parts[1].strip(), name) for name in re.findall(r"\w+", parts[2])]
    return fields


def is_pointer(kind: Any) -> bool:
    return kind is ctypes.c_void_p or (isinstance(kind, type) and issubclass(kind, ctypes._Pointer))


@pytest.mark.parametrize("struct", STRUCTS)
def test_structs_have_the_header_s_fields(struct: str) -> None:
    mirror: list[tuple[str, Any]] = list(STRUCTS[struct]._fields_)  # type: ignore[arg-type]
    assert [name.rstrip("_") for name, _ in mirror] == [name for _, name in declared(struct)]
    for (kind, name), (_, ours) in zip(declared(struct), mirror, strict=True):
        assert is_pointer(ours) if "*" in kind else ours is C_TYPES[kind], name


def test_the_sampling_row_has_the_header_s_fields() -> None:
    fields = declared("cl_sampling_row")
    assert library.SAMPLING_ROW.names == tuple(name for _, name in fields)
    for kind, name in fields:
        expected = "uint64" if "*" in kind else NUMPY_TYPES[kind]
        assert library.SAMPLING_ROW[name] == np.dtype(expected), name


def test_sampling_parameters_have_columns_that_hold_their_values() -> None:
    columns = {each.column: each.kind for each in PARAMETERS.values() if each.column}
    assert columns.keys() <= set(library.SAMPLING_ROW.names or ())
    for name, kind in columns.items():
        assert library.SAMPLING_ROW[name].kind == {int: "i", float: "f"}[kind], name


def test_prototypes_are_the_header_s() -> None:
    functions = re.findall(r"CL_EXPORT ([\w ]*[ *]+)(cl_\w+)\(([^)]*)\);", HEADER)
    assert {name for _, name, _ in functions} == set(library._PROTOTYPES)
    for result, name, arguments in functions:
        ours, takes = library._PROTOTYPES[name]
        assert is_pointer(ours) if "*" in result else ours is C_TYPES[result.strip()], name
        texts = [text.strip() for text in arguments.split(",") if text.strip() != "void"]
        assert len(texts) == len(takes), name
        for text, kind in zip(texts, takes, strict=True):
            assert is_pointer(kind) if "*" in text or "[" in text else kind is C_TYPES[text.split()[0]], (
                f"{name}: {text}"
            )


def test_constants_are_the_header_s() -> None:
    values = dict(re.findall(r"\b(CL_\w+) = (\d+)", HEADER))
    assert int(values["CL_ABI_VERSION"]) == library.ABI_VERSION
    assert int(values["CL_PANEL"]) == int(values["CL_K_MULTIPLE"]) == PANEL
    isas = {f"CL_{name.upper()}": str(place) for place, name in enumerate(library.ISA_NAMES)}
    assert isas | {"CL_NUM_ISAS": str(len(isas))} == {name: values[name] for name in [*isas, "CL_NUM_ISAS"]}


@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64") or os.environ.get("CHAIRLIFT_WITHOUT_KERNELS") == "1",
    reason="no kernels for this machine, or none wanted",
)
def test_the_kernels_are_there() -> None:
    """Without this, a broken build would only skip tests."""
    assert library.load() is not None, library.why_unavailable()
    assert library.why_unavailable() == ""


@needs_kernels
def test_isas_are_named_weakest_first() -> None:
    names = library.supported_isas()
    assert names == tuple(name for name in library.ISA_NAMES if name in names)
    assert library.best_isa() == names[-1]


@pytest.mark.parametrize("content", [b"", b"not a library", None])
def test_a_file_that_is_no_library_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    path = tmp_path / "libchairlift_cpu.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(library, "LIBRARY_PATH", path)
    monkeypatch.setattr(library, "_load", library._load.__wrapped__)
    assert library.load() is None
    assert "install" in library.why_unavailable() or "x86-64 Linux" in library.why_unavailable()
    assert (library.supported_isas(), library.best_isa()) == ((), None)
    with pytest.raises(OSError, match="kernels"):
        library.Memory(1)


@pytest.mark.parametrize(
    ("machine", "built", "words"),
    [
        ("x86_64", 0b10000, r"compiled for another processor \(amx\).*CHAIRLIFT_KERNELS=all pip install"),
        ("x86_64", 0b01010, r"compiled for another processor \(avx512, avx512_bf16\)"),
        ("x86_64", 0b11111, "need a processor with AVX2"),
        ("x86_64", 0b00000, "need a processor with AVX2"),
        ("aarch64", 0b1100000, "need a processor with the dot-product instructions of ARMv8.2"),
        ("aarch64", 0b1000000, r"compiled for another processor \(neon_i8mm\)"),
        ("arm64", 0b1100000, "need a processor with the dot-product instructions of ARMv8.2"),
        ("aarch64", 0b100000, "need a processor with the dot-product instructions of ARMv8.2"),
        ("aarch64", 0b000000, "need a processor with the dot-product instructions of ARMv8.2"),
    ],
)
def test_kernels_of_another_processor_are_a_reason(
    monkeypatch: pytest.MonkeyPatch, machine: str, built: int, words: str
) -> None:
    class Elsewhere:
        def __init__(self, path: Path) -> None:
            pass

        def cl_supported_isas(self) -> int:
            return 0

        def cl_built_isas(self) -> int:
            return built

    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(library, "Library", Elsewhere)
    monkeypatch.setattr(library, "LIBRARY_PATH", Path(__file__))
    monkeypatch.setattr(library, "_load", library._load.__wrapped__)
    assert re.search(words, library.why_unavailable())
    assert library.supported_isas() == library.built_isas() == ()


@needs_kernels
@pytest.mark.parametrize(
    ("name", "value"),
    [("ABI_VERSION", 99), ("_STRUCT_SIZES", (1, 2, 3, 4, 5)), ("_PROTOTYPES", {"cl_nothing": (None, [])})],
)
def test_another_version_of_the_library_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    monkeypatch.setattr(library, name, value)
    with pytest.raises(OSError, match=r"ABI .*but this version needs|has no function cl_nothing"):
        library.Library(library.LIBRARY_PATH)


@needs_kernels
def test_memory_is_zero_aligned_and_shared() -> None:
    memory = library.Memory(3 << 20)
    assert memory.address % (2 << 20) == 0
    tensor = memory.tensor(torch.bfloat16, (4, 8))
    array = memory.array(np.uint16, (3 << 19,))
    assert not array.any()
    tensor[3, 7] = 1.0
    assert array[31] == 0x3F80
    assert (tensor.data_ptr(), array.ctypes.data) == (memory.address, memory.address)
    part = memory.part(64, 128)
    assert (part.address, part.nbytes) == (memory.address + 64, 128)
    assert not part.array(np.uint8, (128,)).any()
    part.array(np.uint8, (128,))[0] = 7
    assert memory.array(np.uint8, (65,))[64] == 7


@needs_kernels
def test_memory_refuses_what_does_not_lie_in_it() -> None:
    memory = library.Memory(100)
    for shape in ((26,), (0,), (-1, 5), (5, 5, 5)):
        with pytest.raises(ValueError, match="does not lie in 100 bytes"):
            memory.tensor(torch.float32, shape)
        with pytest.raises(ValueError, match="does not lie in 100 bytes"):
            memory.array(np.float32, shape)
    for offset, nbytes in ((-1, 5), (99, 2), (0, 0), (0, 101)):
        with pytest.raises(ValueError, match="does not lie in 100 bytes"):
            memory.part(offset, nbytes)
    for nbytes in (0, -1):
        with pytest.raises(ValueError, match="at least one byte"):
            library.Memory(nbytes)
    with pytest.raises(MemoryError):
        library.Memory(1 << 62)


def is_mapped(address: int) -> bool:
    spans = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(low, 16) <= address < int(high, 16) for low, high in spans)


@pytest.mark.full
@needs_kernels
@pytest.mark.parametrize(
    "look",
    [
        lambda memory: memory.tensor(torch.uint8, (100,)),
        lambda memory: memory.array(np.uint8, (100,)),
        lambda memory: memory.part(32, 100),
        lambda memory: memory.tensor(torch.uint8, (100,))[50:].view(5, 10),
        lambda memory: memory.part(10, 20).array(np.uint8, (20,)),
    ],
    ids=["tensor", "array", "part", "slice of a tensor", "array of a part"],
)
def test_memory_lives_as_long_as_somebody_looks_at_it(look: Callable[[library.Memory], Any]) -> None:
    memory = library.Memory(64 << 20)
    memory.array(np.uint8, (100,))[:] = 5
    address, view = memory.address, look(memory)
    del memory
    gc.collect()
    assert is_mapped(address)
    assert isinstance(view, library.Memory) or (view == 5).all()
    del view
    gc.collect()
    assert not is_mapped(address)


def threads_of_this_process() -> int:
    return len(os.listdir("/proc/self/task"))


def ends_with(count: int) -> bool:
    """Whether so many threads are left; a thread that was joined may be listed for a moment longer."""
    return any(threads_of_this_process() == count for _ in range(10_000))


@needs_kernels
def test_a_pool_starts_its_threads_and_ends_them() -> None:
    gc.collect()  # pools that earlier tests have left in circles of references
    before = threads_of_this_process()
    pool = library.ThreadPool(3)
    assert (pool.num_threads, pool.handle != 0) == (3, True)
    assert threads_of_this_process() == before + 2
    pool.close()
    pool.close()
    assert ends_with(before)
    with pytest.raises(ValueError, match="closed"):
        _ = pool.handle
    forgotten = library.ThreadPool(2)
    reference = weakref.ref(forgotten)
    del forgotten
    gc.collect()
    assert reference() is None
    assert ends_with(before)


@needs_kernels
def test_a_pool_pins_only_when_it_has_every_processor() -> None:
    allowed = len(os.sched_getaffinity(0))
    assert library.ThreadPool(allowed).pinned
    assert not library.ThreadPool(allowed + 1).pinned
    assert not library.ThreadPool(allowed, pin=False).pinned
    assert library.ThreadPool().num_threads == library.default_threads() <= allowed
    for count in (0, -1, 257):
        with pytest.raises(ValueError, match="1 to 256 threads"):
            library.ThreadPool(count)


@pytest.mark.parametrize(("limit", "threads"), [(1.5, 2), (0.5, 1), (None, 5), (999.0, 5)])
def test_threads_respect_affinity_and_quota(monkeypatch: pytest.MonkeyPatch, limit: float | None, threads: int) -> None:
    monkeypatch.setattr(library, "processor_limit", lambda: limit)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3, 5, 7, 9})
    assert library.default_threads() == threads


@needs_kernels
def test_a_thread_that_the_system_refuses_is_an_error_and_no_crash() -> None:
    """Threads that had started end, and the process goes on."""
    code = """
import resource
from chairlift.kernels.cpu.library import ThreadPool
ThreadPool(2)
taken = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (64 << 20), resource.RLIM_INFINITY))
try:
    ThreadPool(200)
except OSError as error:
    print('refused', ThreadPool(1) is not None)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "refused True\n"), run.stderr


OUT_OF_MEMORY = """
import resource
import numpy as np
from chairlift.kernels.cpu import library

pool, native = library.ThreadPool(2, pin=False), library.require()
isa = library.ISA_NAMES.index(library.best_isa())
rows, logits = np.zeros(1, library.SAMPLING_ROW), np.zeros(1 << 18, np.float32)
rows["top_p"], rows["temperature"] = 0.5, 1.0
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
_, hard = resource.getrlimit(resource.RLIMIT_AS)
for limit in (used + (1 << 20), hard):
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    print(native.cl_sample(pool.handle, logits.ctypes.data, 1 << 18, 1, 1 << 18, rows.ctypes.data, isa))
"""


@pytest.mark.full
@needs_kernels
def test_calls_without_memory_are_refused() -> None:
    run = subprocess.run([sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True)
    assert (run.returncode, run.stdout.split()) == (0, ["-1", "0"]), run.stderr


HUGE_MACHINE = """
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <pthread.h>

int pthread_getaffinity_np(pthread_t thread, size_t bytes, cpu_set_t* set) {
  if (bytes * 8 < 1536) return EINVAL;
  memset(set, 0, bytes);
  CPU_SET_S(1100, bytes, set);
  CPU_SET_S(1535, bytes, set);
  return 0;
}

int pthread_setaffinity_np(pthread_t thread, size_t bytes, const cpu_set_t* set) {
  for (int processor = 0; processor < bytes * 8; processor++)
    if (CPU_ISSET_S(processor, bytes, set)) fprintf(stderr, "%d of %d\\n", processor, CPU_COUNT_S(bytes, set));
  return 0;
}
"""


@pytest.mark.full
@needs_kernels
def test_threads_are_pinned_where_processors_have_four_digits(tmp_path: Path) -> None:
    """A machine with 1,536 processors of which this process may use two; the system takes no shorter mask."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no gcc to compile such a machine with")
    (tmp_path / "huge.c").write_text(HUGE_MACHINE)
    command = [compiler, "-shared", "-fPIC", "-o", str(tmp_path / "huge.so"), str(tmp_path / "huge.c")]
    subprocess.run(command, check=True, capture_output=True)
    code = "from chairlift.kernels.cpu.library import ThreadPool; ThreadPool(2, pin=True).close()"
    environment = os.environ | {"LD_PRELOAD": f"{os.environ.get('LD_PRELOAD', '')} {tmp_path / 'huge.so'}".strip()}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (run.returncode, run.stderr.splitlines()) == (0, ["1535 of 1"])
