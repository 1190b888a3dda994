"""Norms, SwiGLU, and the way from the QKV product into the cache, in Triton, against their definitions."""

from __future__ import annotations

import random

import pytest
import torch

from chairlift.errors import InvariantError
from chairlift.kernels import ops, reference
from chairlift.kernels.triton.launch import GemmLaunch
from chairlift.kernels.triton.linear_small import linear_parts, linear_small
from chairlift.kernels.triton.norms import add_rms_norm, rms_norm, silu_and_mul
from chairlift.kernels.triton.rope_cache import rope_and_cache, rotary_table
from tests.kernels.triton.probes import TOLERANCE, normal, seeds
from tests.sweep import sweep

DTYPES = list(TOLERANCE)


@pytest.mark.parametrize("count", seeds(4))
def test_norms_equal_their_definition(request: pytest.FixtureRequest, count: int, device: torch.device) -> None:
    def check(seed: int) -> None:
        draw = random.Random(seed)
        dtype, shape = draw.choice(DTYPES), (draw.randint(1, 4), draw.choice([1, 24, 64, 100]))
        x, residual = (normal(*shape, dtype=dtype, seed=seed + n, device=device) for n in (0, 1))
        weight = normal(shape[1], dtype=dtype, seed=seed + 2, device=device)
        atol = {"rtol": 1e-2, "atol": TOLERANCE[dtype]}
        torch.testing.assert_close(rms_norm(x, weight, 1e-5), ops.rms_norm(x, weight, 1e-5), **atol)
        total = x + residual
        normed = add_rms_norm(x, residual, weight, 1e-5)
        assert torch.equal(residual, total)
        torch.testing.assert_close(normed, ops.rms_norm(total, weight, 1e-5), **atol)

    sweep(request, count, check)


@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_equals_its_definition(dtype: torch.dtype, factor: float, device: torch.device) -> None:
    x = 3 * normal(3, 2 * 1037, dtype=dtype, seed=1, device=device)
    expected = ops.silu_and_mul(x, factor)
    torch.testing.assert_close(silu_and_mul(x, factor), expected, rtol=1e-2, atol=TOLERANCE[dtype])


def test_rows_of_a_wider_tensor_are_normalized_like_copies(device: torch.device) -> None:
    """A slice of columns: rows that are contiguous but lie apart."""
    wide = normal(3, 80, dtype=torch.float32, seed=1, device=device)
    weight = torch.ones(48, device=device)
    assert torch.equal(rms_norm(wide[:, 8:56], weight, 1e-5), rms_norm(wide[:, 8:56].contiguous(), weight, 1e-5))
    assert torch.equal(silu_and_mul(wide[:, 8:56]), silu_and_mul(wide[:, 8:56].contiguous()))


def test_a_row_has_the_same_bits_alone(device: torch.device) -> None:
    x, weight = (normal(*shape, dtype=torch.bfloat16, seed=1, device=device) for shape in ((5, 96), (96,)))
    normed, product = rms_norm(x, weight, 1e-6), silu_and_mul(x)
    for i in range(5):
        assert torch.equal(rms_norm(x[i : i + 1], weight, 1e-6)[0], normed[i])
        assert torch.equal(silu_and_mul(x[i : i + 1])[0], product[i])


def test_no_rows_give_empty_results(device: torch.device) -> None:
    x, cache = torch.empty((0, 64), device=device), torch.zeros((1, 4, 1, 16), device=device)
    assert rms_norm(x, torch.ones(64, device=device), 1e-6).shape == (0, 64)
    assert silu_and_mul(x).shape == (0, 32)
    none = torch.empty(0, dtype=torch.int64, device=device)
    assert rope_and_cache(x, None, cache, cache, none, num_heads=2).shape == (0, 2, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rotary_table_is_that_of_pytorch(dtype: torch.dtype, device: torch.device) -> None:
    positions = torch.tensor([0, 1, 17, 4095, 131_071], dtype=torch.int32, device=device)
    frequencies = 1e4 ** (-torch.arange(12, device=device) / 12)
    frequencies[9:] = 0  # not rotated
    for factor in (1.0, 1.25):
        cos, sin = ops.rotary_table(positions, frequencies, factor, torch.float32)
        table = rotary_table(positions, frequencies, factor, dtype)
        assert table.dtype == dtype
        assert bool((table[0, ..., 9:] == 1).all()) and not bool(table[1, ..., 9:].any())
        torch.testing.assert_close(table.float(), torch.stack((cos, sin)), rtol=0, atol=1e-6 + TOLERANCE[dtype] / 4)
    assert rotary_table(positions[:0], frequencies, 1.0, dtype).shape == (2, 0, 1, 12)


def rope_case(seed: int, device: torch.device) -> None:
    """Random heads, norms, rotation and slots; everything that nobody writes must stay as it was."""
    draw = random.Random(seed)
    dtype, head_dim, block_size = draw.choice(DTYPES), draw.choice([2, 16, 24, 64]), draw.choice([1, 5, 16])
    heads, kv_heads = draw.choice([(1, 1), (4, 2), (14, 2), (9, 3), (6, 6)])
    tokens, num_blocks = draw.randint(1, 4), 6
    wide = normal(tokens, (heads + 2 * kv_heads) * head_dim + 16, dtype=dtype, seed=seed, device=device)
    qkv = wide[:, 16:] if draw.random() < 0.5 else wide[:, 16:].contiguous()
    slots = torch.tensor(draw.sample(range(num_blocks * block_size), tokens), device=device)
    angles = normal(tokens, 1, head_dim // 2, dtype=torch.float32, seed=seed + 1, device=device)
    rotary = (angles.cos().to(dtype), angles.sin().to(dtype)) if draw.random() < 0.7 else None
    norms = [
        normal(head_dim, dtype=dtype, seed=seed + n, device=device) if draw.random() < 0.5 else None for n in (2, 3)
    ]
    shape = (num_blocks, block_size, kv_heads, head_dim)
    ours, theirs = ([torch.full(shape, 7.0, dtype=dtype, device=device) for _ in "kv"] for _ in range(2))
    q, k, v = ops.rotary_heads(qkv.contiguous(), rotary, heads, kv_heads, head_dim, norms[0], norms[1], 1e-5)
    written = slots.clone()
    skipped = draw.randrange(tokens) if draw.random() < 0.5 else None
    keep = [i for i in range(tokens) if i != skipped]
    if skipped is not None:
        written[skipped] = -1
    reference.write_kv(theirs[0], theirs[1], slots[keep], k[keep], v[keep])
    out = rope_and_cache(
        qkv,
        rotary,
        ours[0],
        ours[1],
        written.to(draw.choice([torch.int32, torch.int64])),
        num_heads=heads,
        q_norm=norms[0],
        k_norm=norms[1],
        eps=1e-5,
    )
    for mine, truth in zip((out, *ours), (q, *theirs), strict=True):
        if norms == [None, None]:
            assert torch.equal(mine, truth)  # products and sums rounded in the same places
        else:
            torch.testing.assert_close(mine, truth, rtol=1e-2, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("count", seeds(8))
def test_rope_and_cache_equals_its_definition(request: pytest.FixtureRequest, count: int, device: torch.device) -> None:
    sweep(request, count, lambda seed: rope_case(seed, device))


@pytest.mark.parametrize("has_bias", [False, True])
def test_heads_from_the_parts_of_a_sum_have_the_bits_of_a_layer_and_heads(has_bias: bool, device: torch.device) -> None:
    x, weight = (normal(rows, 96, dtype=torch.bfloat16, seed=rows, device=device) for rows in (3, 8 * 24))
    bias = normal(8 * 24, dtype=torch.bfloat16, seed=1, device=device) if has_bias else None
    rotary, norm = normal(2, 3, 1, 12, dtype=torch.bfloat16, seed=2, device=device), torch.ones(24, device=device)
    launch, slots = GemmLaunch(16, 32, 16, 3, 4, 2), torch.tensor([3, -1, 9], device=device)
    qkv = linear_small(x, weight, bias, launch=launch), linear_parts(x, weight, launch=launch)
    outs = []
    for given, added in zip(qkv, (None, bias), strict=True):
        caches = torch.zeros((2, 3, 4, 2, 24), dtype=torch.bfloat16, device=device)
        q = rope_and_cache(
            given, (rotary[0], rotary[1]), caches[0], caches[1], slots, num_heads=4, k_norm=norm, eps=1e-5, bias=added
        )
        outs.append((q, caches))
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])
    assert outs[0][1].count_nonzero() == 2 * 2 * 2 * 24


def test_slots_beyond_two_thousand_million_numbers_are_written(device: torch.device) -> None:
    """The memory is only promised by the system: all but one slot are never touched."""
    cache = torch.empty((2**31 // 16 + 2, 1, 1, 16), dtype=torch.bfloat16, device=device)
    qkv = normal(1, 48, dtype=torch.bfloat16, seed=1, device=device)
    slots = torch.tensor([len(cache) - 1], dtype=torch.int32, device=device)
    rope_and_cache(qkv, None, cache, cache, slots, num_heads=1)
    assert torch.equal(cache[-1, 0, 0], qkv[0, 32:])


def test_shapes_that_do_not_fit_are_refused(device: torch.device) -> None:
    cache, slots = torch.zeros((2, 4, 1, 16), device=device), torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(InvariantError, match="is not 4 heads"):
        rope_and_cache(torch.zeros((1, 48), device=device), None, cache, cache, slots, num_heads=2)
    with pytest.raises(InvariantError, match="contiguous"):
        rope_and_cache(torch.zeros((1, 128), device=device)[:, ::2], None, cache, cache, slots, num_heads=2)
