"""Embedding, rotary tables, norms and sums: exact where there is one right answer, else against float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from chairlift.kernels.cpu.fused_op import OpKind
from tests.kernels.cpu.approximate import Approximate, assert_near
from tests.kernels.cpu.one_op import Batch, Buffer, Machine, counts, equal_bits, normal, packed, run, size_in
from tests.sweep import sweep

pytestmark = pytest.mark.usefixtures("native_library")

NAN = float("nan")
PACKED = 1


def draw_tokens(rng: random.Random) -> int:
    return size_in(rng, (1, 1), (1, 20), (1, 300))


def draw_width(rng: random.Random) -> int:
    return size_in(rng, (1, 70), (1, 700), (1, 3000))


# -- embedding ---------------------------------------------------------------------------------------------------------


def check_embedding(machine: Machine, seed: int) -> None:
    rng = random.Random(seed)
    tokens, width, vocab = draw_tokens(rng), draw_width(rng), size_in(rng, (1, 40), (1, 300))
    table = normal(rng, vocab, width, dtype=machine.dtype)
    ids = torch.tensor([rng.randrange(vocab) for _ in range(tokens)])
    ids[0] = rng.choice((0, vocab - 1))
    for flags, weight in ((0, table), (PACKED, packed(table))):
        out = Buffer(rng, machine, tokens, width)
        run(machine, OpKind.EMBED, Batch.flat(tokens, ids), [out], out=0, flags=flags, weight=weight, n=vocab, k=width)
        assert equal_bits(out.rows, table[ids]), f"{tokens} of {vocab} rows of {width}, flags {flags}"


@counts(30)
def test_embeddings_are_rows_of_the_table(machine: Machine, count: int, request: pytest.FixtureRequest) -> None:
    sweep(request, count, lambda seed: check_embedding(machine, seed))


def test_embedding_keeps_every_bit_pattern(isa: str) -> None:
    """Infinities, NaN with its payload, subnormal numbers and signed zeros are copied, not computed with."""
    rng, machine = random.Random(0), Machine(isa, torch.bfloat16, 2)
    table = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    for flags, weight in ((0, table), (PACKED, packed(table))):
        out = Buffer(rng, machine, 256, 256)
        batch = Batch.flat(256, torch.arange(256))
        run(machine, OpKind.EMBED, batch, [out], out=0, flags=flags, weight=weight, n=256, k=256)
        assert equal_bits(out.rows, table)


# -- rotary tables -----------------------------------------------------------------------------------------------------


def check_rotary(machine: Machine, seed: int) -> None:
    rng = random.Random(seed)
    half, tokens = 8 * rng.randint(1, 16), draw_tokens(rng)
    start = size_in(rng, (0, 100), (0, 5000), (0, 2_000_000))
    batch = Batch([(tokens, start + tokens)])
    frequencies = 1 / rng.choice((1e4, 1e6)) ** (torch.arange(half) / half)
    frequencies[rng.choice((half, half, half // 2)) :] = 0
    table = torch.full((tokens + 32, 2 * half), NAN)
    factor = rng.choice((1.0, 1.3))
    run(machine, OpKind.ROTARY, batch, [], tables=[table], head_dim=2 * half, layer=0, scale=factor, weight=frequencies)
    # The angle is what float32 makes of it, as in transformers; cosine and sine of that are exact to a rounding or two.
    angles = torch.from_numpy(batch.positions).float()[:, None] * frequencies
    exact = torch.cat((angles.double().cos(), angles.double().sin()), 1)
    factors = torch.where(frequencies == 0, 1.0, factor).repeat(2)  # pairs of frequency 0 are not rotated, nor scaled
    expected = (Approximate.exactly(exact).rounded(times=2) * Approximate.exactly(factors)).rounded()
    assert_near(table[:tokens], expected, f"{tokens} tokens from {start}, heads of {2 * half}")
    assert table[tokens:].isnan().all(), "rows behind the last token were written to"


@counts(20)
def test_rotary_tables_are_near_their_definition(isa: str, count: int, request: pytest.FixtureRequest) -> None:
    sweep(request, count, lambda seed: check_rotary(Machine(isa, torch.float32, 1 + seed % 2), seed))


# -- norms -------------------------------------------------------------------------------------------------------------


def normed(machine: Machine, rng: random.Random, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    count, width = x.shape
    inputs, out = Buffer(rng, machine, count, width, x), Buffer(rng, machine, count, width)
    run(machine, OpKind.RMS_NORM, Batch.flat(count), [inputs, out], in_=0, out=1, k=width, weight=weight, eps=eps)
    assert equal_bits(inputs.rows, x)
    return out.rows


def check_norm(machine: Machine, seed: int) -> None:
    rng = random.Random(seed)
    tokens, width, eps = draw_tokens(rng), draw_width(rng), rng.choice((1e-6, 1e-5, 0.1))
    x = normal(rng, tokens, width, scale=rng.choice((1e-4, 1.0, 1e4)), dtype=machine.dtype)
    weight = 1 + normal(rng, width)
    found = normed(machine, rng, x, weight, eps)
    # Rounded to the dtype between norm and weight.
    expected = Approximate.exactly(x).rms_normed(eps).rounded(machine.dtype) * Approximate.exactly(weight)
    assert_near(found, expected.rounded(machine.dtype), f"{tokens} rows of {width}")
    some = torch.tensor(rng.sample(range(tokens), rng.randint(1, min(tokens, 20))))
    again = normed(machine._replace(threads=rng.choice((1, 2, 3))), rng, x[some], weight, eps)
    assert equal_bits(again, found[some]), f"{tokens} rows of {width} depend on their batch"


@counts(30)
def test_norms_are_near_their_definition(machine: Machine, count: int, request: pytest.FixtureRequest) -> None:
    sweep(request, count, lambda seed: check_norm(machine, seed))


def test_norms_of_every_odd_width_are_right(isa: str, dtype: torch.dtype) -> None:
    """The last element, where most would go wrong, has most of the weight."""
    for width in (*range(1, 36), 63, 65, 127, 129):
        rng, machine = random.Random(width), Machine(isa, dtype, 2)
        x = normal(rng, 5, width, dtype=dtype)
        x[:, -1] = 7
        expected = Approximate.exactly(x).rms_normed(1e-6).rounded(dtype).rounded(dtype).rounded()
        assert_near(normed(machine, rng, x, torch.ones(width), 1e-6), expected, f"rows of {width}")


def test_norm_of_zeros_is_zero(machine: Machine) -> None:
    rng = random.Random(0)
    assert (normed(machine, rng, torch.zeros(3, 50, dtype=machine.dtype), torch.ones(50), 1e-6) == 0).all()


# -- sums --------------------------------------------------------------------------------------------------------------


def check_sum(machine: Machine, seed: int) -> None:
    rng = random.Random(seed)
    tokens, width = draw_tokens(rng), draw_width(rng)
    a, b = (normal(rng, tokens, width, scale=scale, dtype=machine.dtype) for scale in (1.0, rng.choice((0.01, 1.0))))
    both = [Buffer(rng, machine, tokens, width, x) for x in (a, b)]
    out = Buffer(rng, machine, tokens, width)
    run(machine, OpKind.ADD, Batch.flat(tokens), [*both, out], in_=0, aux=1, out=2, n=width)
    assert equal_bits(out.rows, a + b), f"{tokens} rows of {width}"
    assert equal_bits(both[0].rows, a) and equal_bits(both[1].rows, b)
    run(machine, OpKind.ADD, Batch.flat(tokens), both, in_=0, aux=0, out=1, n=width)
    assert equal_bits(both[1].rows, a + a)


@counts(20)
def test_sums_are_near_their_definition(machine: Machine, count: int, request: pytest.FixtureRequest) -> None:
    sweep(request, count, lambda seed: check_sum(machine, seed))
