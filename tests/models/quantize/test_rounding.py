from __future__ import annotations

import pytest
import torch

from chairlift.cli.quantize import _FORMATS
from chairlift.kernels.grouped import GroupKind
from chairlift.models.formats.quantize.recipes import RECIPES
from chairlift.models.formats.quantize.rounding import fitted_scales, round_rows

DTYPES = [torch.bfloat16, torch.float16]
KINDS = {name: RECIPES[name].layers for name in ("int4-g32", "int4-g128", "int8")}


def weights(rows: int = 24, columns: int = 256) -> torch.Tensor:
    """Some groups have numbers far from the others, some have zeros only."""
    generator = torch.Generator().manual_seed(3)
    found = torch.randn(rows, columns, generator=generator) * 0.05
    found[::3] = found[::3] ** 3 * 300
    found[5] = 0
    return found


def error_of_largest(weight: torch.Tensor, kind: GroupKind, dtype: torch.dtype) -> torch.Tensor:
    """Squared error of each group, float64, when its largest number becomes the largest code."""
    groups, top = weight.view(len(weight), -1, kind.group), (1 << (kind.bits - 1)) - 1
    scales = (groups.abs().amax(-1, keepdim=True) / top).to(dtype).float()
    codes = torch.where(scales > 0, groups / scales, 0).round().clamp(-top - 1, top)
    return (codes * scales - groups).double().square().sum(-1)


@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_group_has_more_error_than_with_the_scale_of_its_largest_number(form: str, dtype: torch.dtype) -> None:
    weight, kind = weights(), KINDS[form]
    rows, squares = round_rows(weight, kind, dtype)
    error = (rows.dequantize() - weight).view(len(weight), -1, kind.group).double().square().sum(-1)
    largest = error_of_largest(weight, kind, dtype)
    assert bool((error <= largest * (1 + 1e-5) + 1e-12).all())
    if kind.bits == 4:
        assert error.sum() < 0.9 * largest.sum()
    assert squares.error == pytest.approx(float(error.sum()), rel=1e-5)
    assert squares.error_of_largest == pytest.approx(float(largest.sum()), rel=1e-5)
    assert squares.weights == pytest.approx(float(weight.double().square().sum()), rel=1e-6)
    assert squares.share == pytest.approx(squares.error / squares.weights)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_are_numbers_of_their_dtype_and_zeros_stay_zeros(dtype: torch.dtype) -> None:
    weight = weights()
    rows, _ = round_rows(weight, KINDS["int4-g32"], dtype)
    assert torch.equal(rows.scales, rows.scales.to(dtype).float())
    assert bool((rows.scales != 0).all())
    assert not rows.dequantize()[5].any()
    assert int(rows.codes.max()) <= 15


def test_numbers_too_small_for_any_scale_become_zeros() -> None:
    tiny = torch.full((1, 32), 1e-12)
    rows, squares = round_rows(tiny, KINDS["int8"], torch.bfloat16)
    assert not rows.dequantize().any()
    assert squares.share == pytest.approx(1.0)


def test_one_far_number_is_cut_off_for_the_good_of_the_others() -> None:
    group = torch.linspace(-1, 1, 128)
    group[7] = 1.5
    kind = GroupKind(4, 128)
    scales, zeros = fitted_scales(group.view(1, -1), kind, torch.bfloat16)
    _, squares = round_rows(group.view(1, -1), kind, torch.bfloat16)
    assert abs(float(scales)) < 0.98 * 1.5 / 8
    assert float(zeros) == 8
    assert squares.error < squares.error_of_largest


def test_importance_chooses_the_columns_that_lose_less() -> None:
    weight, importance = weights(), torch.ones(256)
    importance[::32] = 1000
    kind = KINDS["int4-g32"]
    given, plain = (
        (round_rows(weight, kind, torch.bfloat16, each)[0].dequantize() - weight)[:, ::32].square().sum()
        for each in (importance, None)
    )
    assert given < 0.6 * plain


def test_zero_points_become_minimums() -> None:
    weight = weights() + 0.1
    rows, squares = round_rows(weight, GroupKind(4, 32, minimum=True), torch.bfloat16)
    _, symmetric = round_rows(weight, KINDS["int4-g32"], torch.bfloat16)
    assert squares.error < 0.7 * symmetric.error
    assert rows.minimums is not None
    steps = rows.minimums / rows.scales
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-4)


def test_the_command_has_the_same_recipes() -> None:
    assert list(_FORMATS) == list(RECIPES)
    assert all(_FORMATS[name] == recipe.words for name, recipe in RECIPES.items())
