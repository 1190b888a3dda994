"""Step programs with a single operation: buffers surrounded by NaN, packed weights, ragged batches, paged caches.

All arrays are in ordinary memory instead of :class:`~chairlift.kernels.cpu.library.Memory`, so that the address
sanitizer knows where each array ends.
"""

from __future__ import annotations

import ctypes
import functools
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from chairlift.base.step_batch import StepBatch
from chairlift.kernels.cpu import library as lib
from chairlift.kernels.cpu.fused_op import OpKind
from chairlift.kernels.cpu.packing import NATIVE_DTYPES, PANEL, packed_bytes
from chairlift.kernels.cpu.program import SPARE_ROWS

__all__ = [
    "Batch",
    "Buffer",
    "Cache",
    "Cache8",
    "Codes",
    "Machine",
    "bits",
    "counts",
    "equal_bits",
    "make_cache",
    "normal",
    "packed",
    "packed_bias",
    "pool",
    "program",
    "run",
    "size_in",
    "whole_numbers",
]

NAN = float("nan")


class Machine(NamedTuple):
    """Instruction-set path, threads and dtypes of a test."""

    isa: str
    dtype: torch.dtype
    threads: int
    int8_kv: bool = False
    """Whether K and V are stored in 8 bits."""

    @property
    def pair(self) -> int:
        """Number of adjacent elements in packed layouts (``P`` in the C header)."""
        return 4 // self.dtype.itemsize


def counts(default: int) -> pytest.MarkDecorator:
    """Decorator that parametrizes ``count``, a number of seeds: ``default``, and ten times as many in nightly runs."""
    nightly = pytest.param(10 * default, marks=pytest.mark.nightly)
    return pytest.mark.parametrize("count", [default, nightly])


# -- numbers -----------------------------------------------------------------------------------------------------------


def size_in(rng: random.Random, *ranges: tuple[int, int]) -> int:
    """A random number from one of several ranges; both ends are included."""
    return rng.randint(*rng.choice(ranges))


def normal(rng: random.Random, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def whole_numbers(rng: random.Random, *shape: int, most: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random integers from -most to most. A sum of a few million products of such numbers is exact in float32 in any
    order."""
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    return torch.randint(-most, most + 1, shape, generator=generator).to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have equal bits. Unlike ``torch.equal``, it distinguishes the sign of zero, and a NaN equals
    itself."""
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))


class Codes(NamedTuple):
    """Numbers [..., size] in 8 bits: uint8 codes, and the float32 scale and minimum [...] of each row."""

    codes: Tensor
    scale: Tensor
    minimum: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Codes:
        x, tiny = x.float(), torch.finfo(torch.float32).tiny
        x = x.where(x.abs() >= tiny, x * 0)  # subnormals are zero in the kernels
        minimum, highest = x.amin(-1), x.amax(-1)
        scale = (highest - minimum) / 255
        scale[scale < tiny] = 0
        scale[~(x.isfinite().all(-1) & (highest - minimum).isfinite())] = NAN
        steps = (x - minimum[..., None]) / scale.where(scale > 0, 1)[..., None]
        return cls(steps.round().nan_to_num(0).clamp(0, 255).to(torch.uint8), scale, minimum)

    @property
    def numbers(self) -> Tensor:
        """The numbers that the codes stand for, as float64."""
        return self.minimum.double()[..., None] + self.scale.double()[..., None] * self.codes


# -- what programs consist of ------------------------------------------------------------------------------------------


class Buffer:
    """A buffer of a program. Its ``rows`` are an activation [count, width], which is NaN or ``values`` at first. The
    padding columns are zeros.

    The rows after ``count`` are NaN. Kernels may load these rows, but must neither use their values nor write to them.
    """

    def __init__(self, rng: random.Random, machine: Machine, count: int, width: int, values: Tensor | None = None):
        stride = -(-width // PANEL) * PANEL + rng.choice((0, PANEL))
        self.whole = torch.full((count + SPARE_ROWS, stride), NAN, dtype=machine.dtype)
        self.rows = self.whole[:count, :width]
        self.whole[:count, width:] = 0
        if values is not None:
            self.rows.copy_(values)
        self._behind = bits(self.whole[count:])

    def check_frame(self) -> None:
        count, width = self.rows.shape
        assert (self.whole[:count, width:] == 0).all(), "columns that pad a row must stay zero"
        assert torch.equal(bits(self.whole[count:]), self._behind), "rows behind the last token were written to"


def packed(weight: Tensor, *, gated: bool = False) -> Tensor:
    """Weight [n, k] in panels. With ``gated``, panels of the two halves alternate."""
    k = weight.shape[1]
    parts = weight.chunk(2) if gated else (weight,)
    code = NATIVE_DTYPES[weight.dtype]
    library = lib.require()
    columns = len(parts) * -(-len(parts[0]) // PANEL) * PANEL
    memory = torch.zeros(packed_bytes(columns, k, weight.dtype), dtype=torch.uint8)
    for i, part in enumerate(parts):
        source = part.contiguous()
        where = (0, len(part), i, len(parts))
        library.cl_pack(memory.data_ptr(), code, k, *where, source.data_ptr(), k)
    return memory


def packed_bias(bias: Tensor, *, gated: bool = False) -> Tensor:
    """float32 bias in the order of the packed columns."""
    parts = [torch.nn.functional.pad(part.float(), (0, -len(part) % PANEL)) for part in bias.chunk(2 if gated else 1)]
    return torch.stack([part.view(-1, PANEL) for part in parts], dim=1).flatten()


class Batch:
    """A ragged batch. Each row is (number of new tokens, context length including the new tokens). Each cache has its
    own block table and slot mapping."""

    def __init__(self, rows: Sequence[tuple[int, int]], caches: Sequence[Cache] = (), token_ids: Tensor | None = None):
        self.rows = list(rows)
        self.num_tokens = sum(new for new, _ in rows)
        self.positions = np.array([p for new, end in rows for p in range(end - new, end)], dtype=np.int32)
        cu_seqlens = np.cumsum([0, *(new for new, _ in rows)], dtype=np.int32)
        seq_lens = np.array([end for _, end in rows], dtype=np.int32)
        ids = np.zeros(self.num_tokens, np.int32) if token_ids is None else token_ids.numpy().astype(np.int32)
        tables = np.zeros(
            (len(caches), len(rows), max([cache.table.shape[1] for cache in caches], default=0)), np.int32
        )
        mappings = np.zeros((len(caches), self.num_tokens), dtype=np.int64)
        for group, cache in enumerate(caches):
            tables[group, :, : cache.table.shape[1]] = cache.table
            mappings[group] = np.concatenate([cache.slots(i, end - new, end) for i, (new, end) in enumerate(rows)])
        self._kept = StepBatch(ids, self.positions, cu_seqlens, seq_lens, tables, mappings)
        self.struct = lib.BatchStruct.of(self._kept)

    @classmethod
    def flat(cls, num_tokens: int, token_ids: Tensor | None = None) -> Batch:
        """Batch with the tokens of one sequence, for operations that do not depend on sequences."""
        return cls([(num_tokens, num_tokens)], token_ids=token_ids)


class Cache:
    """K and V of one layer for sequences of at most ``lengths`` tokens, in random blocks.

    The cache is NaN at first. Block 0 remains NaN, because block-table entries that must not be read point to it.
    ``first`` is, per sequence, the first position whose block exists.
    """

    def __init__(
        self,
        rng: random.Random,
        machine: Machine,
        lengths: Sequence[int],
        *,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        group: int = 0,
        first: Sequence[int] | None = None,
    ):
        self.machine, self.block_size, self.kv_heads, self.head_dim = machine, block_size, kv_heads, head_dim
        counts = [-(-length // block_size) for length in lengths]
        num_blocks = sum(counts) + rng.randint(1, 4)
        free = rng.sample(range(1, num_blocks), num_blocks - 1)
        self.table = np.zeros((len(lengths), max(counts) + rng.randint(0, 2)), dtype=np.int32)
        for i, count in enumerate(counts):
            for index in range((first[i] if first else 0) // block_size, count):
                self.table[i, index] = free.pop()
        self._lay_out(num_blocks)
        self.struct = lib.KVLayer(
            kv=self.kv.data_ptr(),
            group=group,
            kv_heads=kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            num_blocks=num_blocks,
            kind=lib.KV_KINDS[torch.int8 if machine.int8_kv else machine.dtype],
        )

    def _lay_out(self, num_blocks: int) -> None:
        p, dim, size = self.machine.pair, self.head_dim, self.block_size
        self.kv = torch.full((num_blocks, self.kv_heads, size // 16, 2, 16 * dim), NAN, dtype=self.machine.dtype)
        keys, values = self.kv.unbind(3)
        self._keys = keys.unflatten(3, (dim // p, 16, p)).permute(0, 2, 4, 1, 3, 5)
        self._values = values.unflatten(3, (16 // p, dim, p)).permute(0, 2, 3, 5, 1, 4)
        """Views of the cache. ``_keys`` is indexed by block, group of sixteen tokens, and token in the group;
        ``_values`` by block, group, pair of tokens, and token in the pair."""

    def slots(self, row: int, start: int, end: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        positions = np.arange(start, end, dtype=np.int64)
        blocks = self.table[row, positions // self.block_size].astype(np.int64)
        slots: np.ndarray[Any, np.dtype[np.int64]] = blocks * self.block_size + positions % self.block_size
        return slots

    def _index(self, row: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        slots = torch.from_numpy(self.slots(row, start, end))
        return slots // self.block_size, slots % self.block_size

    def write(self, row: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [n, kv_heads, head_dim] to the positions from ``start`` on. The sequence ends after
        them."""
        p, end = self.machine.pair, start + len(keys)
        block, inside = self._index(row, start, end)
        split = keys.view(-1, self.kv_heads, self.head_dim // p, p)
        self._keys[block, inside // 16, inside % 16] = split
        self._values[block, inside // 16, inside % 16 // p, inside % p] = values
        after = self.after(row, end)
        if after is not None:
            after.fill_(0)

    def after(self, row: int, end: int) -> Tensor | None:
        """Values [kv_heads, head_dim] at position ``end``, if it is the second half of a pair; otherwise None.

        Matmuls read whole pairs, so this position must contain numbers, not NaN.
        """
        if end % self.machine.pair == 0:
            return None
        block, inside = divmod(int(self.slots(row, end - 1, end)[0]), self.block_size)
        return self._values[block, inside // 16, inside % 16 // self.machine.pair, 1]

    def read(self, row: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values at positions ``start`` to ``end``, as :meth:`write` stored them."""
        p = self.machine.pair
        block, inside = self._index(row, start, end)
        keys = self._keys[block, inside // 16, inside % 16].flatten(2)
        return keys, self._values[block, inside // 16, inside % 16 // p, inside % p]


class Cache8(Cache):
    """A cache in 8 bits. At first all bytes are 255, which makes every scale NaN."""

    def _lay_out(self, num_blocks: int) -> None:
        dim, size = self.head_dim, self.block_size
        self.kv = torch.full((num_blocks, self.kv_heads, size // 16, 2, 16 * dim + 128), 255, dtype=torch.uint8)
        codes, scales = self.kv[..., : 16 * dim], self.kv[..., 16 * dim :].view(torch.float32)
        keys, values = codes.unbind(3)
        # The codes of keys, indexed by block, group of sixteen tokens, and token in the group, give [kv_heads,
        # head_dim].
        self._keys = keys.unflatten(3, (dim // 2, 16, 2)).permute(0, 2, 4, 1, 3, 5)
        self._values = values.unflatten(3, (dim // 16, 8, 16, 2)).permute(0, 2, 4, 6, 1, 3, 5)
        self._scales = scales.unflatten(4, (2, 16)).permute(3, 4, 0, 2, 5, 1)
        """View of the scales and minimums of keys and values."""

    def write(self, row: int, start: int, keys: Tensor, values: Tensor) -> None:
        block, inside = self._index(row, start, start + len(keys))
        for which, x in enumerate((keys, values)):
            rounded = Codes.of(x)
            if which == 0:
                self._keys[block, inside // 16, inside % 16] = rounded.codes.view(*x.shape[:2], -1, 2)
            else:
                view = rounded.codes.view(*x.shape[:2], -1, 16)
                self._values[block, inside // 16, inside % 16 // 2, inside % 2] = view
            for part, numbers in enumerate((rounded.scale, rounded.minimum)):
                self._scales[which, part][block, inside // 16, inside % 16] = numbers

    def after(self, row: int, end: int) -> Tensor | None:
        """None, because nothing after a sequence is read."""
        return None

    def erase(self, row: int, start: int, end: int) -> None:
        """Restore the initial state of positions ``start`` to ``end``."""
        block, inside = self._index(row, start, end)
        self._keys[block, inside // 16, inside % 16] = 255
        self._values[block, inside // 16, inside % 16 // 2, inside % 2] = 255
        self._scales.view(torch.int32)[:, :, block, inside // 16, inside % 16] = -1

    def codes(self, row: int, start: int, end: int) -> tuple[Codes, Codes]:
        """Codes of K and V, [n, kv_heads, head_dim]."""
        block, inside = self._index(row, start, end)
        place = block, inside // 16, inside % 16
        keys = self._keys[place].flatten(2)
        values = self._values[block, inside // 16, inside % 16 // 2, inside % 2].flatten(2)
        parts = [[self._scales[which, part][place] for part in (0, 1)] for which in (0, 1)]
        return Codes(keys, *parts[0]), Codes(values, *parts[1])

    def read(self, row: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        keys, values = self.codes(row, start, end)
        return keys.numbers, values.numbers


def make_cache(rng: random.Random, machine: Machine, lengths: Sequence[int], **sizes: Any) -> Cache:
    """Create a cache of the kind that ``machine`` has."""
    return (Cache8 if machine.int8_kv else Cache)(rng, machine, lengths, **sizes)


# -- running them ------------------------------------------------------------------------------------------------------


@functools.cache
def _pool(library: lib.Library, threads: int) -> lib.ThreadPool:
    return lib.ThreadPool(threads, pin=False)


def pool(threads: int) -> lib.ThreadPool:
    """Thread pool of the library, started once."""
    return _pool(lib.require(), threads)


def program(
    machine: Machine,
    ops: Sequence[lib.OpStruct] = (),
    buffers: Sequence[Buffer] = (),
    caches: Sequence[Cache] = (),
    tables: Sequence[Tensor] = (),
    capacity: int = 0,
) -> tuple[lib.Program, Any]:
    """(the program's struct, objects that must live as long as the struct). ``tables`` are rotary tables [capacity,
    head_dim]."""
    addresses = [buffer.whole.data_ptr() for buffer in buffers], [table.data_ptr() for table in tables]
    pointers = [(ctypes.c_void_p * len(group))(*group) for group in addresses]
    strides = (ctypes.c_int64 * len(buffers))(*(buffer.whole.stride(0) for buffer in buffers))
    layers = (lib.KVLayer * len(caches))(*(cache.struct for cache in caches))
    struct = lib.Program(
        ops=(lib.OpStruct * len(ops))(*ops),
        buffers=pointers[0],
        strides=strides,
        rotary=pointers[1],
        kv_layers=layers,
        num_ops=len(ops),
        num_buffers=len(buffers),
        num_rotary=len(tables),
        num_kv_layers=len(caches),
        dtype=NATIVE_DTYPES[machine.dtype],
        isa=lib.ISA_NAMES.index(machine.isa),
        capacity=capacity,
    )
    return struct, (pointers, strides, layers)


def run(
    machine: Machine,
    kind: OpKind,
    batch: Batch,
    buffers: Sequence[Buffer],
    caches: Sequence[Cache] = (),
    tables: Sequence[Tensor] = (),
    **fields: Any,
) -> None:
    """Run one operation. Tensors in ``fields`` are passed by address. A field that refers to a buffer has the index of
    the buffer; -1 by default."""
    numbers = {"in_": -1, "out": -1, "aux": -1, "rotary": -1}
    plain = {name: value.data_ptr() if isinstance(value, Tensor) else value for name, value in fields.items()}
    op = lib.OpStruct(kind=kind, **{**numbers, **plain})
    struct, _kept = program(machine, [op], buffers, caches, tables, batch.num_tokens)
    codes = torch.zeros(batch.num_tokens * lib.require().cl_code_bytes(op.k), dtype=torch.uint8)
    struct.codes = codes.data_ptr()
    done = lib.require().cl_run(pool(machine.threads).handle, struct, batch.struct, 0)
    assert done == 1, f"the kernels refused {kind.name}: {done}"
    for buffer in buffers:
        buffer.check_frame()
