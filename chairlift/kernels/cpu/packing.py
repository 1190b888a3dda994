"""Weights in the memory order that the C++ matmuls read.

A packed weight is a sequence of panels with 32 outputs each. A bf16 panel stores, for every pair of consecutive inputs,
the pairs of weights of its 32 outputs side by side, as the dot-product instructions need them. A float32 panel stores
the 32 weights of every single input side by side. A matmul therefore reads the weight once, from front to back. Outputs
are padded to whole panels and inputs to 32, with zeros.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import torch
from torch import Tensor

from chairlift.kernels.cpu.library import Memory, OpStruct, default_threads, load, require
from chairlift.kernels.grouped import GroupedRows, dequantized

__all__ = [
    "NATIVE_DTYPES",
    "PANEL",
    "KeptRows",
    "PackedMatrix",
    "PackedWeight",
    "by_slices",
    "copy_rows",
    "packed_bytes",
    "packed_columns",
    "padded_outputs",
]

NATIVE_DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1}
"""Dtype that the C++ kernels support -> value of ``cl_dtype``."""

PANEL: Final = 32
"""Number of outputs per panel. The number of inputs is rounded up to a multiple of it, too."""

_SLICE_BYTES: Final = 4 << 20
"""Maximum number of bytes of the source weight that one thread converts at a time. Only these bytes are in memory in
both layouts."""

_MAX_THREADS: Final = 8


def packed_bytes(
    out_features: int, in_features: int, dtype: torch.dtype, *, interleaved: bool = False, stack: int = 1
) -> int:
    """Bytes of a packed [out, in] weight, a multiple of 2,048. Raises ValueError for a dtype without kernels."""
    if dtype not in NATIVE_DTYPES:
        raise ValueError(f"the CPU kernels have no {dtype}; use one of {', '.join(map(str, NATIVE_DTYPES))}")
    return padded_outputs(out_features, interleaved, stack) * _rounded(in_features) * dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class KeptRows:
    """The outputs of a layer that this process computes, if several processes share the layer."""

    whole: int
    """Number of outputs of the whole layer."""
    ranges: tuple[tuple[int, int], ...]
    """(first, end) of each range of outputs, in the order in which the process stores them."""

    @property
    def count(self) -> int:
        """Number of outputs that are kept."""
        return sum(end - first for first, end in self.ranges)

    @property
    def first(self) -> int:
        """First output of the first range."""
        return self.ranges[0][0]

    def pieces(self, start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """(first, end, place) of each piece of the rows ``start`` to ``start + count`` that is kept: its rows counted
        from ``start``, and the index of the first of them among the kept rows."""
        place = 0
        for first, end in self.ranges:
            begin, stop = max(first, start), min(end, start + count)
            if begin < stop:
                yield begin - start, stop - start, place + begin - first
            place += end - first

    def of(self, values: Tensor) -> Tensor:
        """The kept entries of ``values`` [whole, ...]."""
        return torch.cat([values[first:end] for first, end in self.ranges])


class PackedMatrix(abc.ABC):
    """A layer's weight [out, in] in packed panels, and its bias. The weight is zero until :meth:`pack_rows` fills it.

    With ``interleaved`` the first half of the outputs are gates for the second half (SwiGLU). Both halves are padded to
    whole panels, and their panels alternate, so that a matmul computes a gate and its value at the same time. A
    ``stack`` is several weights one above the other, each with whole panels. The panels are stored in ``memory``, which
    must be zeroed and of the right size; None allocates new memory. Raises ValueError for an odd number of interleaved
    outputs or for outputs that do not divide into the stack, and errors of
    :class:`~chairlift.kernels.cpu.library.Memory`.
    """

    format = 0
    """Value of ``cl_format``: the number format in which the weight is stored."""
    group = 0
    """Number of inputs per group, in formats with groups; otherwise 0."""

    def __init__(
        self, out_features: int, in_features: int, nbytes: int, *, interleaved: bool, stack: int, memory: Memory | None
    ) -> None:
        if out_features % stack:
            raise ValueError(f"{out_features} outputs make no stack of {stack} equal weights")
        if interleaved and out_features // stack % 2:
            raise ValueError(f"interleaved outputs come in pairs, got {out_features // stack}")
        padded = padded_outputs(out_features, interleaved, stack)
        self.out_features = out_features
        self.interleaved = interleaved
        self.stack = stack
        self.n = (padded if interleaved else out_features) // stack
        """Number of output columns of one weight of the stack, as operations count them; interleaved halves include
        their padding."""
        self.k = in_features
        """Number of input columns, without padding."""
        self.panels = padded // PANEL
        """Number of panels, of 32 outputs each, in the packed weight."""
        self.memory = Memory(nbytes) if memory is None else memory
        """Memory that holds the panels. The first panel begins at the first byte of the memory."""
        self.bias: Tensor | None = None
        """Bias, float32 [panels * 32] in the order of the packed columns; None if there is none."""
        self.kept: KeptRows | None = None
        """Outputs of the layer that the weight has, if other processes have the others: ``out_features`` of them. None
        if the weight has all of them."""
        self.site = 0
        """Number by which the table of adapters knows this layer: 1 + its column; 0 if no adapter may change the
        layer. A stack has a column for each of its weights, and this is the number of the first one."""

    @property
    def layer_outputs(self) -> int:
        """Number of outputs of the layer, including those that other processes have."""
        return self.out_features if self.kept is None else self.kept.whole

    def pack_rows(self, source: Tensor | GroupedRows, first_row: int = 0, *, mapped: bool = False) -> None:
        """Write ``source`` [rows, in], of any float dtype and device, as the outputs from ``first_row`` on of the
        layer. Rows that are not kept are not read.

        ``mapped`` says that the source is a file mapping that was never written to; its pages are released after
        reading. Raises ValueError when the source does not fit.
        """
        rows = source.shape[0]
        if len(source.shape) != 2 or source.shape[1] != self.k or not 0 <= first_row <= self.layer_outputs - rows:
            raise ValueError(
                f"rows {first_row} to {first_row + rows} of shape {list(source.shape)} do not fit into a weight of "
                f"shape {[self.layer_outputs, self.k]}"
            )
        if self.kept is None:
            self._pack_kept(source, first_row, mapped)
            return
        for begin, end, place in self.kept.pieces(first_row, rows):
            self._pack_kept(source[begin:end], place, mapped)

    def _pack_kept(self, source: Tensor | GroupedRows, first_row: int, mapped: bool) -> None:
        """Write rows that the weight has, as its rows from ``first_row`` on."""
        rows = source.shape[0]
        each = self.out_features // self.stack
        panels = self.panels // self.stack
        for member in range(first_row // each, -(-(first_row + rows) // each)):
            begin, end = max(member * each, first_row), min((member + 1) * each, first_row + rows)
            some = source[begin - first_row : end - first_row]
            start = begin - member * each
            if not self.interleaved:
                self._pack(some, start, member * panels, 1, mapped)
                continue
            gates = min(max(each // 2 - start, 0), end - begin)
            self._pack(some[:gates], start, member * panels, 2, mapped)
            self._pack(some[gates:], start + gates - each // 2, member * panels + 1, 2, mapped)

    def set_bias(self, bias: Tensor) -> None:
        """Set the bias [out], of any float dtype. A later call overwrites it in place. Raises ValueError for a wrong
        shape."""
        if bias.shape != (self.layer_outputs,):
            raise ValueError(f"the bias has shape {list(bias.shape)}, but there are {self.layer_outputs} outputs")
        if self.bias is None:
            self.bias = torch.zeros(self.panels * PANEL)
        self.bias[self.columns()] = (bias if self.kept is None else self.kept.of(bias)).float()

    def point(self, op: OpStruct) -> None:
        """Make the operation ``op`` use this weight and its bias. Both must outlive the operation."""
        op.weight = self.memory.address
        op.format = self.format
        op.group = self.group
        op.bias = None if self.bias is None else self.bias.data_ptr()
        op.site = self.site

    @abc.abstractmethod
    def unpack(self) -> Tensor:
        """Copy of the weight [out, in], for tests and for operations in plain torch."""

    @abc.abstractmethod
    def _pack(
        self, source: Tensor | GroupedRows, first_row: int, first_panel: int, panel_step: int, mapped: bool
    ) -> None:
        """Write rows into panels ``first_panel``, ``first_panel + panel_step`` and so on."""

    def columns(self) -> Tensor:
        """int64 [out]: for each output of the layer, the index of the packed column that holds it."""
        return packed_columns(self.out_features, self.interleaved, self.stack)


class PackedWeight(PackedMatrix):
    """A packed weight of floats. Raises ValueError also for a dtype without kernels; see :func:`packed_bytes`."""

    def __init__(
        self,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        *,
        interleaved: bool = False,
        stack: int = 1,
        memory: Memory | None = None,
    ) -> None:
        nbytes = packed_bytes(out_features, in_features, dtype, interleaved=interleaved, stack=stack)
        super().__init__(out_features, in_features, nbytes, interleaved=interleaved, stack=stack, memory=memory)
        self.dtype = dtype
        pair = 4 // dtype.itemsize
        self._packed = self.memory.tensor(dtype, (self.panels, _rounded(in_features) // pair, PANEL, pair))

    def unpack(self) -> Tensor:
        rows = self._packed.transpose(1, 2).reshape(self.panels * PANEL, -1)
        return rows[self.columns(), : self.k].contiguous()

    def _pack(
        self, source: Tensor | GroupedRows, first_row: int, first_panel: int, panel_step: int, mapped: bool
    ) -> None:
        library = require()
        dtype = NATIVE_DTYPES[self.dtype]

        def pack(start: int, rows: Tensor) -> None:
            values = rows.to("cpu", self.dtype).contiguous()
            where = (first_row + start, len(values), first_panel, panel_step)
            library.cl_pack(self.memory.address, dtype, self.k, *where, values.data_ptr(), self.k)

        by_slices(dequantized(source), pack, mapped=mapped, first_row=first_row)


def copy_rows(target: Tensor, source: Tensor) -> None:
    """``target.copy_(source)`` for a source in an unwritten file mapping. The source's pages are released after
    reading."""
    by_slices(source, lambda start, rows: target[start : start + len(rows)].copy_(rows), mapped=True)


def by_slices(source: Tensor, work: Callable[[int, Tensor], object], *, mapped: bool, first_row: int = 0) -> None:
    """Call ``work(start, rows)`` for slices of a few megabytes of ``source``, on several threads. The pages of a mapped
    source are released.

    ``first_row`` is the index of the first row in a packed weight. No two slices write to the same panel.
    """
    library = load()
    row_bytes = max(source[:1].numel() * max(source.element_size(), 4), 1)
    count = max(_SLICE_BYTES // row_bytes // PANEL, 1) * PANEL
    edges = [0, *range(count - first_row % PANEL, source.shape[0], count), source.shape[0]]

    def release(rows: Tensor) -> None:
        if mapped and library is not None and rows.is_contiguous():
            library.cl_release_pages(rows.data_ptr(), rows.numel() * rows.element_size())

    def one(start: int, end: int) -> None:
        work(start, source[start:end])
        release(source[start:end])

    if len(edges) == 2:
        one(*edges)
        return
    # Most of the time is spent on page faults of the memory and the file. Several threads handle page faults faster.
    with ThreadPoolExecutor(min(default_threads(), _MAX_THREADS)) as pool:
        list(pool.map(one, edges, edges[1:]))
    release(source)  # reading a slice may have mapped the end of its neighbour again, up to a huge page


def padded_outputs(out_features: int, interleaved: bool, stack: int = 1) -> int:
    """Number of output columns in memory. Each weight of a stack, and each half of an interleaved weight, is padded to
    whole panels."""
    each = out_features // stack
    return stack * (2 * _rounded(each // 2) if interleaved else _rounded(each))


def packed_columns(out_features: int, interleaved: bool, stack: int = 1) -> Tensor:
    """int64 [out]: for each output of a packed weight, the index of the packed column that holds it."""
    each = out_features // stack
    outputs = torch.arange(out_features)
    base = outputs // each * (padded_outputs(out_features, interleaved, stack) // stack)
    outputs = outputs % each
    if not interleaved:
        return base + outputs
    half = each // 2
    within = outputs % half
    return base + (within // PANEL * 2 + outputs // half) * PANEL + within % PANEL


def _rounded(count: int) -> int:
    return -(-count // PANEL) * PANEL
