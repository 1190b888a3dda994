"""Runs a single CPU kernel as a program of equal operations on different parts of memory.

Each operation reads its weights, or its K and V, from the next part of a region that is larger than all processor
caches. So the data comes from memory, as in an engine with a large model.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from chairlift.base.step_batch import StepBatch
from chairlift.errors import InvariantError
from chairlift.kernels.cpu import library as lib
from chairlift.kernels.cpu.fused_op import OpFlag, OpKind
from chairlift.kernels.cpu.packed_codes import code_format, packed_code_bytes
from chairlift.kernels.cpu.packing import NATIVE_DTYPES, PANEL, packed_bytes
from chairlift.kernels.cpu.program import SPARE_ROWS
from chairlift.kernels.experts import route
from chairlift.kernels.grouped import GroupKind
from chairlift.kernels.routing import SCORINGS, Routing
from chairlift_lab.bench.shapes import ExpertLayer, LayerShapes

__all__ = [
    *("BLOCK_SIZE", "WEIGHT_STD", "ExpertTokens", "Kernels", "Prepare"),
    *("expert_bytes", "kv_bytes", "weight_bytes"),
]

BLOCK_SIZE: Final = 16
"""Number of tokens in a KV block: the engine's default."""

Prepare = Callable[[], Callable[[], object]]
"""Function that chooses the memory of the next run, and returns the function whose time is measured."""

_PAGE: Final = 4096
_PATTERN: Final = 1 << 20
WEIGHT_STD: Final = 0.05
_ROUTERS: Final = 8
"""Number of different orders of the experts. Consecutive layers use different orders."""


def weight_bytes(
    n: int, k: int, dtype: torch.dtype, kind: GroupKind | None, *, interleaved: bool = False, stack: int = 1
) -> int:
    """Size in bytes of a packed weight [n, k].

    For ``interleaved`` and ``stack`` see :class:`~chairlift.kernels.cpu.packing.PackedMatrix`.
    """
    if kind is None:
        return packed_bytes(n, k, dtype, interleaved=interleaved, stack=stack)
    return packed_code_bytes(n, k, kind, interleaved=interleaved, stack=stack)


def expert_bytes(layer: ExpertLayer, dtype: torch.dtype, kind: GroupKind | None) -> tuple[int, int]:
    """Size in bytes of the packed weights of all experts: (gate and up projections, down projections)."""
    number = layer.num_experts
    gate_up = weight_bytes(2 * number * layer.inner, layer.k, dtype, kind, interleaved=True, stack=number)
    return gate_up, weight_bytes(number * layer.k, layer.inner, dtype, kind, stack=number)


class ExpertTokens:
    """Input for a layer of experts: ``rows`` random tokens, a router weight, and the experts that the router
    chooses."""

    def __init__(self, layer: ExpertLayer, rows: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.routing = Routing(num_experts=layer.num_experts, top_k=layer.chosen, normalise=True)
        self.x = torch.randn(rows, layer.k, generator=generator).to(dtype)
        self.router = torch.randn(layer.num_experts, layer.k, generator=generator).to(dtype)
        chosen = route(self.x.float() @ self.router.float().T, self.routing)[1]
        self.touched = len(set(chosen.flatten().tolist()))
        """Number of distinct experts that the tokens choose."""


def kv_bytes(model: LayerShapes, batch: int, context: int, dtype: torch.dtype) -> int:
    """Size in bytes of the K and V of ``batch`` sequences of ``context`` tokens in one layer, in whole blocks."""
    return 2 * batch * -(-context // BLOCK_SIZE) * BLOCK_SIZE * model.kv_heads * model.head_dim * dtype.itemsize


class Kernels:
    """Prepares timed runs of single kernels of one instruction set and dtype, on a thread pool.

    Operations take their weights in turn from a region of ``region_bytes`` of random numbers. No single operation may
    read more than the region. Weights have type ``dtype``, or are quantised in the format ``kind``. Raises OSError if
    the compiled kernels are missing.
    """

    def __init__(
        self, pool: lib.ThreadPool, isa: str, dtype: torch.dtype, region_bytes: int, kind: GroupKind | None = None
    ) -> None:
        self._kind = kind
        self._library = lib.require()
        self._pool = pool
        self._isa = isa
        self._dtype = dtype
        self._region = lib.Memory(region_bytes)
        self._generator = torch.Generator().manual_seed(0)
        pattern = self._normal(min(_PATTERN, region_bytes // dtype.itemsize)) * WEIGHT_STD
        values = self._region.tensor(dtype, (region_bytes // dtype.itemsize,))
        for start in range(0, len(values), len(pattern)):
            part = values[start : start + len(pattern)]
            part.copy_(pattern[: len(part)])
        self._next = 0

    def products(self, k: int, n: int, rows: int, count: int) -> dict[str, Prepare]:
        """Prepare ``count`` matrix multiplications [rows, k] x [k, n], each with different weights. Returns variant ->
        prepared run."""
        buffers = [self._activations(rows, k), self._buffer(rows, n)]
        nbytes = weight_bytes(n, k, self._dtype, self._kind)
        batch = _Batch([rows], [rows])

        def prepare() -> Callable[[], None]:
            fields = {"kind": OpKind.LINEAR, "in_": 0, "out": 1, "aux": -1, "rotary": -1, "n": n, "k": k}
            ops = [lib.OpStruct(**fields, **self._format, weight=self._take(nbytes)) for _ in range(count)]
            return self._program(ops, buffers, [], batch)

        return {"all": prepare}

    @property
    def _format(self) -> dict[str, int]:
        """Fields of an operation that describe the format of quantised weights."""
        return {} if self._kind is None else {"format": code_format(self._kind), "group": self._kind.group}

    def attention(
        self,
        model: LayerShapes,
        *,
        queries: int,
        context: int,
        batch: int,
        shuffled: bool,
        count: int,
        shared: int = 0,
        apart: bool = False,
    ) -> Prepare:
        """Prepare the attention of ``count`` layers over ``batch`` sequences of ``context`` tokens.

        The last ``queries`` tokens of each sequence are queries. Each layer has its own K and V. The KV blocks of the
        sequences are in order, or in random order if ``shuffled``. All sequences have the blocks of their first
        ``shared`` tokens (whole blocks) in common. With ``apart`` the rows do not read them together.
        """
        width = model.heads * model.head_dim
        buffers = [self._activations(batch * queries, width), self._buffer(batch * queries, width)]
        blocks = -(-context // BLOCK_SIZE)
        common = shared // BLOCK_SIZE
        order = np.arange(common + batch * (blocks - common), dtype=np.int32)
        if shuffled:
            np.random.default_rng(0).shuffle(order)
        own = order[common:].reshape(batch, blocks - common)
        table = np.concatenate((np.tile(order[:common], (batch, 1)), own), axis=1)
        rows = _Batch([queries] * batch, [context] * batch, np.ascontiguousarray(table))
        nbytes = kv_bytes(model, 1, len(order) * BLOCK_SIZE, self._dtype)
        sizes = {"kv_heads": model.kv_heads, "head_dim": model.head_dim}

        def prepare() -> Callable[[], None]:
            layers = [
                lib.KVLayer(
                    kv=self._take(nbytes),
                    block_size=BLOCK_SIZE,
                    num_blocks=len(order),
                    **sizes,
                )
                for _ in range(count)
            ]
            fields = {
                "kind": OpKind.ATTENTION,
                "in_": 0,
                "out": 1,
                "aux": -1,
                "rotary": -1,
                "heads": model.heads,
                "flags": int(OpFlag.APART) if apart else 0,
                **sizes,
            }
            ops = [lib.OpStruct(**fields, layer=layer, scale=model.head_dim**-0.5) for layer in range(count)]
            return self._program(ops, buffers, layers, rows)

        return prepare

    def head(self, k: int, vocab_size: int, rows: int, *, temperature: float, count: int) -> Prepare:
        """Prepare the output head and sampling for ``rows`` rows, repeated ``count`` times. Temperature 0 is greedy
        sampling."""
        hidden = self._activations(rows, k)
        token_rows = np.arange(rows, dtype=np.int32)
        records = np.zeros(rows, dtype=lib.SAMPLING_ROW)
        records["seed"], records["temperature"] = token_rows, temperature
        records["top_p"] = records["repetition"] = 1
        records["num_logprobs"] = records["target"] = -1
        nbytes = weight_bytes(vocab_size, k, self._dtype, self._kind)
        program = lib.Program(dtype=NATIVE_DTYPES[self._dtype], isa=lib.ISA_NAMES.index(self._isa))

        def prepare() -> Callable[[], None]:
            weights = [self._take(nbytes) for _ in range(count)]

            def run() -> None:
                given = hidden.data_ptr(), hidden.stride(0), token_rows.ctypes.data, None, rows
                results = records.ctypes.data, None, 0
                for weight in weights:
                    product = lib.OpStruct(n=vocab_size, k=k, **self._format, weight=weight)
                    code = self._library.cl_head(self._pool.handle, program, *given, product, *results)
                    if code < 0:
                        raise InvariantError(f"the native output head refused {rows} rows ({code})")

            return run

        return prepare

    def experts(self, layer: ExpertLayer, tokens: ExpertTokens, count: int) -> dict[str, Prepare]:
        """Prepare ``count`` layers of experts, each with different weights. Returns variant -> prepared run.

        The tokens choose other experts in each layer, so that a layer does not read the same part of its weights as the
        layer before it.
        """
        rows = len(tokens.x)
        number = layer.num_experts
        x = self._buffer(rows, layer.k)
        out = self._buffer(rows, layer.k)
        x[:rows, : layer.k] = tokens.x
        gate_up, down = expert_bytes(layer, self._dtype, self._kind)
        routers = []
        for turn in range(min(number, _ROUTERS)):
            padded = torch.zeros(number, -(-layer.k // PANEL) * PANEL, dtype=self._dtype)
            padded[:, : layer.k] = tokens.router.roll(turn * max(1, number // _ROUTERS), 0)
            routers.append(padded)
        batch = _Batch([rows], [rows])
        code = self._format
        sizes = {"num_experts": number, "top_k": layer.chosen, "inner": layer.inner, "groups": 1, "kept_groups": 1}
        sizes |= {"scoring": SCORINGS.index(tokens.routing.scoring), "normalise": tokens.routing.normalise}
        sizes |= {f"down_{name}": value for name, value in code.items()} | {"down_n": layer.k}
        fields = {"kind": OpKind.EXPERTS, "in_": 0, "out": 1, "aux": -1, "rotary": -1, "k": layer.k}
        fields["n"] = 2 * -(-layer.inner // PANEL) * PANEL
        scratch: list[lib.Memory] = []

        def prepare() -> Callable[[], None]:
            ops = []
            structs = []
            for turn in range(count):
                weight = self._take(gate_up + down)
                router = routers[turn % len(routers)].data_ptr()
                structs.append(lib.Experts(**sizes, scale=1.0, router=router, down=weight + gate_up))
                ops.append(lib.OpStruct(**fields, **code, weight=weight, experts=ctypes.pointer(structs[-1])))
            if not scratch:
                scratch.append(lib.Memory(self._library.cl_expert_bytes(ops[0], NATIVE_DTYPES[self._dtype], rows)))
            for each in structs:
                each.scratch = scratch[0].address
            run = self._program(ops, [x, out], [], batch)
            run.kept += [structs, routers, scratch]
            return run

        return {"all": prepare}

    def _program(
        self, ops: Sequence[lib.OpStruct], buffers: Sequence[Tensor], layers: Sequence[lib.KVLayer], batch: _Batch
    ) -> _Run:
        arrays = (
            (lib.OpStruct * len(ops))(*ops),
            (ctypes.c_void_p * len(buffers))(*(buffer.data_ptr() for buffer in buffers)),
            (ctypes.c_int64 * len(buffers))(*(buffer.stride(0) for buffer in buffers)),
            (lib.KVLayer * len(layers))(*layers),
        )
        program = lib.Program(
            ops=arrays[0],
            buffers=arrays[1],
            strides=arrays[2],
            kv_layers=arrays[3],
            num_ops=len(ops),
            num_buffers=len(buffers),
            num_kv_layers=len(layers),
            dtype=NATIVE_DTYPES[self._dtype],
            isa=lib.ISA_NAMES.index(self._isa),
            capacity=len(buffers[0]),
        )
        kept: list[Any] = [arrays, buffers]
        if self._kind is not None:
            kept.append(lib.Memory(len(buffers[0]) * self._library.cl_code_bytes(max(op.k for op in ops))))
            program.codes = kept[-1].address
        return _Run(self._library, self._pool, program, batch, kept)

    def _take(self, nbytes: int) -> int:
        """Address of the next ``nbytes`` bytes of the region. After the end of the region, start again at its
        beginning."""
        if self._next + nbytes > self._region.nbytes:
            self._next = 0
        address = self._region.address + self._next
        self._next += -(-nbytes // _PAGE) * _PAGE
        return address

    def _activations(self, rows: int, width: int) -> Tensor:
        """Create a :meth:`_buffer` of activations, filled with normally distributed random numbers."""
        buffer = self._buffer(rows, width)
        buffer[:, :width] = self._normal(len(buffer), width)
        return buffer

    def _buffer(self, rows: int, width: int) -> Tensor:
        """Buffer of zeros [rows + SPARE_ROWS, stride] for rows of ``width`` columns, padded as in the engine."""
        stride = -(-width // PANEL) * PANEL
        if stride * self._dtype.itemsize % 1024 == 0:
            stride += PANEL
        memory = lib.Memory((rows + SPARE_ROWS) * stride * self._dtype.itemsize)
        return memory.tensor(self._dtype, (rows + SPARE_ROWS, stride))

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator).to(self._dtype)


class _Batch:
    """A ``cl_batch`` (struct of the C kernels) with the arrays that it points to.

    ``new`` has the number of new tokens of each sequence, and ``lengths`` its total number of tokens.
    """

    def __init__(
        self, new: Iterable[int], lengths: Iterable[int], block_table: npt.NDArray[np.int32] | None = None
    ) -> None:
        counts = list(new)
        tokens = np.zeros(sum(counts), dtype=np.int32)
        table = np.zeros((len(counts), 1), dtype=np.int32) if block_table is None else block_table
        self._arrays = StepBatch(
            token_ids=tokens,
            positions=tokens,
            cu_seqlens=np.cumsum([0, *counts], dtype=np.int32),
            seq_lens=np.array(list(lengths), dtype=np.int32),
            block_tables=table[None],
            slot_mapping=np.zeros((1, len(tokens)), dtype=np.int64),
        )
        self.struct = lib.BatchStruct.of(self._arrays)


@dataclasses.dataclass(slots=True)
class _Run:
    """A call of the native library. ``kept`` has the objects that the C structs point to, so that they stay alive."""

    library: lib.Library
    pool: lib.ThreadPool
    program: lib.Program
    batch: _Batch
    kept: Any

    def __call__(self) -> None:
        code = self.library.cl_run(self.pool.handle, self.program, self.batch.struct, 0)
        if code != self.program.num_ops:
            raise InvariantError(f"the native kernels refused a program of {self.program.num_ops} operations ({code})")
