"""Attention over the paged cache, against float64, and bit for bit whatever the batch, the chunks and the threads."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.kernels.cpu.fused_op import OpKind
from tests.kernels.cpu.approximate import Approximate, U, assert_near, unit_roundoff
from tests.kernels.cpu.one_op import (
    Batch,
    Buffer,
    Codes,
    Machine,
    counts,
    equal_bits,
    make_cache,
    normal,
    run,
    size_in,
)
from tests.sweep import sweep

pytestmark = pytest.mark.usefixtures("native_library")

MOST_PAIRS = 700_000
"""Most pairs of a query (of any head) and a key, in one case."""


@pytest.fixture(params=[False, True], ids=["plain", "int8"])
def int8_kv(request: pytest.FixtureRequest) -> bool:
    """Each kind of cache."""
    return bool(request.param)


@pytest.fixture
def machine(machine: Machine, int8_kv: bool) -> Machine:
    """Each path, dtype, number of threads and kind of cache."""
    return machine._replace(int8_kv=int8_kv)


@dataclasses.dataclass(frozen=True)
class Piece:
    """Queries of a sequence at positions [start, end)."""

    row: int
    start: int
    end: int


@dataclasses.dataclass
class Case:
    """Whole sequences: keys and values [context, kv_heads, head_dim], queries [new, heads, head_dim] of the newest."""

    keys: list[Tensor]
    values: list[Tensor]
    queries: list[Tensor]
    block_size: int
    window: int
    scale: float
    cap: float = 0.0
    sinks: Tensor | None = None
    """float32 [heads]"""

    @classmethod
    def make(
        cls,
        rng: random.Random,
        dtype: torch.dtype,
        rows: Sequence[tuple[int, int]],
        kv_heads: int,
        group: int,
        head_dim: int,
        block_size: int = 16,
        window: int = 0,
    ) -> Case:
        # The more scores differ, the more a single key weighs; with 3, often one key has most of the weight.
        spread = rng.choice((0.5, 1.0, 3.0))
        return cls(
            keys=[normal(rng, context, kv_heads, head_dim, dtype=dtype) for _, context in rows],
            values=[normal(rng, context, kv_heads, head_dim, dtype=dtype) for _, context in rows],
            queries=[normal(rng, new, kv_heads * group, head_dim, scale=spread, dtype=dtype) for new, _ in rows],
            block_size=block_size,
            window=window,
            scale=head_dim**-0.5,
        )

    @classmethod
    def draw(cls, rng: random.Random, dtype: torch.dtype) -> Case:
        kv_heads, head_dim = rng.randint(1, 3), 16 * rng.randint(2, 16)
        group = rng.choice((1, 2, rng.randint(1, 16), rng.randint(1, 16), rng.randint(60, 130)))
        rows: list[tuple[int, int]] = []
        pairs = 0
        for _ in range(rng.choice((1, 2, 6))):
            context = size_in(rng, (1, 20), (1, 300), (200, 1100), (1000, 4096))
            new = min(context, size_in(rng, (1, 1), (1, 1), (2, 20), (10, 120)))
            pairs += new * context * kv_heads * group
            if pairs > MOST_PAIRS:
                break
            rows.append((new, context))
        rows = rows or [(1, rng.randint(1, 300))]
        block_size = rng.choice((16, 32, 48, 64, 256))
        window = rng.choice((0, 0, rng.randint(1, 40), rng.randint(1, 3000), rng.choice((16, 255, 256, 257, 1024))))
        case = cls.make(rng, dtype, rows, kv_heads, group, head_dim, block_size, window)
        case.cap = rng.choice((0.0, 0.0, 0.5, 3.0, 50.0))
        if rng.random() < 0.4:
            case.sinks = normal(rng, kv_heads * group, scale=rng.choice((1.0, 10.0)))
        return case

    @property
    def whole(self) -> list[Piece]:
        return [Piece(i, len(k) - len(q), len(k)) for i, (k, q) in enumerate(zip(self.keys, self.queries, strict=True))]

    def queries_of(self, piece: Piece) -> Tensor:
        queries = self.queries[piece.row]
        first = len(self.keys[piece.row]) - len(queries)
        return queries[piece.start - first : piece.end - first]

    def first_seen(self, position: int) -> int:
        """By the query at a position."""
        return max(0, position + 1 - self.window) if self.window else 0

    def attend(self, machine: Machine, rng: random.Random, pieces: Sequence[Piece]) -> list[Tensor]:
        """One step, blocks scattered anew: the result [queries, heads, head_dim] of each piece.

        Blocks hold what the sequence has so far, or more of it (as after a rejected draft), and NaN where it has
        nothing or where no query looks any more.
        """
        heads, dim = self.queries[0].shape[1:]
        kv_heads = self.keys[0].shape[1]
        kept = [self.first_seen(piece.start) // self.block_size * self.block_size for piece in pieces]
        lengths = [rng.randint(piece.end, len(self.keys[piece.row])) for piece in pieces]
        sizes: dict[str, Any] = {"kv_heads": kv_heads, "head_dim": dim}
        cache = make_cache(rng, machine, lengths, block_size=self.block_size, first=kept, **sizes)
        for i, (piece, first, length) in enumerate(zip(pieces, kept, lengths, strict=True)):
            cache.write(i, first, self.keys[piece.row][first:length], self.values[piece.row][first:length])
        queries = torch.cat([self.queries_of(piece) for piece in pieces])
        q = Buffer(rng, machine, len(queries), heads * dim, queries.flatten(1))
        out = Buffer(rng, machine, len(queries), heads * dim)
        batch = Batch([(piece.end - piece.start, piece.end) for piece in pieces], [cache])
        sizes |= {"heads": heads, "window": self.window, "scale": self.scale, "cap": self.cap, "sinks": self.sinks}
        run(machine, OpKind.ATTENTION, batch, [q, out], [cache], in_=0, out=1, **sizes)
        return list(torch.split(out.rows.view(-1, heads, dim), [piece.end - piece.start for piece in pieces]))

    def expected(self, row: int, machine: Machine) -> Approximate:
        """The definition, for all queries of a sequence."""
        keys, values, queries = (x[row].double() for x in (self.keys, self.values, self.queries))
        if machine.int8_kv:
            keys, values = Codes.of(keys).numbers, Codes.of(values).numbers
        group = queries.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
        queries = queries.transpose(0, 1)
        scores = queries @ keys.mT * self.scale
        if self.cap:
            scores = self.cap * torch.tanh(scores / self.cap)
        context, dim = keys.shape[1:]
        magnitude = (queries.abs() @ keys.abs().mT * self.scale).amax(-1, keepdim=True)
        position = torch.arange(context - queries.shape[1], context)[:, None]
        seen = torch.arange(context) <= position
        if self.window:
            seen &= torch.arange(context) > position - self.window
        scores = scores.masked_fill(~seen, -math.inf)
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1)[..., :context]
        value = weights @ values
        # A score is off by what its sum and the exponential's argument are, and so is the logarithm of its weight;
        # sums of weights and of weighted values round like any sum.
        off = 2 * (4 * math.sqrt(dim) + 4) * U * magnitude + 8 * math.sqrt(context) * U
        if self.cap:  # what rounds a tanh
            off = off + 20 * U * magnitude.clamp_max(self.cap)
        if self.sinks is not None:
            off = off + 4 * U * (self.sinks.double().abs()[:, None, None] + 4)
        error = off * (weights @ values.abs())
        if machine.int8_kv:
            error = error + of_codes(machine, queries * self.scale, keys, values, weights)
        # Each weight is rounded to the dtype before it is multiplied. These errors are independent.
        error = error + 4 * unit_roundoff(self.keys[0].dtype) * (weights.square() @ values.square()).sqrt()
        return Approximate(value.transpose(0, 1), error.transpose(0, 1)).rounded(self.keys[0].dtype)

    def __str__(self) -> str:
        rows = [(len(q), len(k)) for q, k in zip(self.queries, self.keys, strict=True)]
        heads, kv_heads = self.queries[0].shape[1], self.keys[0].shape[1]
        return (
            f"rows {rows}, {heads} heads on {kv_heads} of {self.keys[0].shape[2]}, block_size {self.block_size},"
            f" window {self.window}, cap {self.cap}, sinks {self.sinks is not None}"
        )


def of_codes(machine: Machine, queries: Tensor, keys: Tensor, values: Tensor, weights: Tensor) -> Tensor:
    """How far results [heads, new, head_dim] may be off because K and V are read as codes."""
    context, dim = keys.shape[1:]
    if machine.dtype == torch.bfloat16 and machine.isa in ("avx512_bf16", "amx"):
        # The numbers that they stand for are rounded, independently.
        u = unit_roundoff(torch.bfloat16)
        off = 4 * u * (queries.square() @ keys.square().mT).sqrt().amax(-1, keepdim=True)
        return 2 * off * (weights @ values.abs()) + 4 * u * (weights.square() @ values.square()).sqrt()
    # Queries, and weights times the scales of values, are rounded to 16 bits of the largest.
    most = queries.abs().amax(-1, keepdim=True) * keys.abs().max()
    off = (U * dim + 2 * 2**-16) * math.sqrt(dim) * most
    largest = weights.amax(-1, keepdim=True) * (values.amax(-1) - values.amin(-1)).max()
    error = 2 * off * (weights @ values.abs()) + 2 * 2**-16 * math.sqrt(context) * largest
    return error + 8 * U * values.abs().max()


def pieces_of(rng: random.Random, piece: Piece) -> list[Piece]:
    """The same queries in several steps."""
    cuts = {piece.start, piece.end}
    while len(cuts) < 4 and rng.random() < 0.8:
        cuts.add(rng.randint(piece.start, piece.end))
    edges = sorted(cuts)
    return [Piece(piece.row, a, b) for a, b in itertools.pairwise(edges)]


def check(machine: Machine, case: Case, rng: random.Random) -> None:
    found = case.attend(machine, rng, case.whole)
    for row, out in enumerate(found):
        assert_near(out, case.expected(row, machine), f"row {row} of {case}")
    together = [piece for whole in case.whole for piece in pieces_of(rng, whole)]
    for whole, out in zip(case.whole, found, strict=True):
        pieces = pieces_of(rng, whole)
        parts = []
        for piece in pieces:
            threads = rng.choice((1, 2, 3))
            mates = [other for other in together if other.row != piece.row and rng.random() < 0.2]
            parts.append(case.attend(machine._replace(threads=threads), rng, [piece, *mates])[0])
        assert equal_bits(torch.cat(parts), out), f"row {whole.row} of {case} depends on its batch or on {pieces}"


@counts(6)
def test_attention_of_random_batches_is_near_its_definition(
    machine: Machine, count: int, request: pytest.FixtureRequest
) -> None:
    def one(seed: int) -> None:
        rng = random.Random(seed)
        check(machine, Case.draw(rng, machine.dtype), rng)

    sweep(request, count, one)


@pytest.mark.parametrize("cap", [0.0, 0.7, 50.0])
@pytest.mark.parametrize("sink", [None, -1e30, -8.0, 0.0, 8.0, 1e30], ids=str)
def test_attention_with_caps_and_sinks_is_near_its_definition(
    cap: float, sink: float | None, isa: str, dtype: torch.dtype, int8_kv: bool
) -> None:
    """Over several splits and with a window; a sink far below changes nothing, and one far above leaves nothing."""
    machine, rng = Machine(isa, dtype, 2, int8_kv), random.Random(0)
    for window in (0, 700):
        case = Case.make(rng, dtype, [(1, 1), (3, 40), (2, 2100)], 2, 2, 32, window=window)
        case.cap = cap
        without = case.attend(machine, rng, case.whole)
        case.sinks = None if sink is None else torch.full((4,), sink)
        found = case.attend(machine, rng, case.whole)
        if sink is None or abs(sink) < 1e20:
            check(machine, case, rng)
        for out, other in zip(found, without, strict=True):
            if sink != -8.0:  # which bfloat16 may round away
                assert equal_bits(out, other) == (sink in (None, -1e30))
            assert (out == 0).all() == (sink == 1e30)


def test_each_head_has_its_own_sink_and_the_cap_comes_before_the_mask(machine: Machine) -> None:
    """One head's sink changes that head alone; and a key behind the window stays out however low the cap is."""
    rng = random.Random(0)
    case = Case.make(rng, machine.dtype, [(20, 60)], 2, 3, 48, window=7)
    case.cap, case.sinks = 0.01, torch.zeros(6)
    (before,) = case.attend(machine, rng, case.whole)
    check(machine, case, rng)
    case.sinks[4] = 2.0
    (after,) = case.attend(machine, rng, case.whole)
    assert [equal_bits(before[:, head], after[:, head]) for head in range(6)] == [True] * 4 + [False, True]


@pytest.mark.parametrize("context", [1, 15, 16, 17, 255, 256, 257, 1023, 1024, 1025, 2048, 4096])
def test_attention_is_right_at_edges_of_tiles_and_splits(
    context: int, isa: str, dtype: torch.dtype, int8_kv: bool
) -> None:
    machine, rng = Machine(isa, dtype, 2, int8_kv), random.Random(context)
    for window in (0, 1, 16, 256, 1024, 1025):
        rows = [(1, context), (min(context, 17), context)]
        check(machine, Case.make(rng, dtype, rows, 1, 2, 32, window=window), rng)


@pytest.mark.parametrize("head_dim", range(32, 257, 16))
def test_attention_is_right_for_every_head_size(head_dim: int, isa: str, dtype: torch.dtype, int8_kv: bool) -> None:
    machine, rng = Machine(isa, dtype, 2, int8_kv), random.Random(head_dim)
    check(machine, Case.make(rng, dtype, [(1, 40), (30, 77)], 2, 3, head_dim), rng)


@pytest.mark.parametrize("group", [*range(1, 17), 63, 64, 65, 128])
def test_attention_is_right_for_every_number_of_heads_that_share_keys(
    group: int, isa: str, dtype: torch.dtype, int8_kv: bool
) -> None:
    machine, rng = Machine(isa, dtype, 2, int8_kv), random.Random(group)
    check(machine, Case.make(rng, dtype, [(1, 40), (19, 60), (1, 1100)], 2, group, 32), rng)


def test_only_few_long_contexts_are_divided_among_threads(machine: Machine) -> None:
    """Long contexts are divided among threads only where there is too little else to do."""
    rng = random.Random(0)
    rows = [(1, rng.randint(1025, 4096)) for _ in range(3)]
    case = Case.make(rng, machine.dtype, rows, 1, 4, 32, block_size=64)
    check(machine, case, rng)
    alone = [case.attend(machine._replace(threads=2), rng, [piece])[0] for piece in case.whole]
    crowd = [Piece(i % 3, piece.start, piece.end) for i in range(12) for piece in [case.whole[i % 3]]]
    for piece, out in zip(crowd, case.attend(machine, rng, crowd), strict=True):
        assert equal_bits(out, alone[piece.row])


def test_the_bound_notices_a_key_left_out(machine: Machine) -> None:
    """The tests above rest on this. With few keys each matters more, so rounding to 8 bits cannot hide it."""
    rng, count = random.Random(0), 150 if machine.int8_kv else 700
    case = Case.make(rng, machine.dtype, [(1, count)], 2, 4, 64)
    expected = case.expected(0, machine)
    noticed = 0
    for left_out in rng.sample(range(count), 60):
        keep = [i for i in range(count) if i != left_out]
        less = dataclasses.replace(case, keys=[case.keys[0][keep]], values=[case.values[0][keep]])
        wrong = less.expected(0, machine).value.to(machine.dtype).double()
        noticed += bool(((wrong - expected.value).abs() > expected.error).any())
    assert noticed >= (60 if machine.dtype == torch.float32 and not machine.int8_kv else 20)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_broken_sequence_stays_alone(row: int, machine: Machine) -> None:
    rng = random.Random(2)
    case = Case.make(rng, machine.dtype, [(1, 300), (40, 41), (1, 17)], 2, 2, 48)
    sound = case.attend(machine, rng, case.whole)
    case.keys[row][0] = float("nan")
    case.values[row][3] = float("inf")
    for i, (before, after) in enumerate(zip(sound, case.attend(machine, rng, case.whole), strict=True)):
        if i == row:
            assert not after.isfinite().any(-1).all()
        else:
            assert equal_bits(before, after)


@pytest.mark.parametrize("window", [0, 5, 300])
@pytest.mark.parametrize("rows", [[(50, 60)], [(1, 1100), (30, 300)], [(20, 1034), (1, 1025)]], ids=str)
def test_a_broken_token_reaches_only_those_that_see_it(
    window: int, rows: list[tuple[int, int]], machine: Machine
) -> None:
    """Tokens before the broken one stay sound, since they may be in the prefix cache of another request."""
    rng = random.Random(window)
    sound = Case.make(rng, machine.dtype, rows, 2, 2, 48, window=window)
    before = sound.attend(machine, rng, sound.whole)
    for bad in (math.nan, math.inf, -math.inf):
        keys, values = ([x.clone() for x in both] for both in (sound.keys, sound.values))
        broken = [max(len(x) - rng.randint(2, 24), 0) for x in keys]
        for x, y, token in zip(keys, values, broken, strict=True):
            x[token], y[token, :, rng.randrange(48)] = bad, bad
        case = dataclasses.replace(sound, keys=keys, values=values)
        for whole, old, new in zip(case.whole, before, case.attend(machine, rng, case.whole), strict=True):
            for position in range(whole.start, whole.end):
                a, b = old[position - whole.start], new[position - whole.start]
                if case.first_seen(position) <= broken[whole.row] <= position:
                    assert not b.isfinite().all(), (position, broken)
                else:
                    assert equal_bits(a, b), (position, broken)


def extremes(rng: random.Random, dim: int, size: float) -> tuple[Tensor, Tensor]:
    """Keys and values of 300 tokens and two heads that use the whole range of codes, or none of it."""
    keys, values = (normal(rng, 300, 2, dim, scale=size) for _ in "kv")
    for x in (keys, values):
        x[::5] = x[::5, :, :1]  # all numbers of a head are equal
        x[1::5] = x[1::5].abs().amax(-1, keepdim=True)
        x[1::5, :, 3] *= -1  # all codes are 255 but one
        x[2::5, :, 7] *= 100  # an outlier
        x[3::5] = 0
    return keys, values


@pytest.mark.parametrize("size", [1e-26, 1e-10, 1.0, 1e30], ids=str)
@pytest.mark.parametrize("dim", [32, 64, 256])
def test_heads_of_equal_and_of_extreme_numbers(dim: int, size: float, isa: str, dtype: torch.dtype) -> None:
    machine, rng = Machine(isa, dtype, 1, int8_kv=True), random.Random(dim)
    keys, values = extremes(rng, dim, size)
    case = Case.make(rng, dtype, [(20, 300)], 2, 2, dim)
    queries = [(case.queries[0].float() / max(size, 1e-20)).to(dtype)]
    check(machine, dataclasses.replace(case, keys=[keys.to(dtype)], values=[values.to(dtype)], queries=queries), rng)


def test_the_largest_sums_do_not_overflow(isa: str, dtype: torch.dtype) -> None:
    """256 products of the largest number of 16 bits and the largest code, for scores and for values."""
    machine, rng = Machine(isa, dtype, 1, int8_kv=True), random.Random(0)
    x = torch.ones(512, 1, 256, dtype=dtype)
    x[:, :, 0] = -1
    case = Case.make(rng, dtype, [(3, 512)], 1, 2, 256)
    for sign in (1.0, -1.0):
        queries = [torch.full_like(case.queries[0], 0.01 * sign)]
        check(machine, dataclasses.replace(case, keys=[x], values=[x], queries=queries), rng)


def test_numbers_further_apart_than_float32_reaches_fail_alone(isa: str) -> None:
    machine, rng = Machine(isa, torch.float32, 1, int8_kv=True), random.Random(0)
    case = Case.make(rng, torch.float32, [(40, 40)], 1, 1, 32)
    (before,) = case.attend(machine, rng, case.whole)
    case.values[0][20, 0, :2] = torch.tensor([3e38, -3e38])
    (after,) = case.attend(machine, rng, case.whole)
    assert equal_bits(before[:20], after[:20]) and after[20:].isnan().all()


def test_codes_rounded_by_torch_are_within_half_a_step(dtype: torch.dtype) -> None:
    """Half a step of 255, and what float32 adds."""
    x = normal(random.Random(0), 50, 2, 64, dtype=dtype)
    codes = Codes.of(x)
    off = (codes.numbers - x.double()).abs()
    assert (off <= 0.501 * codes.scale.double()[..., None]).all() and codes.codes.amax() == 255
