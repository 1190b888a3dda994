"""Weights of small integers in groups, in the memory order that the C++ matmuls read.

A panel has 32 outputs and stores its groups one after another. Each group stores its scales and minimums, then its
codes; see ``cl_pack_codes``. Before such a matmul, activations are rounded to 8 bits in groups of 32, so that the
kernel multiplies integers.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from chairlift.errors import ConfigError
from chairlift.kernels.cpu.library import Memory, require
from chairlift.kernels.cpu.packing import PANEL, PackedMatrix, by_slices, padded_outputs
from chairlift.kernels.grouped import GROUP, GroupedRows, GroupKind
from chairlift.kernels.rounding import rounded_rows

__all__ = ["PackedCodes", "code_format", "packed_code_bytes"]

_FORMATS: Final = {(8, False): 1, (4, False): 2, (8, True): 3, (4, True): 4}
"""(bits per code, whether groups have minimums) -> value of ``cl_format``."""
_E2M1: Final = 5
"""Value of ``cl_format`` for weights of 4-bit floats: ``CL_E2M1``."""
_UNIT: Final = 256.0
"""Factor by which scales are multiplied when they are stored: ``CL_SCALE_UNIT`` of the C header."""


def code_format(kind: GroupKind) -> int:
    """Value of ``cl_format`` for ``kind``. Raises ValueError for a kind without kernels."""
    if kind.e4m3 or (kind.bits, kind.minimum) not in _FORMATS or kind.group <= 0 or kind.group % GROUP:
        raise ValueError(f"the CPU kernels have 8 and 4 bits in groups of a multiple of {GROUP}, not {kind}")
    return _E2M1 if kind.e2m1 else _FORMATS[kind.bits, kind.minimum]


def packed_code_bytes(
    out_features: int, in_features: int, kind: GroupKind, *, interleaved: bool = False, stack: int = 1
) -> int:
    """Bytes of a packed [out, in] weight, rounded up to a cache line."""
    k = -(-in_features // GROUP) * GROUP
    header = -(-k // kind.group) * PANEL * (4 if kind.minimum else 2)
    return padded_outputs(out_features, interleaved, stack) // PANEL * (header + k * PANEL * kind.bits // 8)


class PackedCodes(PackedMatrix):
    """A weight of one :class:`~chairlift.kernels.grouped.GroupKind`.

    Packing rounds float rows to the nearest codes. Scales and minimums are multiplied by 256 and stored as float16. For
    GGUF, GPTQ and AWQ files this is exact, because their scales are float16. For MXFP4 it is exact for scales of at
    least 2**-32. Smaller scales become zero; the values that this sets to zero are below 2**-28.
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        kind: GroupKind,
        *,
        interleaved: bool = False,
        stack: int = 1,
        memory: Memory | None = None,
    ) -> None:
        code = code_format(kind)
        nbytes = packed_code_bytes(out_features, in_features, kind, interleaved=interleaved, stack=stack)
        super().__init__(out_features, in_features, nbytes, interleaved=interleaved, stack=stack, memory=memory)
        self.kind = kind
        self.format = code
        self.group = kind.group
        self.rounds_weights = False
        """Whether numbers were rounded to codes, because they were floats or codes of another kind."""
        self.rounds_scales = False
        """Whether a scale or minimum was rounded to float16."""

    def rows(self) -> GroupedRows:
        """A copy of the stored codes, for tests."""
        k = -(-self.k // GROUP) * GROUP
        group = self.group
        bits = self.kind.bits
        memory = self.memory.tensor(torch.uint8, (self.panels, self.memory.nbytes // self.panels))
        tables = []
        codes = []
        at = 0
        for start in range(0, k, group):
            count = min(group, k - start)
            header = PANEL * (4 if self.kind.minimum else 2)
            tables.append(memory[:, at : at + header].clone().view(torch.float16).float() / _UNIT)
            packed = memory[:, at + header : at + header + count * PANEL * bits // 8]
            packed = packed.reshape(self.panels, -1, PANEL, 4)
            if bits == 4:
                packed = torch.stack((packed & 15, packed >> 4), dim=2).reshape(self.panels, -1, PANEL, 4)
            codes.append(packed.transpose(1, 2).reshape(self.panels * PANEL, count))
            at += header + count * PANEL * bits // 8
        columns = self.columns()
        scales = torch.stack([table[:, :PANEL].reshape(-1) for table in tables], dim=1)[columns]
        minimums = torch.stack([table[:, -PANEL:].reshape(-1) for table in tables], dim=1)[columns]
        all_codes = torch.cat(codes, dim=1)[columns, : self.k]
        return GroupedRows(self.kind, all_codes, scales, minimums if self.kind.minimum else None)

    def unpack(self) -> Tensor:
        return self.rows().dequantize()

    def _pack(
        self, source: Tensor | GroupedRows, first_row: int, first_panel: int, panel_step: int, mapped: bool
    ) -> None:
        library = require()

        def pack(start: int, rows: GroupedRows) -> None:
            codes = rows.codes.contiguous()
            given = [rows.scales]
            if rows.minimums is not None:
                given.append(rows.minimums)
            tables = [_stored(each) for each in given]
            if not all(torch.equal(table.float() / _UNIT, each) for table, each in zip(tables, given, strict=True)):
                self.rounds_scales = True
            where = (first_row + start, len(codes), first_panel, panel_step)
            library.cl_pack_codes(
                *(self.memory.address, self.format, self.group, self.k, *where, codes.data_ptr(), self.k),
                *(tables[0].data_ptr(), tables[1].data_ptr() if len(tables) == 2 else None, tables[0].shape[1]),
            )

        if isinstance(source, GroupedRows) and source.kind | self.kind != self.kind:
            source = source.dequantize()
        if isinstance(source, GroupedRows):
            grouped = source.to(self.kind)
            by_slices(
                grouped.codes,
                lambda start, rows: pack(start, grouped[start : start + len(rows)]),
                mapped=False,
                first_row=first_row,
            )
            return
        self.rounds_weights = True
        by_slices(
            source,
            lambda start, rows: pack(start, rounded_rows(rows.cpu(), self.kind)),
            mapped=mapped,
            first_row=first_row,
        )


def _stored(values: Tensor) -> Tensor:
    stored = (values.float() * _UNIT).half().contiguous()
    if not bool(stored.isfinite().all()):
        raise ConfigError(
            f"a group of weights has a scale or minimum of {float(values.abs().max()):g}, and codes hold at most 255; "
            "use the weights as floats: quantization='none'"
        )
    return stored
