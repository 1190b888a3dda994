"""The binding of ``csrc/cpu/chairlift_cpu.h``: structs, prototypes, huge-page memory and the thread pool.

ctypes releases the GIL during a call, needs nothing at build time, and works with one shared object for every Python 3.
A step makes only one call, so ctypes' overhead of a few microseconds does not matter. The structs here must equal the
header's structs field by field. :func:`load` compares their sizes, and refuses a library that was built from another
header.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import platform
import sys
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.base.processors import allowed_processors, architecture, num_large_processors
from chairlift.base.step_batch import StepBatch
from chairlift.kernels.control_group import processor_limit

__all__ = [
    "ABI_VERSION",
    "ARM64_ISAS",
    "BUILD_ALL",
    "ISA_NAMES",
    "KV_KINDS",
    "LIBRARY_PATH",
    "MAX_THREADS",
    "PRODUCTS",
    "SAMPLING_ROW",
    "STATE_KIND",
    "BatchStruct",
    "Experts",
    "KVLayer",
    "Library",
    "LowRankStruct",
    "Memory",
    "OpStruct",
    "Program",
    "ThreadPool",
    "best_isa",
    "built_isas",
    "default_threads",
    "load",
    "require",
    "supported_isas",
    "why_unavailable",
]

ABI_VERSION = 14
"""Value of ``CL_ABI_VERSION`` in the header that this module mirrors."""

PRODUCTS = ("f32", "bf16", "int8")
"""Names of the kinds of matrix multiplication, in the order of ``cl_product``."""

BUILD_ALL = "CHAIRLIFT_KERNELS=all pip install ."
"""Command that installs Chairlift from its sources with the kernels of all instruction sets."""

ISA_NAMES = ("avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx", "neon", "neon_i8mm")
"""Names of the instruction-set paths, in the order of ``cl_isa``: of x86-64, slowest first, then of ARM64."""

ARM64_ISAS = ("neon", "neon_i8mm")
"""Names of the paths for ARM64, a part of :data:`ISA_NAMES`."""

NATIVE_PLATFORMS = (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "aarch64"))
"""(:data:`sys.platform`, architecture) of the machines for which there are kernels."""

MAX_THREADS = 256
"""Maximum number of threads in a pool of compute threads."""

LIBRARY_PATH = Path(__file__).with_name("libchairlift_cpu.so")


class Experts(ctypes.Structure):
    """Struct ``cl_experts``: routing and additional inputs of a layer of experts."""

    _fields_ = [
        ("num_experts", c_int32),
        ("top_k", c_int32),
        ("inner", c_int32),
        ("scoring", c_int32),
        ("normalise", c_int32),
        ("groups", c_int32),
        ("kept_groups", c_int32),
        ("group_score", c_int32),
        ("down_format", c_int32),
        ("down_group", c_int32),
        ("epsilon", c_float),
        ("scale", c_float),
        ("alpha", c_float),
        ("limit", c_float),
        ("activation", c_int32),
        ("routed_k", c_int32),
        ("down_n", c_int32),
        ("inner_first", c_int32),
        ("router", c_void_p),
        ("correction", c_void_p),
        ("shared_gate", c_void_p),
        ("down", c_void_p),
        ("router_bias", c_void_p),
        ("down_bias", c_void_p),
        ("scratch", c_void_p),
        ("shared_inner", c_void_p),
        ("load", c_void_p),
        ("lora_stride", c_int64),
    ]


class OpStruct(ctypes.Structure):
    """Struct ``cl_op``: one fused operation of a step program."""

    _fields_ = [
        ("kind", c_int32),
        ("flags", c_int32),
        ("in_", c_int32),  # `in` in the header, a keyword in Python
        ("out", c_int32),
        ("aux", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("format", c_int32),
        ("group", c_int32),
        ("layer", c_int32),
        ("rotary", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("window", c_int32),
        ("site", c_int32),
        ("first_head", c_int32),
        ("own_heads", c_int32),
        ("eps", c_float),
        ("scale", c_float),
        ("cap", c_float),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("experts", POINTER(Experts)),
        ("sinks", c_void_p),
    ]


class KVLayer(ctypes.Structure):
    """Struct ``cl_kv_layer``: addresses of one layer's K and V, or of one part of its recurrent states."""

    _fields_ = [
        ("kv", c_void_p),
        ("group", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("num_blocks", c_int64),
        ("kind", c_int32),
        ("reserved", c_int32),
    ]


KV_KINDS = {torch.float32: 0, torch.bfloat16: 0, torch.int8: 1}
"""Dtype of K and V -> value of ``cl_kv_kind``: how a layer's K and V are stored."""
STATE_KIND = 2
"""Value of ``cl_kv_kind`` for recurrent states."""


class LowRankStruct(ctypes.Structure):
    """Struct ``cl_lora``: the change of one linear layer by one adapter."""

    _fields_ = [
        ("a", c_void_p),
        ("b", c_void_p),
        ("slices", c_void_p),
        ("whole", c_void_p),
        ("gains", c_void_p),
        ("offsets", c_void_p),
        ("rank", c_int32),
        ("used", c_int32),
    ]


class EmbeddingStruct(ctypes.Structure):
    """Struct ``cl_embedding``: the change of the token embedding by one adapter."""

    _fields_ = [
        ("table", c_void_p),
        ("index", c_void_p),
        ("rows", c_void_p),
        ("a", c_void_p),
        ("b", c_void_p),
        ("rank", c_int32),
        ("reserved", c_int32),
    ]


class Program(ctypes.Structure):
    """Struct ``cl_program``: operations, buffers and caches. The arrays to which it points must outlive it."""

    _fields_ = [
        ("ops", POINTER(OpStruct)),
        ("buffers", POINTER(c_void_p)),
        ("strides", POINTER(c_int64)),
        ("rotary", POINTER(c_void_p)),
        ("kv_layers", POINTER(KVLayer)),
        ("num_ops", c_int32),
        ("num_buffers", c_int32),
        ("num_rotary", c_int32),
        ("num_kv_layers", c_int32),
        ("dtype", c_int32),
        ("isa", c_int32),
        ("capacity", c_int32),
        ("num_sites", c_int32),
        ("codes", c_void_p),
        ("lora", c_void_p),
        ("lora_rows", c_void_p),
        ("lora_stride", c_int64),
        ("embeddings", c_void_p),
        ("comm", c_void_p),
    ]


class BatchStruct(ctypes.Structure):
    """Struct ``cl_batch``: the rows and tokens of one step. Pointers are plain addresses."""

    _fields_ = [
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("cu_seqlens", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("slot_mapping", c_void_p),
        ("axes", c_void_p),
        ("adapters", c_void_p),
        ("seen_ends", c_void_p),
        ("num_tokens", c_int32),
        ("num_rows", c_int32),
        ("num_groups", c_int32),
        ("table_width", c_int32),
    ]

    @classmethod
    def of(cls, step: StepBatch, adapters: npt.NDArray[np.int32] | None = None) -> BatchStruct:
        """A batch that points to the arrays of ``step`` and to ``adapters``, which must outlive it. ``adapters`` [T] is
        the row of each token's adapter in the table of adapters."""
        spans = step.token_ids, step.positions, step.cu_seqlens, step.seq_lens
        arrays = *spans, step.block_tables, step.slot_mapping
        num_groups, num_rows, width = step.block_tables.shape
        addresses = [array.ctypes.data for array in arrays]
        optional = [None if each is None else each.ctypes.data for each in (step.axes, adapters, step.seen_ends)]
        return cls(*addresses, *optional, len(step.token_ids), num_rows, num_groups, width)


SAMPLING_ROW = np.dtype(
    [
        ("seed", np.uint64),
        ("top_p", np.float64),
        *((name, np.uintp) for name in ("history", "allowed", "bias_ids", "bias", "masked", "mask_bits")),
        *((name, np.uintp) for name in ("top_ids", "top_logprobs")),
        *((name, np.int32) for name in ("history_len", "num_prompt_tokens", "num_allowed", "num_bias", "num_masked")),
        *((name, np.int32) for name in ("position", "top_k", "num_logprobs", "target")),
        *((name, np.float32) for name in ("temperature", "min_p", "repetition", "presence", "frequency")),
        *((name, np.int32) for name in ("token", "status", "rank", "reserved")),
    ],
    align=True,
)
"""Struct ``cl_sampling_row`` as a numpy record dtype, so that all rows of a step are written and read column by
column."""

_STRUCT_SIZES = (*map(ctypes.sizeof, (OpStruct, KVLayer, Program, BatchStruct)), SAMPLING_ROW.itemsize)
_STRUCT_SIZES = (*_STRUCT_SIZES, *map(ctypes.sizeof, (Experts, LowRankStruct, EmbeddingStruct)))

_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "cl_abi_version": (c_int32, []),
    "cl_struct_sizes": (None, [POINTER(c_int64)]),
    "cl_supported_isas": (c_int32, []),
    "cl_built_isas": (c_int32, []),
    "cl_alloc": (c_void_p, [c_size_t]),
    "cl_free": (None, [c_void_p, c_size_t]),
    "cl_release_pages": (None, [c_void_p, c_size_t]),
    "cl_pool_create": (c_void_p, [c_int32, c_int32]),
    "cl_pool_destroy": (None, [c_void_p]),
    "cl_pack": (None, [c_void_p, c_int32, *[c_int64] * 5, c_void_p, c_int64]),
    "cl_pack_codes": (
        None,
        [
            *(c_void_p, c_int32, c_int32, *[c_int64] * 5),  # packed, format, group, k ... panel_step
            *(c_void_p, c_int64, c_void_p, c_void_p, c_int64),  # codes, codes_stride, scales, minimums, scales_stride
        ],
    ),
    "cl_packed_code_bytes": (c_int64, [c_int32, c_int32, c_int64, c_int64]),
    "cl_code_bytes": (c_int64, [c_int64]),
    "cl_expert_bytes": (c_int64, [POINTER(OpStruct), c_int32, c_int32]),
    "cl_run": (c_int32, [c_void_p, POINTER(Program), POINTER(BatchStruct), c_int32]),
    "cl_head": (
        c_int32,
        [
            *(c_void_p, POINTER(Program), c_void_p, c_int64, c_void_p, c_void_p, c_int32),  # pool ... num_rows
            *(POINTER(OpStruct), c_void_p, c_void_p, c_int64),  # product, rows, logits, logits_rows
        ],
    ),
    "cl_logits": (
        c_int32,
        [
            *(c_void_p, POINTER(Program), c_void_p, c_int64, c_void_p, c_void_p, c_int32),  # pool ... num_rows
            *(POINTER(OpStruct), c_void_p, c_int64),  # product, logits, logits_stride
        ],
    ),
    "cl_needs_logits": (c_int32, [c_void_p]),
    "cl_sample": (c_int32, [c_void_p, c_void_p, c_int64, c_int32, c_int32, c_void_p, c_int32]),
    "cl_comm_bytes": (c_int64, []),
    "cl_comm_create": (c_void_p, [c_void_p, c_int32, c_int32, POINTER(c_int32), c_int32, c_double]),
    **dict.fromkeys(("cl_comm_destroy", "cl_comm_send", "cl_comm_read", "cl_comm_end"), (None, [c_void_p])),
    **dict.fromkeys(("cl_comm_meet", "cl_comm_wait_for_readers", "cl_comm_wait_for_message"), (c_int32, [c_void_p])),
    **dict.fromkeys(("cl_comm_look", "cl_comm_ended"), (c_int32, [c_void_p])),
    "cl_comm_waited": (c_double, [c_void_p]),
    "cl_comm_meetings": (c_int64, [c_void_p]),
    "cl_measure_read": (c_double, [c_void_p, c_void_p, c_size_t]),
    "cl_measure_peak": (c_double, [c_void_p, c_int32, c_int32, c_double]),
}


class Library(ctypes.CDLL):
    """The shared object with the prototypes of the header. Its functions are attributes (``library.cl_run(...)``).

    Raises OSError when the file cannot be loaded, or was built from another version of the header.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        try:
            for name, (result, arguments) in _PROTOTYPES.items():
                function = getattr(self, name)
                function.restype = result
                function.argtypes = arguments
        except AttributeError:
            raise OSError(f"{path} has no function {name}, so it is of another version") from None
        room = (c_int64 * 64)()  # another version of the library may write more entries
        self.cl_struct_sizes(room)
        sizes = tuple(room[: len(_STRUCT_SIZES)])
        if self.cl_abi_version() != ABI_VERSION or sizes != _STRUCT_SIZES:
            raise OSError(
                f"{path} has ABI {self.cl_abi_version()} and struct sizes {list(sizes)}, "
                f"but this version needs ABI {ABI_VERSION} and {list(_STRUCT_SIZES)}"
            )


@functools.cache
def _load() -> tuple[Library | None, str]:
    """Load the kernels. Returns (library, ""), or (None, reason) if the library is missing."""
    if not LIBRARY_PATH.exists():
        if (sys.platform, architecture()) in NATIVE_PLATFORMS:
            return None, (
                "Chairlift was installed without its compiled CPU kernels; install it again on a machine with a C++ "
                "compiler (in a source tree: python setup.py build_ext --inplace)"
            )
        here = f"{platform.machine()} {sys.platform}"
        return None, f"the compiled CPU kernels are for x86-64 Linux, ARM64 Linux and ARM64 macOS, and this is {here}"
    try:
        library = Library(LIBRARY_PATH)
    except OSError as error:
        return None, (
            f"the compiled CPU kernels cannot be loaded ({error}); install Chairlift again "
            "(in a source tree: python setup.py build_ext --inplace)"
        )
    if not library.cl_supported_isas():
        return None, _why_none_runs(_names(library.cl_built_isas()))
    return library, ""


_NEEDED = (
    (ISA_NAMES[0], "AVX2, FMA and F16C"),
    (ARM64_ISAS[0], "the dot-product instructions of ARMv8.2 (asimddp in /proc/cpuinfo)"),
)
"""The oldest path of x86-64 and that of ARM64, with the instructions that each needs."""


def _why_none_runs(built: tuple[str, ...]) -> str:
    """Reason why this processor can run none of the ``built`` instruction-set paths, and what to do about it."""
    oldest, needed = _NEEDED[architecture() == "aarch64"]
    if not built or oldest in built:
        return f"the compiled CPU kernels need a processor with {needed}, which this one does not have"
    return (
        f"the CPU kernels were compiled for another processor ({', '.join(built)}), and this one cannot run them; "
        f"install Chairlift again on this machine, or with the kernels of all processors: {BUILD_ALL}"
    )


def _names(mask: int) -> tuple[str, ...]:
    return tuple(name for i, name in enumerate(ISA_NAMES) if mask >> i & 1)


def load() -> Library | None:
    """The library with the CPU kernels, loaded once. None if it is missing; :func:`why_unavailable` then returns the
    reason."""
    return _load()[0]


def why_unavailable() -> str:
    """Reason why :func:`load` returns None, and how to fix it. Empty if the kernels are available."""
    return _load()[1]


def require() -> Library:
    """The library with the CPU kernels. Raises OSError with the reason if it is missing."""
    library, reason = _load()
    if library is None:
        raise OSError(reason)
    return library


def supported_isas() -> tuple[str, ...]:
    """Names of the instruction-set paths that this processor, operating system and build can run, slowest first."""
    library = load()
    return _names(library.cl_supported_isas()) if library is not None else ()


def built_isas() -> tuple[str, ...]:
    """Names of the instruction-set paths that were compiled, slowest first. The processor may be unable to run one."""
    library = load()
    return _names(library.cl_built_isas()) if library is not None else ()


def best_isa() -> str | None:
    """The fastest instruction-set path that this machine can run; None if the kernels are missing."""
    return (supported_isas() or (None,))[-1]


def default_threads() -> int:
    """Number of processors that this process may use, according to its affinity mask and its control groups' quotas. Of
    ARM64 processors with cores of several sizes, only the large cores count. At most 256."""
    allowed = min(num_large_processors(), MAX_THREADS)
    limit = processor_limit()
    return allowed if limit is None else max(1, min(allowed, math.ceil(limit)))


class Memory:
    """Zeroed memory on huge pages, aligned to 2 MiB. The system allocates a page when it is first used.

    The memory is freed when this object and every tensor and array over it have been deleted. Raises OSError without
    the kernels, MemoryError without enough memory, ValueError for less than one byte.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 1:
            raise ValueError(f"memory must be at least one byte, got {nbytes}")
        library = require()
        address = library.cl_alloc(nbytes)
        if not address:
            raise MemoryError(f"the system has no {nbytes:,} bytes of memory left")
        self.address: int = address
        self.nbytes = nbytes
        # Tensors and arrays hold a reference to the buffer, not to this object. The memory is therefore freed when the
        # buffer is deleted.
        self._buffer = (ctypes.c_char * nbytes).from_address(address)
        # The finalizer does not run at interpreter exit, because other threads may still read the memory. The operating
        # system frees it after all threads have ended.
        weakref.finalize(self._buffer, library.cl_free, address, nbytes).atexit = False

    def part(self, offset: int, nbytes: int) -> Memory:
        """Bytes ``offset`` to ``offset + nbytes`` of this memory, as a Memory. Raises ValueError for a range outside of
        it."""
        self._count(1, [nbytes], offset)
        part = Memory.__new__(Memory)
        part.address = self.address + offset
        part.nbytes = nbytes
        part._buffer = (ctypes.c_char * nbytes).from_buffer(self._buffer, offset)  # keeps the whole memory alive
        return part

    def tensor(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """A contiguous tensor that starts at the beginning of this memory. Raises ValueError when it does not fit."""
        return torch.frombuffer(self._buffer, dtype=dtype, count=self._count(dtype.itemsize, shape)).view(*shape)

    def array(self, dtype: np.typing.DTypeLike, shape: Sequence[int]) -> np.ndarray[Any, Any]:
        """A contiguous array that starts at the beginning of this memory. Raises ValueError when it does not fit."""
        kind: np.dtype[Any] = np.dtype(dtype)
        # The memoryview is only for the type checker. Like the buffer itself, it keeps the memory alive.
        return np.frombuffer(memoryview(self._buffer), kind, self._count(kind.itemsize, shape)).reshape(shape)

    def _count(self, itemsize: int, shape: Sequence[int], offset: int = 0) -> int:
        """Number of elements in ``shape``. Raises ValueError when they do not fit in this memory."""
        count = math.prod(shape)
        if offset < 0 or count < 1 or offset + count * itemsize > self.nbytes:
            raise ValueError(
                f"shape {list(shape)} of {itemsize}-byte items at byte {offset} does not lie in {self.nbytes:,} bytes"
            )
        return count


class ThreadPool:
    """A pool of ``num_threads`` compute threads: the calling thread, and others that sleep between calls.

    ``num_threads`` None means :func:`default_threads`. If there are as many threads as allowed processors, each thread
    is pinned to one processor. If there are fewer threads, none is pinned, so the operating system can move them.
    Raises OSError without the kernels or when the threads cannot be started, ValueError for a number outside 1 to 256.
    """

    def __init__(self, num_threads: int | None = None, pin: bool | None = None) -> None:
        self.num_threads = default_threads() if num_threads is None else num_threads
        if not 1 <= self.num_threads <= MAX_THREADS:
            raise ValueError(f"a pool has 1 to {MAX_THREADS} threads, got {num_threads}")
        self.pinned = self.num_threads == len(allowed_processors()) if pin is None else pin
        library = require()
        handle = library.cl_pool_create(self.num_threads, self.pinned)
        if not handle:
            raise OSError(f"the system does not let this process start {self.num_threads} threads; use fewer")
        self._handle: int = handle
        self._finalizer = weakref.finalize(self, _end_threads, handle, os.getpid())
        self._finalizer.atexit = False  # a thread that still computes at exit needs its pool

    @property
    def handle(self) -> int:
        """Address of the C struct ``cl_pool``. Raises ValueError after :meth:`close`."""
        if not self._finalizer.alive:
            raise ValueError("the thread pool is closed")
        return self._handle

    def close(self) -> None:
        """End the pool's threads. No call may be using them. A second :meth:`close` does nothing."""
        self._finalizer()


def _end_threads(handle: int, process: int) -> None:
    if os.getpid() == process:  # a forked process has no threads to wait for
        require().cl_pool_destroy(handle)
