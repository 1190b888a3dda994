"""Quantises weights to integers in groups, with scales and zero points that give a small error."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from chairlift.kernels.grouped import GroupedRows, GroupKind
from chairlift.kernels.rounding import LEAST, FittedGroups, fit_groups

__all__ = ["Squares", "fitted_scales", "grouped_rows", "nearest_codes", "round_rows"]


@dataclasses.dataclass(slots=True)
class Squares:
    """Sums of squares that tell how much rounding changes weights: of the weights themselves (``weights``) and of two
    rounding errors. All are float64."""

    weights: float = 0.0
    error: float = 0.0
    """Sum of squared differences between the weights and their rounded values."""
    error_of_largest: float = 0.0
    """Sum of squared differences if the largest number of each group determined the group's scale."""

    def add(self, other: Squares) -> None:
        """Add the sums of ``other``."""
        self.weights += other.weights
        self.error += other.error
        self.error_of_largest += other.error_of_largest

    @property
    def share(self) -> float:
        """:attr:`error` divided by the sum of the squared weights."""
        return self.error / self.weights if self.weights else 0.0

    @property
    def share_of_largest(self) -> float:
        """:attr:`error_of_largest` divided by the sum of the squared weights."""
        return self.error_of_largest / self.weights if self.weights else 0.0


def nearest_codes(values: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Integers from 0 to ``2 ** bits - 1`` nearest to ``values / scales`` plus integer ``zeros``, as float32."""
    return (values * (1 / scales)).round_().add_(zeros).clamp_(0, (1 << bits) - 1)


def fitted_scales(
    groups: Tensor, kind: GroupKind, dtype: torch.dtype, importance: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(scales, zero points) of ``groups`` [N, group], float32: both float32 [N]. ``importance`` [group] weighs the
    squared errors of the columns; see :func:`~chairlift.kernels.rounding.fit_groups`."""
    weights = None if importance is None else importance.view(1, -1)
    fitted = fit_groups(groups, kind.bits, dtype, zero_points=kind.minimum, importance=weights)
    return fitted.scales, fitted.zeros.float()


def round_rows(
    rows: Tensor, kind: GroupKind, dtype: torch.dtype, importance: Tensor | None = None
) -> tuple[GroupedRows, Squares]:
    """Round ``rows`` [R, K] of any float dtype to ``kind``, whose group size must divide K. Scales are rounded to
    ``dtype``.

    Each number becomes the nearest code of its group. Minimums of ``kind`` are those of zero points: a multiple of the
    group's scale. ``importance`` [K], float32, weighs the squared errors of the columns when scales are chosen.
    """
    groups = rows.float().reshape(-1, kind.group)
    weights = None if importance is None else importance.view(-1, kind.group)
    fitted = fit_groups(groups, kind.bits, dtype, zero_points=kind.minimum, importance=weights)
    found = grouped_rows(fitted, kind, rows.shape[1])
    lost = found.dequantize().sub_(rows.float())
    sums = (rows.float().square(), lost.square_(), _lost_plainly(groups, kind, dtype))
    return found, Squares(*(float(each.sum(dtype=torch.float64)) for each in sums))


def grouped_rows(fitted: FittedGroups, kind: GroupKind, columns: int) -> GroupedRows:
    """The rows [R, columns] whose groups, one row after another, are ``fitted``."""
    scales, zeros = (each.float().view(-1, columns // kind.group) for each in (fitted.scales, fitted.zeros))
    return GroupedRows(kind, fitted.codes.view(-1, columns), scales, -zeros * scales if kind.minimum else None)


def _lost_plainly(groups: Tensor, kind: GroupKind, dtype: torch.dtype) -> Tensor:
    """Squared errors if the largest number of each group became the largest code."""
    top = (1 << (kind.bits - 1)) - 1
    scales = (groups.abs().amax(-1, keepdim=True) / top).clamp_(min=LEAST).to(dtype).float()
    return (groups * (1 / scales)).round_().clamp_(-top - 1, top).mul_(scales).sub_(groups).square_()
