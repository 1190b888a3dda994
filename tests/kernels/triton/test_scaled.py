"""Products of rows and weights in fp8: against float64, and the kernel that rounds the rows against PyTorch."""

from __future__ import annotations

import random

import pytest
import torch

from chairlift.kernels.fp8 import Fp8Weight, quantize
from chairlift.kernels.triton.scaled import quantize_rows, scaled_linear
from tests.kernels.triton.probes import TOLERANCE, needs_fp8, normal, seeds
from tests.rowwise import needs_rowwise_products
from tests.sweep import sweep

pytestmark = needs_fp8


@pytest.mark.parametrize("count", seeds(8))
def test_rows_become_what_pytorch_makes_of_them(
    request: pytest.FixtureRequest, count: int, device: torch.device
) -> None:
    def check(seed: int) -> None:
        draw = random.Random(seed)
        dtype, width = draw.choice(list(TOLERANCE)), draw.choice([1, 16, 37, 130])
        x = normal(draw.choice([1, 5, 40]), width + 8, dtype=dtype, seed=seed, device=device)[:, :width]
        x = x * torch.logspace(-6, 4, len(x), device=device).to(dtype)[:, None]
        x[0] = draw.choice([0.0, 1.0, -448.0, 2.0**-20])
        for ours, truth in zip(quantize_rows(x), quantize(x), strict=True):
            assert ours.dtype == truth.dtype and torch.equal(ours.float(), truth.float())

    sweep(request, count, check)


def test_a_number_that_is_not_finite_spoils_its_row_only(device: torch.device) -> None:
    x = normal(4, 32, dtype=torch.bfloat16, seed=1, device=device)
    x[1, 3], x[2, 4] = float("nan"), float("-inf")
    values, scales = quantize_rows(x)
    ones = (values.float() @ torch.ones(32, device=device)) * scales
    assert ones.isnan().tolist() == [False, True, True, False]
    assert quantize_rows(x[:0])[0].shape == (0, 32)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_product_is_that_of_what_the_operands_stand_for(
    dtype: torch.dtype, bias: bool, device: torch.device
) -> None:
    if device.type == "cuda" and dtype != torch.bfloat16:
        pytest.skip("products in fp8 come in bfloat16")
    needs_rowwise_products(device)
    factors = [torch.arange(1, size + 1, dtype=torch.float64, device=device) for size in (40, 48)]
    weight = Fp8Weight(48, 64, device)
    weight.pack_rows(normal(48, 64, dtype=torch.float32, seed=1, device=device) * factors[1][:, None])
    x = normal(40, 64, dtype=dtype, seed=2, device=device) * factors[0][:, None].to(dtype)
    added = normal(48, dtype=dtype, seed=3, device=device) if bias else None
    values, scales = quantize(x)
    truth = (values.double() * scales.double()[:, None]) @ weight.unpack(torch.float64).T
    truth += 0 if added is None else added.double()
    ours = scaled_linear(x, weight.values, added, scales=weight.scales)
    assert ours.dtype == dtype
    # Hopper adds products of fp8 up with about 14 bits (DeepSeek-V3 report, section 3.3.2).
    atol = 2e-3 if device.type == "cuda" else 1e-4
    numbers = [each / factors[0][:, None] / factors[1] for each in (ours.double(), truth)]  # all of one size
    torch.testing.assert_close(*numbers, rtol=torch.finfo(dtype).eps, atol=atol)
