"""Rows of a weight as small integers in groups: what quantised checkpoints hold, and what the kernels multiply with.

Every format of 8 or 4 bits that checkpoints come in is a case of one: along the inputs, each group of codes has a
scale, and a minimum or a fixed zero. A weight is ``scale * (code - zero)`` or ``scale * code + minimum``. MXFP4 has
4-bit floats for codes: ``scale * E2M1_VALUES[code]``.
"""

from __future__ import annotations

import dataclasses
from typing import Final, NamedTuple

import torch
from torch import Tensor

__all__ = ["E2M1_VALUES", "GROUP", "GroupKind", "GroupedRows", "dequantized"]

GROUP: Final = 32
"""Inputs of the smallest group; activations are always rounded in groups of so many."""

E2M1_VALUES: Final = tuple(sign * value for sign in (1, -1) for value in (0, 1, 2, 3, 4, 6, 8, 12))
"""Twice the value of each 4-bit float e2m1 (OCP Microscaling Formats, 2023), so that all are whole numbers."""


class GroupKind(NamedTuple):
    """How numbers are written down in a weight."""

    bits: int
    """8 or 4."""
    group: int
    """Inputs that share a scale: a multiple of 32. The last group of a row may be shorter."""
    minimum: bool = False
    """Whether each group has a minimum; else the code of zero is half the range."""
    e2m1: bool = False
    """Whether codes of 4 bits are floats, worth what :data:`E2M1_VALUES` says; then there is no minimum."""

    @property
    def zero(self) -> int:
        """The code of zero, where there is no minimum. With floats the least of their values, negative."""
        return E2M1_VALUES[7] if self.e2m1 else 0 if self.minimum else 1 << (self.bits - 1)

    @property
    def span(self) -> int:
        """How many scales lie between the least number of a group and the greatest."""
        return 2 * E2M1_VALUES[7] if self.e2m1 else (1 << self.bits) - 1

    @property
    def name(self) -> str:
        """For people: ``int4``, or ``mxfp4``."""
        return "mxfp4" if self.e2m1 else f"int{self.bits}"

    def __str__(self) -> str:
        if self.e2m1:
            return f"mxfp4 in groups of {self.group}"
        return f"int{self.bits} in groups of {self.group}" + (" with minimums" if self.minimum else "")

    def __or__(self, other: object) -> GroupKind:
        """The narrowest kind that holds the numbers of both as they are."""
        if not isinstance(other, GroupKind):
            return NotImplemented
        small, large = sorted((self.group, other.group))
        group = small if large % small == 0 else GROUP
        if self.e2m1 and other.e2m1:
            return GroupKind(4, group, e2m1=True)
        bits = 8 if self.e2m1 or other.e2m1 else max(self.bits, other.bits)
        return GroupKind(bits, group, self.minimum or other.minimum)


@dataclasses.dataclass(frozen=True, slots=True)
class GroupedRows:
    """Rows [R, K] of a weight."""

    kind: GroupKind
    codes: Tensor
    """uint8 [R, K], one code a byte, whatever the bits."""
    scales: Tensor
    """float32 [R, ceil(K / group)]."""
    minimums: Tensor | None = None
    """Like ``scales``, where the kind has minimums."""

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
        """A slice of the rows, or those with the given numbers, int64 [n]."""
        minimums = None if self.minimums is None else self.minimums[rows]
        return GroupedRows(self.kind, self.codes[rows], self.scales[rows], minimums)

    def dequantize(self) -> Tensor:
        """float32 [R, K]."""
        scales = self._spread(self.scales)
        if self.kind.e2m1:
            return scales * torch.tensor(E2M1_VALUES, dtype=torch.float32)[self.codes.int()]
        if self.minimums is None:
            return scales * (self.codes.float() - self.kind.zero)
        return scales * self.codes.float() + self._spread(self.minimums)

    def to(self, kind: GroupKind) -> GroupedRows:
        """The same numbers in a kind that holds them, for which see ``GroupKind.__or__``. ValueError for another."""
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
        """Round ``rows`` [R, K], of any float dtype, to the nearest of ``kind``; scales are numbers of float16.

        Scales of 4-bit floats are the powers of two that the OCP's specification of MXFP4 asks for.
        """
        count, k = rows.shape
        whole = -(-k // kind.group) * kind.group
        wide = torch.nn.functional.pad(rows.float(), (0, whole - k)) if whole != k else rows.float()
        groups = wide.view(count, whole // kind.group, kind.group)
        top = (1 << kind.bits) - 1
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
    """Codes uint8 [R, G, K] and scales [R, G] of float32 ``groups``: the largest number of each gets the exponent of 4,
    and what is above 6 becomes 6. Between two values a number goes to the one nearer to zero."""
    highest = groups.abs().amax(-1)
    exponents = torch.frexp(highest).exponent - 4  # of half the scale: the highest is below 2 ** exponent
    scales = torch.where(highest > 0, torch.ldexp(torch.ones_like(highest), exponents), 0.0)
    ratios = groups.abs() * torch.where(scales > 0, 1 / scales, 0.0)[..., None]
    values = torch.tensor(E2M1_VALUES[:8], dtype=torch.float32)
    codes = torch.bucketize(ratios, (values[1:] + values[:-1]) / 2)
    return (codes + 8 * (groups < 0)).to(torch.uint8), scales


def dequantized(rows: Tensor | GroupedRows) -> Tensor:
    """The numbers themselves."""
    return rows.dequantize() if isinstance(rows, GroupedRows) else rows
