"""The product for few rows, in Triton: against float64, and bit for bit however many rows there are."""

from __future__ import annotations

import random

import pytest
import torch

from chairlift.errors import InvariantError
from chairlift.kernels.fp8 import quantize
from chairlift.kernels.triton.launch import GemmLaunch, gemm_launch
from chairlift.kernels.triton.linear_small import linear_parts, linear_small
from chairlift.kernels.triton.norms import add_rms_norm, silu_and_mul
from tests.kernels.triton.probes import TOLERANCE, needs_fp8, normal, seeds
from tests.sweep import sweep


@pytest.mark.parametrize("count", seeds(8))
def test_the_product_of_few_rows_equals_its_definition(
    request: pytest.FixtureRequest, count: int, device: torch.device
) -> None:
    def check(seed: int) -> None:
        draw = random.Random(seed)
        dtype, num_in, num_out = draw.choice(list(TOLERANCE)), draw.choice([1, 16, 50, 96]), draw.choice([1, 16, 40])
        launch = GemmLaunch(draw.choice([16, 64]), *draw.choices([16, 32], k=2), draw.choice([1, 2, 3, 7]), 4, 2)
        x = normal(draw.choice([1, 3, 16, 17, 32]), num_in + 8, dtype=dtype, seed=seed, device=device)[:, :num_in]
        weight = normal(num_out, num_in, dtype=dtype, seed=seed + 1, device=device)
        bias = normal(num_out, dtype=dtype, seed=seed + 2, device=device) if draw.random() < 0.5 else None
        truth = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        ours = linear_small(x, weight, bias, launch=launch)
        assert ours.dtype == dtype
        # Summed in float32 and rounded once, so half a unit of the dtype's last place, and little more.
        bound = torch.finfo(dtype).eps
        torch.testing.assert_close(ours.double(), truth, rtol=bound, atol=1e-5)

    sweep(request, count, check)


@needs_fp8
@pytest.mark.parametrize("count", seeds(8))
def test_a_weight_in_fp8_is_what_it_stands_for(
    request: pytest.FixtureRequest, count: int, device: torch.device
) -> None:
    """Nothing but the sum is rounded. Each output has a scale of its own, far from its neighbours'."""

    def check(seed: int) -> None:
        draw = random.Random(seed)
        dtype, num_in, num_out = draw.choice(list(TOLERANCE)), draw.choice([1, 16, 50, 96]), draw.choice([1, 16, 41])
        launch = GemmLaunch(draw.choice([16, 64]), *draw.choices([16, 32], k=2), draw.choice([1, 2, 3, 7]), 4, 2)
        x = normal(draw.choice([1, 3, 16, 17, 32]), num_in + 8, dtype=dtype, seed=seed, device=device)[:, :num_in]
        rows = normal(num_out, num_in, dtype=torch.float32, seed=seed + 1, device=device)
        values, scales = quantize(rows * 2.0 ** torch.arange(num_out, device=device).sub(20).mul(0.2)[:, None])
        bias = normal(num_out, dtype=dtype, seed=seed + 2, device=device) if draw.random() < 0.5 else None
        truth = x.double() @ (values.double() * scales.double()[:, None]).T
        truth += 0 if bias is None else bias.double()
        ours = linear_small(x, values, bias, launch=launch, scales=scales)
        assert ours.dtype == dtype
        # Summed in float32: what an output is summed from says how far that rounds. Then rounded once.
        summed = x.double().abs() @ (values.double().abs() * scales.double()[:, None]).T
        summed += 0 if bias is None else bias.double().abs()
        limits = torch.finfo(dtype)
        bound = limits.eps * (truth.abs() + limits.smallest_normal) + 2 * torch.finfo(torch.float32).eps * summed
        torch.testing.assert_close((ours.double() - truth) / bound, torch.zeros_like(truth), rtol=0, atol=1)

    sweep(request, count, check)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_row_has_the_same_bits_in_any_company(num_splits: int, device: torch.device) -> None:
    launch = GemmLaunch(16, 16, 32, num_splits, 4, 2)
    x = normal(20, 112, dtype=torch.bfloat16, seed=1, device=device)
    weight = normal(24, 112, dtype=torch.bfloat16, seed=2, device=device)
    together = linear_small(x, weight, None, launch=launch)
    for rows in ([0], [19], [7, 3], list(range(16, 20)), list(range(19, -1, -1))):
        assert torch.equal(linear_small(x[rows], weight, None, launch=launch), together[rows])


@pytest.mark.parametrize("count", seeds(6))
def test_a_gated_layer_has_the_bits_of_a_layer_and_swiglu(
    request: pytest.FixtureRequest, count: int, device: torch.device
) -> None:
    def check(seed: int) -> None:
        draw = random.Random(seed)
        dtype, num_in, width = draw.choice(list(TOLERANCE)), draw.choice([1, 16, 50, 96]), draw.choice([1, 8, 21, 40])
        launch = GemmLaunch(draw.choice([16, 64]), *draw.choices([16, 32], k=2), draw.choice([1, 1, 2, 3]), 4, 2)
        x = normal(draw.choice([0, 1, 3, 17]), num_in, dtype=dtype, seed=seed, device=device)
        weight = normal(2 * width, num_in, dtype=dtype, seed=seed + 1, device=device)
        bias = normal(2 * width, dtype=dtype, seed=seed + 2, device=device) if draw.random() < 0.5 else None
        fused = linear_small(x, weight, bias, launch=launch, gated=True)
        assert torch.equal(fused, silu_and_mul(linear_small(x, weight, bias, launch=launch)))

    sweep(request, count, check)


@needs_fp8
@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_gated_layer_in_fp8_has_the_bits_of_a_layer_and_swiglu(num_splits: int, device: torch.device) -> None:
    """Each output has a scale of its own, far from its neighbours'."""
    x = normal(3, 64, dtype=torch.bfloat16, seed=1, device=device)
    rows = normal(42, 64, dtype=torch.float32, seed=2, device=device)
    values, scales = quantize(rows * 2.0 ** torch.arange(42, device=device).sub(20).mul(0.2)[:, None])
    launch = GemmLaunch(16, 16, 32, num_splits, 4, 2)
    fused = linear_small(x, values, None, launch=launch, scales=scales, gated=True)
    assert torch.equal(fused, silu_and_mul(linear_small(x, values, None, launch=launch, scales=scales)))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_norm_that_adds_the_parts_has_the_bits_of_a_layer_and_a_norm(
    dtype: torch.dtype, has_bias: bool, device: torch.device
) -> None:
    launch, weights = GemmLaunch(16, 16, 32, 3, 4, 2), normal(2, 72, dtype=dtype, seed=5, device=device)
    x, weight = (normal(rows, 112, dtype=dtype, seed=rows, device=device) for rows in (5, 72))
    bias = weights[0] if has_bias else None
    residual = normal(5, 72, dtype=dtype, seed=4, device=device)
    plain, total = residual.clone(), linear_small(x, weight, bias, launch=launch)
    normed = add_rms_norm(total, plain, weights[1], 1e-5)
    fused = add_rms_norm(linear_parts(x, weight, launch=launch), residual, weights[1], 1e-5, bias)
    assert torch.equal(residual, plain) and torch.equal(fused, normed)


def test_a_nan_stays_in_its_row(device: torch.device) -> None:
    x = normal(4, 32, dtype=torch.float32, seed=1, device=device)
    weight = normal(16, 32, dtype=torch.float32, seed=2, device=device)
    x[2, 5] = float("nan")
    out = linear_small(x, weight, None, launch=GemmLaunch(16, 16, 16, 2, 4, 2))
    assert out[2].isnan().all() and not out[[0, 1, 3]].isnan().any()


def test_the_launch_follows_from_the_weight_and_from_whether_a_tile_holds_the_rows() -> None:
    assert gemm_launch(9728, 896, 132).num_splits == 1
    few = gemm_launch(896, 4864, 132)
    assert few.num_splits > 1 and 64 < few.num_splits * (-(-896 // few.block_n)) <= 132
    assert few == gemm_launch(896, 4864, 132, num_rows=16)
    assert gemm_launch(896, 4864, 132, num_rows=17) == gemm_launch(896, 4864, 132, num_rows=64)
    assert gemm_launch(896, 4864, 132, num_rows=17).block_m == 64
    assert gemm_launch(16, 7, 132) == GemmLaunch(16, 32, 16, 1, 4, 4)
    assert gemm_launch(16, 7, 132, any_rows=True).block_m == 64


def test_edge_shapes_give_empty_results_or_are_refused(device: torch.device) -> None:
    weight, launch = torch.zeros((16, 32), device=device), GemmLaunch(16, 16, 16, 2, 4, 2)
    assert linear_small(torch.zeros((0, 32), device=device), weight, None, launch=launch).shape == (0, 16)
    assert linear_small(torch.zeros((0, 32), device=device), weight, None, launch=launch, gated=True).shape == (0, 8)
    with pytest.raises(InvariantError, match="even number of both; got 15"):
        linear_small(torch.zeros((1, 32), device=device), weight[:15], None, launch=launch, gated=True)
    with pytest.raises(InvariantError, match="share K"):
        linear_small(torch.zeros((1, 31), device=device), weight, None, launch=launch)
