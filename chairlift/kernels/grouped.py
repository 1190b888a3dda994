"""Rows of a weight as small integers in groups. Quantised checkpoints store such rows, and the kernels multiply them.

Every checkpoint format of 8 or 4 bits fits this form. A group is a number of consecutive inputs of a row; its codes
share a scale, and either a minimum or a fixed zero point. The value of a weight is ``scale * (code - zero)`` or ``scale
* code + minimum``. In MXFP4 codes are 4-bit floats: ``scale * E2M1_VALUES[code]``. In fp8 they are 8-bit floats (e4m3).
"""

from __future__ import annotations

import dataclasses
from typing import Final, NamedTuple

import torch
from torch import Tensor

__all__ = ["E2M1_VALUES", "E4M3_LARGEST", "GROUP", "GroupKind", "GroupedRows", "dequantized"]

GROUP: Final = 32
"""Number of inputs in the smallest group of a weight's row. Activations are always rounded in groups of this size."""

E4M3_LARGEST: Final = 448.0
"""Largest 8-bit float e4m3 (Micikevicius et al., 2022)."""
_FLOATS: Final = 32
"""Number of bits of a kind that holds all numbers, because it has no codes."""
E2M1_VALUES: Final = tuple(sign * value for sign in (1, -1) for value in (0, 1, 2, 3, 4, 6, 8, 12))
"""Twice the value of each 4-bit float e2m1 (OCP Microscaling Formats, 2023). Doubling makes the values integers."""


class GroupKind(NamedTuple):
    """Number format of a quantised weight: bits per code, size of the groups, and what a code means."""

    bits: int
    """Bits per code: 8 or 4."""
    group: int
    """Number of inputs that share a scale: a multiple of 32. The last group of a row may be shorter."""
    minimum: bool = False
    """Whether each group has a minimum. Otherwise the zero point is half the range of codes."""
    e2m1: bool = False
    """Whether 4-bit codes are floats with the values :data:`E2M1_VALUES`. Such a kind has no minimum."""
    e4m3: bool = False
    """Whether 8-bit codes are the bits of floats e4m3. Such a kind has no minimum, and scales of any float32 value."""

    @property
    def zero(self) -> int:
        """Number that is subtracted from a code to get an integer value; 0 for kinds with a minimum. For float codes it
        is the largest of :data:`E2M1_VALUES`, so that value + zero is never negative."""
        if self.e2m1:
            return E2M1_VALUES[7]
        if self.minimum:
            return 0
        return 1 << (self.bits - 1)

    @property
    def span(self) -> int:
        """Largest possible difference between two numbers in a group of a weight, divided by the group's scale."""
        return 2 * E2M1_VALUES[7] if self.e2m1 else (1 << self.bits) - 1

    @property
    def name(self) -> str:
        """Name of the kind in messages, such as ``int4``, ``mxfp4`` or ``float8``."""
        if self.e4m3:
            return "float8"
        return "mxfp4" if self.e2m1 else f"int{self.bits}"

    def __str__(self) -> str:
        if self.e2m1 or self.e4m3:
            return f"{self.name} in groups of {self.group}"
        return f"int{self.bits} in groups of {self.group}" + (" with minimums" if self.minimum else "")

    def __or__(self, other: object) -> GroupKind:
        """The smallest kind that represents all values of both kinds exactly: 32 bits if no codes do."""
        if not isinstance(other, GroupKind):
            return NotImplemented
        small, large = sorted((self.group, other.group))
        group = small if large % small == 0 else GROUP
        if self.e4m3 or other.e4m3 or _FLOATS in (self.bits, other.bits):
            both = self.e4m3 and other.e4m3
            return GroupKind(8, group, e4m3=True) if both else GroupKind(_FLOATS, group)
        if self.e2m1 and other.e2m1:
            return GroupKind(4, group, e2m1=True)
        bits = 8 if self.e2m1 or other.e2m1 else max(self.bits, other.bits)
        return GroupKind(bits, group, self.minimum or other.minimum)


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedRows:
    """Rows [R, K] of a weight as codes in groups."""

    kind: GroupKind
    codes: Tensor
    """uint8 [R, K], one code per byte, for 4 bits too."""
    scales: Tensor
    """Scale of each group, float32 [R, ceil(K / group)]."""
    minimums: Tensor | None = None
    """Minimum of each group, shaped like ``scales``; None if the kind has no minimums."""

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes

    def numel(self) -> int:
        return self.codes.numel()

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice | Tensor) -> GroupedRows:
        """Select rows of the weight by a slice, or by row indices, int64 [n]."""
        minimums = None if self.minimums is None else self.minimums[rows]
        return GroupedRows(self.kind, self.codes[rows], self.scales[rows], minimums)

    def dequantize(self) -> Tensor:
        """The weight's numbers as float32 [R, K]."""
        scales = self._spread(self.scales)
        if self.kind.e4m3:
            return scales * self.codes.view(torch.float8_e4m3fn).float()
        if self.kind.e2m1:
            return scales * torch.tensor(E2M1_VALUES, dtype=torch.float32)[self.codes.int()]
        if self.minimums is None:
            return scales * (self.codes.float() - self.kind.zero)
        return scales * self.codes.float() + self._spread(self.minimums)

    def to(self, kind: GroupKind) -> GroupedRows:
        """Rows with the same values in a wider kind; see ``GroupKind.__or__``. Raises ValueError for any other kind."""
        if kind == self.kind:
            return self
        if kind | self.kind != kind:
            raise ValueError(f"{self.kind} does not fit into {kind}")
        if self.kind.e2m1 and not kind.e2m1:
            whole = GroupKind(8, self.kind.group)
            codes = torch.tensor([whole.zero + value for value in E2M1_VALUES], dtype=torch.uint8)[self.codes.int()]
            return GroupedRows(whole, codes, self.scales).to(kind)
        scales = self._regrouped(self.scales, kind)
        minimums = None if self.minimums is None else self._regrouped(self.minimums, kind)
        if kind.minimum and minimums is None:
            minimums = scales * -float(self.kind.zero)
        shift = 0 if kind.minimum else kind.zero - self.kind.zero
        return GroupedRows(kind, self.codes + shift if shift else self.codes, scales, minimums)

    @classmethod
    def quantize(cls, rows: Tensor, kind: GroupKind) -> GroupedRows:
        """Round ``rows`` [R, K], of any float dtype, to the nearest codes of ``kind``. Scales are rounded to float16.

        Scales of 4-bit floats are powers of two, as the OCP specification of MXFP4 requires. Those of 8-bit floats are
        float32 numbers that make the largest number of a group the largest of the format.
        """
        count, k = rows.shape
        whole = -(-k // kind.group) * kind.group
        wide = torch.nn.functional.pad(rows.float(), (0, whole - k)) if whole != k else rows.float()
        groups = wide.view(count, whole // kind.group, kind.group)
        top = (1 << kind.bits) - 1
        if kind.e4m3:
            scales = groups.abs().amax(-1) / E4M3_LARGEST
            inverse = torch.where(scales == 0, 0.0, 1 / scales)[..., None]
            codes = (groups * inverse).clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
            return cls(kind, codes.view(count, whole)[:, :k], scales)
        if kind.e2m1:
            codes, scales = _nearest_e2m1(groups)
            return cls(kind, codes.view(count, whole)[:, :k], scales)
        if kind.minimum:
            low, high = torch.aminmax(groups, dim=-1)
            minimums = low.clamp(max=0).half().float()
            scales = ((high.clamp(min=0) - minimums) / top).half().float()
        else:
            minimums = None
            scales = (groups.abs().amax(-1) / (top // 2)).half().float()
        inverse = torch.where(scales > 0, 1 / scales, 0.0)[..., None]
        shifted = groups if minimums is None else groups - minimums[..., None]
        codes = (shifted * inverse).round_().add_(kind.zero).clamp_(kind.minimum ^ 1, top)
        return cls(kind, codes.view(count, whole)[:, :k].to(torch.uint8), scales, minimums)

    def _spread(self, values: Tensor) -> Tensor:
        return values.repeat_interleave(self.kind.group, dim=1)[:, : self.codes.shape[1]]

    def _regrouped(self, values: Tensor, kind: GroupKind) -> Tensor:
        times = self.kind.group // kind.group
        return values.repeat_interleave(times, dim=1)[:, : -(-self.codes.shape[1] // kind.group)]


def _nearest_e2m1(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [R, G, K] and scales [R, G] of float32 ``groups``. The scale is a power of two that brings the
    largest number of a group to an exponent of 4; numbers above 6 scales become 6. A number halfway between two values
    is rounded towards zero."""
    highest = groups.abs().amax(-1)
    # exponent of half the scale: the highest number is below 2 ** exponent
    exponents = torch.frexp(highest).exponent - 4
    scales = torch.where(highest > 0, torch.ldexp(torch.ones_like(highest), exponents), 0.0)
    ratios = groups.abs() * torch.where(scales > 0, 1 / scales, 0.0)[..., None]
    values = torch.tensor(E2M1_VALUES[:8], dtype=torch.float32)
    codes = torch.bucketize(ratios, (values[1:] + values[:-1]) / 2)
    return (codes + 8 * (groups < 0)).to(torch.uint8), scales


def dequantized(rows: Tensor | GroupedRows) -> Tensor:
    """The numbers of a weight's rows as floats; float rows are returned unchanged."""
    return rows.dequantize() if isinstance(rows, GroupedRows) else rows
