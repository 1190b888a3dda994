"""Rounds groups of numbers to integer codes. The scale of each group is found by least squares.

For each group several scales are tried, and each is replaced by the scale that is best for the codes it gives. The
scale may be negative: the number with the largest magnitude then gets the code with the largest magnitude, whatever its
sign, so that all codes are used. Searches of this kind are in llama.cpp's K-quants and in AWQ's clipping (Lin et al.,
2023).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int32, c_int64, c_void_p
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from chairlift.kernels.cpu.library import require, why_unavailable
from chairlift.kernels.grouped import GroupedRows, GroupKind

__all__ = ["LEAST", "FittedGroups", "fit_groups", "fit_plainly", "rounded_rows"]

LEAST: Final = 2.0**-24
"""Smallest magnitude of a scale: the smallest float16 number above 0."""
_SIGNIFICANT: Final = {torch.float16: 11, torch.bfloat16: 8}
"""Dtype of scales -> number of significant bits."""
_STEPS: Final = tuple(range(-9, 10))
"""Tenths of a code by which the range of the codes is changed in the search for a symmetric group's scale."""
_RATIOS: Final = tuple(range(6))
"""Multiples of 6 % by which scales are reduced in the search for a group with a zero point."""
_REFINEMENTS: Final = 2
_SLICE: Final = 1 << 11
"""Number of groups that are rounded at a time."""


class FittedGroups(NamedTuple):
    """Groups [N, G] of numbers as codes. The value of a code is ``scale * (code - zero)``."""

    codes: Tensor
    """uint8 [N, G]."""
    scales: Tensor
    """float32 [N]. Never 0; NaN for a group with a number that is not finite."""
    zeros: Tensor
    """uint8 [N]."""


def fit_groups(
    groups: Tensor,
    bits: int,
    dtype: torch.dtype = torch.float16,
    *,
    zero_points: bool = False,
    importance: Tensor | None = None,
) -> FittedGroups:
    """Round ``groups`` [N, G], float32, to codes of ``bits`` bits (4 or 8). G is at most 512.

    Scales are numbers of ``dtype``: float16 or bfloat16. The zero point is ``2 ** (bits - 1)``, or with ``zero_points``
    each group's own, and then the scale is positive. ``importance`` [M, G], float32 and not negative, weighs the
    squared errors of the columns; group ``i`` uses row ``i % M``. The weighted error of a group is at most that of the
    scale which maps its range to the range of the codes.
    """
    groups = groups.contiguous()
    importance = None if importance is None else importance.contiguous()
    count = len(groups)
    found = FittedGroups(
        torch.empty(groups.shape, dtype=torch.uint8), torch.empty(count), torch.empty(count, dtype=torch.uint8)
    )
    native = _native()

    def fit(first: int) -> None:
        part = slice(first, min(first + _SLICE, count))
        if native is not None:
            native(
                *(bits, zero_points, _SIGNIFICANT[dtype], first, part.stop - first, groups.shape[1], groups.data_ptr()),
                None if importance is None else importance.data_ptr(),
                0 if importance is None else len(importance),
                *(each.data_ptr() for each in found),
            )
            return
        weights = None if importance is None else importance[torch.arange(first, part.stop) % len(importance)]
        made = fit_plainly(groups[part], bits, dtype, zero_points=zero_points, weights=weights)
        for whole, some in zip(found, made, strict=True):
            whole[part] = some

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(fit, range(0, count, _SLICE)))
    return found


def _native() -> Any | None:
    """The search in C++, which gives the same bits as :func:`fit_plainly`. None without compiled kernels, or if they
    are from before this function. The search in torch is then used, which is 40 times slower."""
    if why_unavailable():
        return None
    function = getattr(require(), "cl_fit_groups", None)
    if function is not None:
        function.restype = None
        function.argtypes = [*[c_int32] * 3, *[c_int64] * 3, c_void_p, c_void_p, c_int64, *[c_void_p] * 3]
    return function


def rounded_rows(rows: Tensor, kind: GroupKind) -> GroupedRows:
    """Round ``rows`` [R, K], of any float dtype, to ``kind``, with scales of float16. Scales of symmetric 4-bit
    integers are searched. The other kinds lose so little that rows are rounded as by
    :meth:`~chairlift.kernels.grouped.GroupedRows.quantize`."""
    if kind.bits != 4 or kind.minimum or kind.e2m1:
        return GroupedRows.quantize(rows, kind)
    count, k = rows.shape
    whole = -(-k // kind.group) * kind.group
    wide = torch.nn.functional.pad(rows.float(), (0, whole - k)) if whole != k else rows.float()
    fitted = fit_groups(wide.reshape(-1, kind.group), kind.bits)
    scales = fitted.scales.view(count, whole // kind.group)
    return GroupedRows(kind, fitted.codes.view(count, whole)[:, :k], scales)


def fit_plainly(
    groups: Tensor, bits: int, dtype: torch.dtype, *, zero_points: bool = False, weights: Tensor | None = None
) -> FittedGroups:
    """:func:`fit_groups` in torch, with ``weights`` [N, G] for every group. Sums are float32 in the order of the
    columns."""
    search = _Search(groups, weights, bits, dtype)
    if zero_points:
        search.fit_with_zeros()
    else:
        search.fit_symmetric()
    codes = search.nearest(search.scale, search.zero) + search.zero
    broken = (groups * 0).sum(-1)
    return FittedGroups(codes.t().to(torch.uint8).contiguous(), search.scale + broken, search.zero.to(torch.uint8))


class _Search:
    """The best scale and zero point so far of each group, with its weighted squared error: all float32 [N]."""

    def __init__(self, groups: Tensor, weights: Tensor | None, bits: int, dtype: torch.dtype) -> None:
        self.x = groups.t().contiguous()
        self.w = torch.ones_like(self.x) if weights is None else weights.t().contiguous()
        self.half = float(1 << (bits - 1))
        self.top = 2 * self.half - 1
        self.significant = _SIGNIFICANT[dtype]
        self.error = torch.full((len(groups),), torch.inf)
        self.zero = torch.full_like(self.error, self.half)
        self.scale = torch.full_like(self.error, LEAST)
        self._search_from_best()

    def fit_symmetric(self) -> None:
        """Search the scales of groups whose zero point is half the range of codes."""
        place = self.x.abs().argmax(0, keepdim=True)
        largest = self.x.gather(0, place)[0]
        zero = self.zero
        self._begin(largest.abs() / (self.half - 1), zero)
        self._consider(-largest / self.half, zero)
        self._search_from_best()
        for step in _STEPS:
            reach = torch.tensor(self.half) + torch.tensor(0.1) * step
            self._search(largest / -reach, zero)
        self._end_search()

    def fit_with_zeros(self) -> None:
        """Search the scales and zero points of groups whose numbers are not symmetric."""
        low, high = self.x.amin(0).clamp(max=0), self.x.amax(0).clamp(min=0)
        scale = self._rounded((high - low) / self.top)
        self._begin(scale, (-low * (1 / scale)).clamp(0, self.top).round())
        self._search_from_best()
        for point in range(int(self.top) + 1):
            above = high / (self.top - point) if point < self.top else torch.zeros_like(high)
            below = -low / point if point else torch.zeros_like(low)
            whole = torch.maximum(above, below)
            for step in _RATIOS:
                ratio = 1 - torch.tensor(0.06) * step
                self._search(whole * ratio, torch.full_like(low, point))
        self._end_search()

    def nearest(self, scale: Tensor, zero: Tensor) -> Tensor:
        """Nearest codes minus the zero point, [G, N]."""
        return (self.x * (1 / scale)).clamp(-zero, self.top - zero).round_()

    def _begin(self, scale: Tensor, zero: Tensor) -> None:
        self.scale = self._rounded(scale)
        self.zero = zero
        self._consider(scale, zero)

    def _consider(self, scale: Tensor, zero: Tensor) -> None:
        """Round ``scale`` and keep it where it has a smaller error than the best one so far."""
        scale = self._rounded(scale)
        lost = self.x - self.nearest(scale, zero) * scale
        error = _sum(self.w * lost.square_())
        better = error < self.error
        self.scale = torch.where(better, scale, self.scale)
        self.zero = torch.where(better, zero, self.zero)
        self.error = torch.where(better, error, self.error)

    def _search_from_best(self) -> None:
        """Begin a search. Its best candidate is a scale, a zero point and how much they lower the error."""
        self._found = (self.scale, self.zero, torch.zeros_like(self.scale))

    def _search(self, scale: Tensor, zero: Tensor) -> None:
        """Find the best scale for the codes that ``scale`` gives, and keep it where it would lower the error most."""
        codes = self.nearest(torch.where(scale.abs() < LEAST, torch.copysign(torch.tensor(LEAST), scale), scale), zero)
        weighted = self.w * codes
        products = _sum(weighted * self.x)
        squares = _sum(weighted.mul_(codes))
        least = torch.where(squares > 0, products / squares, 0.0)
        gain = least * products
        better = gain > self._found[2]
        found = (torch.where(better, one, two) for one, two in zip((least, zero, gain), self._found, strict=True))
        self._found = (next(found), next(found), next(found))

    def _end_search(self) -> None:
        self._consider(*self._found[:2])
        for _ in range(_REFINEMENTS):
            self._search_from_best()
            self._search(self.scale, self.zero)
            self._consider(*self._found[:2])

    def _rounded(self, scale: Tensor) -> Tensor:
        """Round to the significant bits of the dtype of scales. With float16, small numbers become multiples of
        2^-24. No scale becomes 0."""
        words = scale.abs().view(torch.int32)
        below = 24 - self.significant
        even = (words + ((1 << (below - 1)) - 1) + (words >> below & 1)) & -(1 << below)
        rounded = even.view(torch.float32)
        if self.significant == 11:
            size = scale.abs()
            rounded = torch.where(size < 2.0**-14, (size * 2.0**24).round() * LEAST, rounded)
        return torch.copysign(torch.maximum(rounded, torch.tensor(LEAST)), scale)


def _sum(values: Tensor) -> Tensor:
    """Sum [N] of ``values`` [G, N], added in order."""
    total = values[0].clone()
    for each in values[1:]:
        total += each
    return total
