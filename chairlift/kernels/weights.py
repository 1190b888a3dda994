"""Formats of a model's matrices in memory: one class per format.

A weight format allocates weights, writes rows into them as they arrive, and multiplies with them. Only the format knows
the type of its weights: parameters, tensors in oneDNN's layout, packed panels, values with scales. A layer holds a
weight and its format. Models and the loader are independent of the format.

A weight is never in memory twice: rows arrive in slices and are written to their final memory, also when they replace
older rows. The exception is oneDNN, which packs whole matrices only, so one matrix at a time exists in both layouts.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from chairlift.errors import ConfigError, InvariantError
from chairlift.kernels import ops
from chairlift.kernels.coded import DECODED_BYTES, CodedWeight, coded_bytes
from chairlift.kernels.cpu.library import Memory, why_unavailable
from chairlift.kernels.cpu.packed_codes import PackedCodes, packed_code_bytes
from chairlift.kernels.cpu.packing import (
    NATIVE_DTYPES,
    KeptRows,
    PackedMatrix,
    PackedWeight,
    copy_rows,
    packed_bytes,
)
from chairlift.kernels.fp8 import Fp8Weight
from chairlift.kernels.grouped import GROUP, GroupedRows, GroupKind, dequantized

__all__ = [
    "CODED",
    "DEVICE_QUANTIZED",
    "FP8",
    "NATIVE",
    "ONEDNN",
    "PLAIN",
    "QUANTIZED",
    "MatrixShape",
    "WeightFormat",
]


class MatrixShape(NamedTuple):
    """Shape and storage of a weight [out, in]."""

    out_features: int
    in_features: int
    interleaved: bool = False
    """Whether the first half of the outputs are gates for the second half. A format may store each gate next to its
    value."""
    kind: GroupKind | None = None
    """Kind of the integer groups in which a quantised checkpoint stores the weight; None if it stores floats."""
    stack: int = 1
    """Number of weights of equal shape, stored one above the other and used separately (experts)."""
    kept: KeptRows | None = None
    """Outputs that this process computes, if several processes share the layer; None: all. Only the native kernels'
    format can keep a part."""

    @property
    def stored(self) -> int:
        """Number of outputs that this process stores."""
        return self.out_features if self.kept is None else self.kept.count


class WeightFormat(abc.ABC):
    """A format of weights [out, in]. The ``weight`` arguments are objects that :meth:`empty` returned."""

    embeds = False
    """Whether embeddings can be looked up in a weight of this format. If so, a tied output head can share the
    embedding's weight."""
    scratch_bytes = 0
    """Bytes that a matmul may need in addition to its inputs and its result."""

    @property
    def head(self) -> WeightFormat:
        """Format of the output head in a model whose other layers have this format."""
        return self

    @property
    def stacked(self) -> WeightFormat:
        """Format of stacked weights (experts) in a model whose other layers have this format."""
        return self

    def fitting(self, dtype: torch.dtype, device: torch.device) -> WeightFormat:
        """This format, or a similar one that works for a model of ``dtype`` on ``device``. Raises ConfigError if there
        is none."""
        return self

    def kind_of(self, shape: MatrixShape) -> GroupKind | None:
        """Kind of integer groups in which a weight of this shape is in memory; None if it is stored otherwise."""
        return None

    @abc.abstractmethod
    def nbytes(self, shape: MatrixShape, dtype: torch.dtype) -> int:
        """Bytes of a weight of this format, with the given shape, in a model of ``dtype``."""

    @abc.abstractmethod
    def empty(self, shapes: Sequence[MatrixShape], dtype: torch.dtype, device: torch.device) -> list[Any]:
        """Uninitialised weights for a model of ``dtype``, in the order of ``shapes``."""

    def write(self, weight: Any, start: int, rows: Tensor | GroupedRows, *, mapped: bool) -> None:
        """Write ``rows`` [count, in], of any float dtype on any device, as the outputs from ``start`` on.

        ``mapped`` says that the rows are in an unwritten file mapping; its pages are released after reading.
        """
        weight.pack_rows(dequantized(rows), start, mapped=mapped)

    def finish(self, weight: Any, bias: Tensor | None) -> None:  # noqa: B027 - most formats have nothing left to do
        """Finish a weight after all its rows and the layer's bias [out] have been written. Call it again after they
        were replaced."""

    def name(self, weight: Any) -> str | None:
        """Name of the weight's number format, such as ``int4``; None if the weight has the model's dtype."""
        return None

    def losses(self, weight: Any) -> tuple[str, ...]:
        """What the weight, or a matmul with it, rounds beyond the model's dtype, in words. Call it after all rows have
        been written."""
        return ()

    @abc.abstractmethod
    def linear(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """``x[T, in] @ weight.T + bias``, [T, out]."""


@dataclasses.dataclass(frozen=True)
class Plain(WeightFormat):
    """Ordinary torch parameters, which can be trained and saved."""

    embeds = True

    def nbytes(self, shape: MatrixShape, dtype: torch.dtype) -> int:
        return shape.out_features * shape.in_features * dtype.itemsize

    def empty(self, shapes: Sequence[MatrixShape], dtype: torch.dtype, device: torch.device) -> list[nn.Parameter]:
        tensors = [torch.empty(shape[:2], dtype=dtype, device=device) for shape in shapes]
        return [nn.Parameter(tensor, requires_grad=False) for tensor in tensors]

    def write(self, weight: Tensor, start: int, rows: Tensor | GroupedRows, *, mapped: bool) -> None:
        place = weight.detach()[start : start + len(rows)]
        rows = dequantized(rows)
        if mapped:
            copy_rows(place, rows)
        else:
            place.copy_(rows)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return ops.linear(x, weight, bias)


class _OneDnnWeight:
    """A weight [out, in] in oneDNN's format. While its rows are written, it is in ``rows``; afterwards it is in
    ``packed``, in oneDNN's own layout."""

    packed: Tensor

    def __init__(self, shape: MatrixShape, dtype: torch.dtype) -> None:
        self.size = torch.Size(shape[:2])
        self.dtype = dtype
        self.rows: Tensor | None = None

    def pack_rows(self, rows: Tensor, start: int, *, mapped: bool) -> None:
        if not mapped and rows.shape == self.size and rows.dtype == self.dtype and rows.is_contiguous():
            self.rows = rows.cpu()  # a whole weight needs no copy
            return
        if self.rows is None:
            self.rows = torch.empty(self.size, dtype=self.dtype)
        PLAIN.write(self.rows, start, rows, mapped=mapped)


@dataclasses.dataclass(frozen=True)
class OneDnn(WeightFormat):
    """oneDNN's own layout, for layers that PyTorch runs on the CPU. Weights stay plain if oneDNN has no kernels for
    them.

    Stacked weights stay plain, too, because oneDNN packs whole matrices only.
    """

    @property
    def stacked(self) -> WeightFormat:
        return PLAIN

    def fitting(self, dtype: torch.dtype, device: torch.device) -> WeightFormat:
        packs = ops.pack_weight(torch.zeros(16, 16, dtype=dtype, device=device)) if device.type == "cpu" else None
        return PLAIN if packs is None else self

    def nbytes(self, shape: MatrixShape, dtype: torch.dtype) -> int:
        return PLAIN.nbytes(shape, dtype)

    def empty(self, shapes: Sequence[MatrixShape], dtype: torch.dtype, device: torch.device) -> list[_OneDnnWeight]:
        return [_OneDnnWeight(shape, dtype) for shape in shapes]

    def finish(self, weight: _OneDnnWeight, bias: Tensor | None) -> None:
        if weight.rows is None or (packed := ops.pack_weight(weight.rows)) is None:
            raise InvariantError("oneDNN packs no weight that has no rows")
        weight.packed = packed
        weight.rows = None

    def linear(self, x: Tensor, weight: _OneDnnWeight, bias: Tensor | None) -> Tensor:
        return ops.packed_linear(x, weight.packed, bias)


@dataclasses.dataclass(frozen=True)
class Native(WeightFormat):
    """Packed panels of the native CPU kernels, for step programs only: float32 and bfloat16, or codes in groups.

    Without a ``kind``, codes in a checkpoint stay codes, and floats stay floats. With a ``kind``, all weights are
    rounded to it; only the output head and the embedding keep at least 8 bits.
    """

    kind: GroupKind | None = None
    floats: bool = False
    """Whether integer codes of a quantised checkpoint are converted to floats."""

    embeds = True

    @property
    def head(self) -> WeightFormat:
        return self if self.kind is None else dataclasses.replace(self, kind=GroupKind(8, GROUP))

    def fitting(self, dtype: torch.dtype, device: torch.device) -> WeightFormat:
        if reason := why_unavailable():
            raise ConfigError(reason)
        if device.type != "cpu" or dtype not in NATIVE_DTYPES:
            raise ConfigError(f"the CPU kernels run float32 and bfloat16 on device cpu, not {dtype} on {device}")
        return self

    def kind_of(self, shape: MatrixShape) -> GroupKind | None:
        stored = None if shape.kind is None or shape.kind.e4m3 else shape.kind  # 8-bit floats have no kernel
        return None if self.floats else self.kind or stored

    def nbytes(self, shape: MatrixShape, dtype: torch.dtype) -> int:
        sizes = (shape.stored, shape.in_features)
        kind = self.kind_of(shape)
        if kind is None:
            return packed_bytes(*sizes, dtype, interleaved=shape.interleaved, stack=shape.stack)
        return packed_code_bytes(*sizes, kind, interleaved=shape.interleaved, stack=shape.stack)

    def empty(self, shapes: Sequence[MatrixShape], dtype: torch.dtype, device: torch.device) -> list[PackedMatrix]:
        """Allocate all weights in one block of memory that begins on a huge page. Separate blocks would each waste the
        rest of their last huge page."""
        sizes = [self.nbytes(shape, dtype) for shape in shapes]
        memory = Memory(sum(sizes))
        offset = 0
        weights = list[PackedMatrix]()
        for shape, size in zip(shapes, sizes, strict=True):
            n, k, kind = shape.stored, shape.in_features, self.kind_of(shape)
            layout: dict[str, Any] = {"interleaved": shape.interleaved, "stack": shape.stack}
            layout["memory"] = memory.part(offset, size)
            weights.append(PackedWeight(n, k, dtype, **layout) if kind is None else PackedCodes(n, k, kind, **layout))
            weights[-1].kept = shape.kept
            offset += size
        return weights

    def write(self, weight: PackedMatrix, start: int, rows: Tensor | GroupedRows, *, mapped: bool) -> None:
        weight.pack_rows(rows, start, mapped=mapped)

    def finish(self, weight: PackedMatrix, bias: Tensor | None) -> None:
        if bias is not None:
            weight.set_bias(bias.detach())

    def name(self, weight: PackedMatrix) -> str | None:
        return weight.kind.name if isinstance(weight, PackedCodes) else None

    def losses(self, weight: PackedMatrix) -> tuple[str, ...]:
        if not isinstance(weight, PackedCodes):
            return ()
        rounded = (f"weights rounded to {weight.kind.name}",) if weight.rounds_weights else ()
        scales = ("scales of weights rounded to float16",) if weight.rounds_scales else ()
        return ("8-bit activations in matmuls with integer weights", *rounded, *scales)

    def linear(self, x: Tensor, weight: PackedMatrix, bias: Tensor | None) -> Tensor:
        return ops.native_linear(x, weight)


@dataclasses.dataclass(frozen=True)
class Fp8(WeightFormat):
    """Weights of 8-bit floats with a float32 scale per output, for the Triton kernels.

    The output head stays plain, as the embedding does: fp8 would cost more quality than it gains in speed. Stacked
    weights stay plain, too.
    """

    @property
    def stacked(self) -> WeightFormat:
        return PLAIN

    @property
    def head(self) -> WeightFormat:
        return PLAIN

    def nbytes(self, shape: MatrixShape, dtype: torch.dtype) -> int:
        return shape.out_features * (shape.in_features + 4)

    def empty(self, shapes: Sequence[MatrixShape], dtype: torch.dtype, device: torch.device) -> list[Fp8Weight]:
        return [Fp8Weight(shape.out_features, shape.in_features, device) for shape in shapes]

    def name(self, weight: Fp8Weight) -> str | None:
        return "fp8"

    def losses(self, weight: Fp8Weight) -> tuple[str, ...]:
        return ("8-bit float activations in matmuls with fp8 weights", "weights rounded to fp8")

    def linear(self, x: Tensor, weight: Fp8Weight, bias: Tensor | None) -> Tensor:
        return ops.fp8_linear(x, weight, bias)


@dataclasses.dataclass(frozen=True)
class Coded(WeightFormat):
    """Codes in groups, as :class:`Native` keeps them, for the Triton kernels. Floats of a checkpoint stay plain.

    With a ``kind``, all weights are rounded to it; only the output head and the embedding keep at least 8 bits.
    """

    kind: GroupKind | None = None

    embeds = True
    scratch_bytes = DECODED_BYTES

    @property
    def head(self) -> WeightFormat:
        return self if self.kind is None else dataclasses.replace(self, kind=GroupKind(8, GROUP))

    def kind_of(self, shape: MatrixShape) -> GroupKind | None:
        return self.kind or shape.kind

    def nbytes(self, shape: MatrixShape, dtype: torch.dtype) -> int:
        kind = self.kind_of(shape)
        return (
            PLAIN.nbytes(shape, dtype)
            if kind is None
            else coded_bytes(shape.out_features, shape.in_features, kind, dtype)
        )

    def empty(
        self, shapes: Sequence[MatrixShape], dtype: torch.dtype, device: torch.device
    ) -> list[CodedWeight | nn.Parameter]:
        weights = list[CodedWeight | nn.Parameter]()
        for shape in shapes:
            kind = self.kind_of(shape)
            if kind is None:
                weights += PLAIN.empty([shape], dtype, device)
            else:
                weights.append(CodedWeight(shape.out_features, shape.in_features, kind, dtype, device))
        return weights

    def write(
        self, weight: CodedWeight | nn.Parameter, start: int, rows: Tensor | GroupedRows, *, mapped: bool
    ) -> None:
        if isinstance(weight, CodedWeight):
            weight.pack_rows(rows, start, mapped=mapped)
        else:
            PLAIN.write(weight, start, rows, mapped=mapped)

    def name(self, weight: CodedWeight | nn.Parameter) -> str | None:
        return weight.kind.name if isinstance(weight, CodedWeight) else None

    def losses(self, weight: CodedWeight | nn.Parameter) -> tuple[str, ...]:
        if not isinstance(weight, CodedWeight):
            return ()
        found = []
        if weight.rounds_weights:
            found.append(f"weights rounded to {weight.kind.name}")
        if weight.rounds_scales:
            found.append("scales of weights rounded to float16")
        if weight.dtype != torch.float32:  # a code times a scale has up to 19 bits
            found.append(f"weights rounded to {str(weight.dtype).removeprefix('torch.')}")
        return tuple(found)

    def linear(self, x: Tensor, weight: CodedWeight | nn.Parameter, bias: Tensor | None) -> Tensor:
        return ops.coded_linear(x, weight, bias) if isinstance(weight, CodedWeight) else ops.linear(x, weight, bias)


PLAIN: Final = Plain()
ONEDNN: Final = OneDnn()
NATIVE: Final = Native()
FP8: Final = Fp8()
CODED: Final = Coded()

QUANTIZED: Final[dict[str, WeightFormat]] = {
    "int8": Native(GroupKind(8, GROUP)),
    "int4": Native(GroupKind(4, GROUP)),
    "fp8": FP8,
}
"""Value of the setting ``quantization`` -> weight format."""
DEVICE_QUANTIZED: Final[dict[str, WeightFormat]] = {
    "int8": Coded(GroupKind(8, GROUP)),
    "int4": Coded(GroupKind(4, GROUP)),
    "fp8": FP8,
}
"""Value of the setting ``quantization`` -> weight format for the Triton kernels."""
