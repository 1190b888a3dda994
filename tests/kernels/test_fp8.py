"""Weights in fp8: how far rounding may take them, and that rows come to lie where they belong."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.kernels.fp8 import FP8_LARGEST, Fp8Weight, fp8_linear, quantize

CPU = torch.device("cpu")
NUMBERS = st.floats(min_value=-(2.0**100), max_value=2.0**100, width=32)


@settings(deadline=None)
@given(st.lists(st.lists(NUMBERS, min_size=5, max_size=5), min_size=1, max_size=4))
def test_no_number_moves_by_more_than_the_format_makes_it(numbers: list[list[float]]) -> None:
    rows = torch.tensor(numbers)
    values, scales = quantize(rows)
    assert values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
    back = values.double() * scales.double()[:, None]
    error, slack = (back - rows.double()).abs(), 1 + 1e-6
    # Three bits behind the first; below 2^-6 the steps are 2^-9.
    assert (error <= slack * torch.maximum(rows.double().abs() / 16, scales.double()[:, None] * 2.0**-10)).all()
    assert (scales > 0).all() and not values.float().isnan().any()


def test_the_largest_number_and_numbers_of_the_format_are_exact() -> None:
    rows = torch.tensor([[FP8_LARGEST, 1.125, -0.0, 2.0**-9], [-7.0, 7.0, 3.5, 0.0], [0.0, 0.0, 0.0, 0.0]])
    values, scales = quantize(rows)
    assert torch.equal(values.float() * scales[:, None], rows)
    assert scales[0] == 1 and math.isfinite(float(1 / scales[1]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_dtype_is_taken(dtype: torch.dtype) -> None:
    rows = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    for ours, truth in zip(quantize(rows), quantize(rows.float()), strict=True):
        assert torch.equal(ours.float(), truth.float())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_makes_only_its_output_nan(bad: float) -> None:
    rows = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    rows[1, 5] = bad
    weight = Fp8Weight(3, 8, CPU)
    weight.pack_rows(rows)
    assert fp8_linear(torch.ones(2, 8), weight, torch.zeros(3)).isnan().tolist() == [[False, True, False]] * 2


def test_rows_lie_where_they_belong_however_they_come() -> None:
    """In slices too: four megabytes are 1,024 rows of 1,024 float32 numbers."""
    rows = torch.randn(2500, 1024, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 2501)[:, None]
    weight, whole = Fp8Weight(2500, 1024, CPU), quantize(rows)
    places = weight.values.data_ptr(), weight.scales.data_ptr()
    for start, end in ((7, 2500), (0, 7)):
        weight.pack_rows(rows[start:end].clone(), start)
    assert torch.equal(weight.values.float(), whole[0].float()) and torch.equal(weight.scales, whole[1])
    weight.pack_rows(torch.zeros(5, 1024), 3)
    assert not weight.unpack(torch.float32)[3:8].any() and weight.unpack(torch.float32)[[2, 8]].any(1).all()
    assert (weight.values.data_ptr(), weight.scales.data_ptr()) == places


def test_the_fp8_layer_equals_its_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    x, rows, bias = (torch.randn(*shape, generator=generator) for shape in ((3, 16), (5, 16), (5,)))
    weight = Fp8Weight(5, 16, CPU)
    weight.pack_rows(rows)
    wide = weight.values.double() * weight.scales.double()[:, None]
    torch.testing.assert_close(fp8_linear(x, weight, bias).double(), x.double() @ wide.T + bias, rtol=1e-5, atol=1e-5)
