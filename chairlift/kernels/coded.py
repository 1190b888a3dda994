"""Linear layers whose weight stays in codes of 8 or 4 bits, for the Triton kernels.

The codes, scales and minimums are those of :class:`~chairlift.kernels.cpu.packed_codes.PackedCodes`, in another memory
order. A unit of 32 inputs is stored together: 32 bytes with 8 bits, or 16 bytes with 4 bits. Byte b of the latter has
input b in its low half and input b + 16 in its high half. So a thread that loads 16 bytes has whole units, and their
halves need no interleaving.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from chairlift.errors import ConfigError
from chairlift.kernels.cpu.packing import by_slices
from chairlift.kernels.grouped import GROUP, GroupedRows, GroupKind
from chairlift.kernels.rounding import rounded_rows

__all__ = ["DECODED_BYTES", "SCALE_UNIT", "CodedWeight", "coded_bytes", "coded_linear"]

SCALE_UNIT: Final = 256.0
"""Factor by which float16 scales and minimums are multiplied when they are stored, so that small ones stay exact."""
DECODED_BYTES: Final = 64 << 20
"""Maximum size of the piece of a weight that is decoded at a time for many rows."""
_EXPONENT: Final = 23
"""Place of the exponent in the bits of a float32 number."""


def coded_bytes(out_features: int, in_features: int, kind: GroupKind, dtype: torch.dtype) -> int:
    """Bytes of a weight [out, in] in codes of ``kind``, with its scales and minimums, in a model of ``dtype``."""
    units = -(-in_features // GROUP)
    table = _table(kind, dtype).itemsize * (2 if kind.minimum else 1)
    return out_features * (units * GROUP * kind.bits // 8 + -(-in_features // kind.group) * table)


def _table(kind: GroupKind, dtype: torch.dtype) -> torch.dtype:
    """Dtype of the scales of a kind in a model of ``dtype``."""
    if kind.e2m1:
        return torch.uint8
    return torch.float32 if kind.e4m3 or dtype == torch.float32 else torch.float16


class CodedWeight:
    """A weight [out, in] of one :class:`~chairlift.kernels.grouped.GroupKind` in a model of ``dtype``. The weight is
    zero until :meth:`pack_rows` fills it.

    Scales and minimums are multiplied by 256 and stored as float16, or in a model of float32 as they are. For the
    scales of GGUF, GPTQ and AWQ files both are exact, because these are float16. The scales of MXFP4 are powers of two
    and are stored as 8-bit exponents; scales below 2**-126 become zero. Raises ValueError for a group that is not a
    multiple of 32.
    """

    def __init__(
        self, out_features: int, in_features: int, kind: GroupKind, dtype: torch.dtype, device: torch.device
    ) -> None:
        if kind.group <= 0 or kind.group % GROUP or kind.bits not in (4, 8):
            raise ValueError(f"the kernels have 8 and 4 bits in groups of a multiple of {GROUP}, not {kind}")
        self.kind = kind
        self.k = in_features
        """Number of inputs, without padding."""
        self.dtype = dtype
        """Dtype of the model, to which decoded weights are rounded."""
        units = -(-in_features // GROUP)
        groups = -(-in_features // kind.group)
        self.codes = torch.zeros((out_features, units * GROUP * kind.bits // 8), dtype=torch.uint8, device=device)
        """uint8 [out, bytes of a row]; inputs are padded to whole units."""
        self.scales = torch.zeros((out_features, groups), dtype=_table(kind, dtype), device=device)
        """Scale of each group, [out, groups]: float16, multiplied by 256; the exponents (uint8) of MXFP4; or float32,
        for 8-bit floats and in a model of float32. A group with a code that is not a number has the scale NaN."""
        self.minimums = torch.zeros_like(self.scales) if kind.minimum else None
        """Minimum of each group, like ``scales``; None if the kind has none."""
        self.rounds_weights = False
        """Whether numbers were rounded to codes, because they were floats or codes of another kind."""
        self.rounds_scales = False
        """Whether a scale or minimum was rounded to float16."""

    @property
    def shape(self) -> tuple[int, int]:
        """(number of outputs, number of inputs)."""
        return len(self.codes), self.k

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + (0 if self.minimums is None else self.minimums.nbytes)

    def __len__(self) -> int:
        return len(self.codes)

    def pack_rows(self, source: Tensor | GroupedRows, first_row: int = 0, *, mapped: bool = False) -> None:
        """Write ``source`` [rows, in], of any float dtype on any device or in codes, as the outputs from ``first_row``
        on. Rows that are not codes of a kind that fits are rounded.

        ``mapped`` has the meaning of :meth:`~chairlift.kernels.cpu.packing.PackedMatrix.pack_rows`. Raises ValueError
        if the rows do not fit, and ConfigError if float16 cannot hold a scale.
        """
        if len(source.shape) != 2 or source.shape[1] != self.k or not 0 <= first_row <= len(self) - len(source):
            raise ValueError(f"rows {list(source.shape)} from {first_row} on do not fit into {list(self.shape)}")
        if isinstance(source, GroupedRows) and source.kind | self.kind != self.kind:
            source = source.dequantize()
        if isinstance(source, GroupedRows):
            self._store(first_row, source.to(self.kind))
            return
        self.rounds_weights = True
        by_slices(
            source,
            lambda start, rows: self._store(first_row + start, rounded_rows(rows.cpu(), self.kind)),
            mapped=mapped,
        )

    def rows(self, ids: Tensor | None = None) -> GroupedRows:
        """The stored codes on the CPU: all rows, or the rows with the indices ``ids``, int64 [n]."""

        def chosen(table: Tensor) -> Tensor:
            return (table if ids is None else table[ids]).cpu()

        packed, scales = chosen(self.codes), chosen(self.scales)
        minimums = None if self.minimums is None else chosen(self.minimums)
        codes = packed
        if self.kind.bits == 4:
            units = packed.view(len(packed), -1, 1, GROUP // 2)
            codes = torch.cat((units & 15, units >> 4), dim=2).flatten(1)
        wide = _wide(scales)
        low = None if minimums is None else _wide(minimums)
        return GroupedRows(self.kind, codes[:, : self.k].contiguous(), wide, low)

    def unpack(self, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
        """The weight [out, in], or its rows ``ids`` [n, in], as floats of ``dtype``: each number rounded once."""
        return self.rows(ids).dequantize().to(self.codes.device, dtype)

    def _store(self, first: int, rows: GroupedRows) -> None:
        place = slice(first, first + len(rows))
        self.codes[place] = _packed(rows.codes, self.kind.bits).to(self.codes.device)
        for table, values in ((self.scales, rows.scales), (self.minimums, rows.minimums)):
            if table is None or values is None:
                continue
            stored = _stored(values, table.dtype)
            if not torch.equal(_wide(stored), values):
                self.rounds_scales = True
            if self.kind.e4m3:
                stored = stored.masked_fill(_without_numbers(rows), float("nan"))
            table[place] = stored.to(table.device)


def _wide(table: Tensor) -> Tensor:
    """Stored scales or minimums as float32."""
    if table.dtype == torch.float32:
        return table
    return (table.int() << _EXPONENT).view(torch.float32) if table.dtype == torch.uint8 else table.float() / SCALE_UNIT


def _without_numbers(rows: GroupedRows) -> Tensor:
    """Groups of 8-bit floats that have a code which is not a number: bool [R, groups]."""
    missing = rows.codes & 127 == 127
    padded = torch.nn.functional.pad(missing, (0, -missing.shape[1] % rows.kind.group))
    return padded.view(len(padded), -1, rows.kind.group).any(-1)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Codes [R, K], one per byte, in the memory order of :class:`CodedWeight`: uint8 [R, bytes of a row]."""
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % GROUP))
    if bits == 8:
        return padded
    units = padded.view(len(padded), -1, 2, GROUP // 2)
    return (units[:, :, 0] | units[:, :, 1] << 4).flatten(1)


def _stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales or minimums as a :class:`CodedWeight` stores them in a table of ``dtype``."""
    if dtype == torch.float32:
        return values.float()
    if dtype == torch.uint8:
        return ((values.contiguous().view(torch.int32) >> _EXPONENT) & 255).to(torch.uint8)
    stored = (values.float() * SCALE_UNIT).half()
    if not bool(stored.isfinite().all()):
        raise ConfigError(
            f"a group of weights has a scale or minimum of {float(values.abs().max()):g}, and codes hold at most 255; "
            "use the weights as floats: quantization='none'"
        )
    return stored


def coded_linear(x: Tensor, weight: CodedWeight, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias``, written as its definition: weights are rounded to x's dtype, activations are not. The
    Triton kernels are the fast version."""
    return torch.nn.functional.linear(x, weight.unpack(x.dtype), bias)
