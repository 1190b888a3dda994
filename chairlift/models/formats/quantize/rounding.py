"""Quantises weights to integers in groups, with the scale per group that gives the smallest error."""

from __future__ import annotations

import dataclasses
from typing import Final

import torch
from torch import Tensor

from chairlift.kernels.grouped import GroupedRows, GroupKind

__all__ = ["FORMATS", "Squares", "best_scales", "nearest_codes", "round_rows"]

FORMATS: Final[dict[str, GroupKind]] = {
    "int4-g128": GroupKind(4, 128),
    "int4-g32": GroupKind(4, 32),
    "int8": GroupKind(8, 32),
}
"""Name of a format in the command line -> kind of integer groups."""
_RATIOS: Final = tuple(1.0 - 0.3 * step / 19 for step in range(20))
"""Factors to try for the scale of a group. The factor 1 maps the largest number of the group to the largest code."""
_LEAST: Final = 2.0**-24
"""Smallest scale of a group: the smallest float16 number above 0. It is used for groups of zeros."""


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


def nearest_codes(values: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Signed integers of ``bits`` bits nearest to ``values / scales``, as float32."""
    half = 1 << (bits - 1)
    return (values / scales).round_().clamp_(-half, half - 1)


def best_scales(groups: Tensor, bits: int, dtype: torch.dtype) -> tuple[Tensor, Squares]:
    """Scales [..., 1] of ``groups`` [..., group], both float32. Each scale is a value of ``dtype``.

    Each group gets the best of twenty scales by squared error: from the scale that the group's largest number needs,
    down to 0.7 of it. That scale is tried first, so the error is never larger than with it.
    """
    full = groups.abs().amax(-1, keepdim=True) / ((1 << (bits - 1)) - 1)
    # replaced in the first round
    best = full
    least = full
    first = full
    for ratio in _RATIOS:
        scales = (full * ratio).clamp_(min=_LEAST).to(dtype).float()
        error = nearest_codes(groups, scales, bits).mul_(scales).sub_(groups).square_().sum(-1, keepdim=True)
        if ratio == _RATIOS[0]:
            best = scales
            least = error
            first = error
        else:
            better = error < least
            best = torch.where(better, scales, best)
            least = torch.where(better, error, least)
    sums = (float(each.sum(dtype=torch.float64)) for each in (groups.square(), least, first))
    return best, Squares(*sums)


def round_rows(rows: Tensor, kind: GroupKind, dtype: torch.dtype) -> tuple[GroupedRows, Squares]:
    """Round ``rows`` [R, K] of any float dtype to ``kind``, whose group size must divide K. Scales are rounded to
    ``dtype``.

    Each number becomes the nearest code of its group. See :func:`best_scales`.
    """
    groups = rows.float().reshape(len(rows), -1, kind.group)
    scales, squares = best_scales(groups, kind.bits, dtype)
    codes = nearest_codes(groups, scales, kind.bits).add_(kind.zero).to(torch.uint8)
    return GroupedRows(kind, codes.view(rows.shape), scales.squeeze(-1)), squares
