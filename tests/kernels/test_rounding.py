"""Scales found by least squares. Changes that must make these tests fail: a search that does not compare errors after
the scale is rounded; only positive scales; a candidate that replaces a better one; importance that is ignored; sums of
the C++ code in another order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from chairlift.kernels import rounding
from chairlift.kernels.grouped import GroupedRows, GroupKind
from chairlift.kernels.rounding import FittedGroups, fit_groups, fit_plainly, rounded_rows
from tests.native import needs_kernels

DTYPES = (torch.float16, torch.bfloat16)
SHAPES = [(4, False), (4, True), (8, False)]
"""Bits, and whether groups have zero points."""


def hard_groups(columns: int = 32) -> Tensor:
    """Random groups and groups that are hard to round: zeros, one outlier, constants, tiny numbers, one sign."""
    generator = torch.Generator().manual_seed(3)
    found = torch.randn(400, columns, generator=generator) * 0.05
    found[10:40] = found[10:40] ** 3 * 300
    found[0] = 0
    found[1] = 0
    found[1, 7] = -4
    found[2] = 0.3
    found[3] = -0.3
    found[4] *= 1e-4
    found[5] *= 1e-7
    found[6] = found[6].abs()
    found[7] = -found[7].abs() - 1
    found[8, 3] = 900
    found[9] = torch.arange(columns) % 16 - 8.0
    return found


def values(fitted: FittedGroups) -> Tensor:
    return fitted.scales[:, None] * (fitted.codes.float() - fitted.zeros[:, None].float())


def weighted(groups: Tensor, found: Tensor, weights: Tensor) -> Tensor:
    return (weights.double() * (found - groups).double().square()).sum(-1)


def plain_values(groups: Tensor, bits: int, dtype: torch.dtype, zero_points: bool) -> Tensor:
    """Numbers rounded with the scale that maps the range of a group to the range of the codes."""
    top = (1 << bits) - 1
    if zero_points:
        low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
        scales = ((high - low) / top).to(dtype).float().clamp(min=2.0**-24)
        zeros = (-low / scales).round().clamp(0, top)
    else:
        scales = (groups.abs().amax(-1, keepdim=True) / (top // 2)).to(dtype).float().clamp(min=2.0**-24)
        zeros = torch.tensor(float(top // 2 + 1))
    return scales * ((groups / scales).round().add(zeros).clamp(0, top) - zeros)


@pytest.mark.parametrize("with_importance", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "zero_points"), SHAPES)
def test_no_group_loses_more_than_with_the_plain_scale(
    bits: int, zero_points: bool, dtype: torch.dtype, with_importance: bool
) -> None:
    groups = hard_groups()
    importance = torch.rand(5, 32, generator=torch.Generator().manual_seed(4)) ** 4 if with_importance else None
    weights = torch.ones(400, 32) if importance is None else importance.repeat(80, 1)
    fitted = fit_groups(groups, bits, dtype, zero_points=zero_points, importance=importance)
    found = weighted(groups, values(fitted), weights)
    plain = weighted(groups, plain_values(groups, bits, dtype, zero_points), weights)
    assert bool((found <= plain * (1 + 1e-4) + 1e-14).all())
    assert found[40:].sum() < (0.97 if bits == 8 else 0.92) * plain[40:].sum()
    assert int(fitted.codes.max()) < 1 << bits
    assert torch.equal(fitted.scales, fitted.scales.to(dtype).float())


def test_the_largest_number_of_a_symmetric_group_may_use_the_largest_code() -> None:
    groups = torch.linspace(-0.5, 0.5, 32)[None].clone()
    for sign in (1, -1):
        groups[0, 5] = sign * 0.8
        fitted = fit_groups(groups, 4)
        assert int(fitted.codes[0, 5]) == 0
        assert (fitted.scales[0] > 0) == (sign < 0)


def test_numbers_on_the_grid_of_codes_stay_what_they_are() -> None:
    groups = hard_groups()[9:10]
    assert torch.equal(values(fit_groups(groups * 0.125, 4)), groups * 0.125)
    assert torch.equal(values(fit_groups(groups + 5, 4, zero_points=True)), groups + 5)
    assert not values(fit_groups(torch.zeros(3, 32), 4)).any()


def test_columns_of_importance_lose_less() -> None:
    groups = hard_groups()[40:]
    importance = torch.ones(1, 32)
    importance[0, :8] = 100
    found, plain = (values(fit_groups(groups, 4, importance=each)) - groups for each in (importance, None))
    assert found[:, :8].square().sum() < 0.85 * plain[:, :8].square().sum()


@needs_kernels
@pytest.mark.parametrize("columns", [32, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "zero_points"), SHAPES)
def test_the_kernel_gives_the_bits_of_the_plain_search(
    bits: int, zero_points: bool, dtype: torch.dtype, columns: int
) -> None:
    """The group count is not a multiple of the kernel's 16 lanes."""
    assert rounding._native() is not None, "the kernels are old: python setup.py build_ext --inplace"
    groups = hard_groups(columns)[:397]
    importance = torch.rand(3, columns, generator=torch.Generator().manual_seed(5))
    for rows in (None, importance):
        weights = None if rows is None else rows[torch.arange(397) % 3]
        found = fit_groups(groups, bits, dtype, zero_points=zero_points, importance=rows)
        wanted = fit_plainly(groups, bits, dtype, zero_points=zero_points, weights=weights)
        for one, two in zip(found, wanted, strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("bits", "zero_points"), SHAPES)
def test_a_number_that_is_not_finite_marks_its_group(bits: int, zero_points: bool, broken: float) -> None:
    groups = hard_groups()
    groups[20, 4] = broken
    fitted = fit_groups(groups, bits, zero_points=zero_points)
    assert fitted.scales.isfinite().sum() == 399
    assert bool(fitted.scales[20].isnan())
    plain = fit_plainly(groups, bits, torch.float16, zero_points=zero_points)
    assert torch.equal(fitted.scales.isnan(), plain.scales.isnan())


def test_rows_that_groups_do_not_divide_are_padded() -> None:
    rows = torch.randn(50, 70, generator=torch.Generator().manual_seed(6), dtype=torch.float64) * 0.01
    found = rounded_rows(rows, GroupKind(4, 32))
    assert found.scales.shape == (50, 3)
    nearest = GroupedRows.quantize(rows, GroupKind(4, 32))
    errors = [(each.dequantize() - rows).square().sum() for each in (found, nearest)]
    assert errors[0] < 0.85 * errors[1]
    assert rounded_rows(rows[:0], GroupKind(4, 32)).scales.shape == (0, 3)


@pytest.mark.parametrize("kind", [GroupKind(8, 32), GroupKind(4, 32, minimum=True), GroupKind(4, 32, e2m1=True)])
def test_other_kinds_are_rounded_to_the_nearest(kind: GroupKind) -> None:
    rows = hard_groups()
    assert torch.equal(rounded_rows(rows, kind).dequantize(), GroupedRows.quantize(rows, kind).dequantize())
