"""Products with packed weights and what is fused with them, against float64, and bit for bit against themselves."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.kernels.cpu.fused_op import OpKind
from tests.kernels.cpu.approximate import Approximate, assert_near, products
from tests.kernels.cpu.one_op import (
    Batch,
    Buffer,
    Cache,
    Cache8,
    Codes,
    Machine,
    counts,
    equal_bits,
    make_cache,
    normal,
    packed,
    packed_bias,
    run,
    size_in,
    whole_numbers,
)
from tests.sweep import sweep

pytestmark = pytest.mark.usefixtures("native_library")

NAN = float("nan")


def draw_rows(rng: random.Random) -> int:
    """Also enough for more than one pass over the weight."""
    return size_in(rng, (1, 1), (1, 13), (1, 64), (1, 300), (384, 800))


def draw_k(rng: random.Random, rows: int) -> int:
    """Also so many that a sum is made in several blocks."""
    return size_in(rng, (1, 33), (1, 300), (480, 1100), (4000, 5000) if rows < 100 else (1, 64))


# -- plain products ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Product:
    """x @ weight.T + bias + residual."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None

    @classmethod
    def draw(cls, rng: random.Random, machine: Machine, *, exact: bool) -> Product:
        m = draw_rows(rng)
        k, n = draw_k(rng, m), size_in(rng, (1, 40), (1, 200))
        if exact:
            x, weight, bias, residual = (
                whole_numbers(rng, *shape, dtype=machine.dtype) for shape in ((m, k), (n, k), (n,), (m, n))
            )
        else:
            x, weight = (normal(rng, *shape, dtype=machine.dtype) for shape in ((m, k), (n, k)))
            bias, residual = (normal(rng, *shape, scale=k**0.5, dtype=machine.dtype) for shape in ((n,), (m, n)))
        return cls(x, weight, rng.choice((bias, None)), rng.choice((residual, None)))

    def compute(self, machine: Machine, rng: random.Random, rows: slice | Tensor = slice(None)) -> Tensor:
        """Some rows of it, in a batch of their own."""
        x, residual = self.x[rows], None if self.residual is None else self.residual[rows]
        n, k = self.weight.shape
        inputs = Buffer(rng, machine, len(x), k, x)
        out = Buffer(rng, machine, len(x), n)
        buffers = [inputs, out]
        fields: dict[str, Any] = {"in_": 0, "out": 1}
        if residual is not None:
            buffers.append(Buffer(rng, machine, len(x), n, residual))
            fields["aux"] = 2
            if rng.random() < 0.5:
                fields["out"], out = 2, buffers[2]
        weight = packed(self.weight)
        bias = None if self.bias is None else packed_bias(self.bias)
        run(machine, OpKind.LINEAR, Batch.flat(len(x)), buffers, n=n, k=k, weight=weight, bias=bias, **fields)
        assert equal_bits(inputs.rows, x)
        if residual is not None and out is not buffers[2]:
            assert equal_bits(buffers[2].rows, residual)
        return out.rows

    def expected(self) -> Approximate:
        result = products(self.x, self.weight)
        if self.bias is not None:
            result = result + Approximate.exactly(self.bias)
        if self.residual is not None:
            result = result + Approximate.exactly(self.residual)
        return result


def check_exact_product(machine: Machine, seed: int) -> None:
    """Check a product of whole numbers: there is one right answer, and it is rounded once."""
    rng = random.Random(seed)
    product = Product.draw(rng, machine, exact=True)
    expected = product.expected().value.float().to(machine.dtype) + 0.0  # no negative zeros
    found = product.compute(machine, rng) + 0.0
    assert equal_bits(found, expected), (
        f"{describe(product)}: {int((found != expected).sum())} of {found.numel()} wrong"
    )


def check_product(machine: Machine, seed: int) -> None:
    """Within rounding; and each row the same bits in any company."""
    rng = random.Random(seed)
    product = Product.draw(rng, machine, exact=False)
    found = product.compute(machine, rng)
    assert_near(found, product.expected().rounded(machine.dtype), describe(product))
    some = torch.tensor(rng.sample(range(len(found)), rng.randint(1, min(len(found), 40))))
    for rows in (some, some[:1]):
        again = product.compute(machine._replace(threads=rng.choice((1, 2, 3))), rng, rows)
        assert equal_bits(again, found[rows]), f"{describe(product)}: rows {rows.tolist()} depend on their batch"


def describe(product: Product) -> str:
    (m, k), n = product.x.shape, len(product.weight)
    more = [name for name in ("bias", "residual") if getattr(product, name) is not None]
    return f"[{m}, {k}] @ [{k}, {n}] {' '.join(more)}"


@counts(60)
def test_products_of_whole_numbers_are_exact(machine: Machine, count: int, request: pytest.FixtureRequest) -> None:
    sweep(request, count, lambda seed: check_exact_product(machine, seed))


@counts(40)
def test_products_are_near_and_rows_are_independent(
    machine: Machine, count: int, request: pytest.FixtureRequest
) -> None:
    sweep(request, count, lambda seed: check_product(machine, 1000 + seed))


@pytest.mark.parametrize("k", [1, 31, 64, 513, 4097])
def test_products_are_right_for_every_number_of_rows(k: int, machine: Machine) -> None:
    """Each has its own code, up to a block of rows."""
    rng = random.Random(k)
    product = Product(normal(rng, 66, k, dtype=machine.dtype), normal(rng, 65, k, dtype=machine.dtype))
    whole = product.compute(machine, rng)
    assert_near(whole, product.expected().rounded(machine.dtype), describe(product))
    for m in range(1, 66):
        assert equal_bits(product.compute(machine, rng, slice(0, m)), whole[:m]), m


def test_the_bound_notices_one_product_left_out(machine: Machine) -> None:
    """The tests above rely on this."""
    rng = random.Random(0)
    x, weight = normal(rng, 20, 5000, dtype=machine.dtype), normal(rng, 30, 5000, dtype=machine.dtype)
    expected = products(x, weight).rounded(machine.dtype)
    for column in (0, 2500, 4999):
        less = weight.clone()
        less[:, column] = 0
        wrong = (x.double() @ less.double().T).to(machine.dtype)
        noticed = ((wrong.double() - expected.value).abs() > expected.error).double().mean()
        assert noticed > 0.5


def test_broken_rows_stay_among_themselves(machine: Machine) -> None:
    rng = random.Random(1)
    product = Product(normal(rng, 70, 100, dtype=machine.dtype), normal(rng, 50, 100, dtype=machine.dtype))
    whole = product.compute(machine, rng)
    broken = [0, 13, 33, 69]
    product.x[broken, 7] = torch.tensor([NAN, float("inf"), NAN, float("-inf")], dtype=machine.dtype)
    found = product.compute(machine, rng)
    assert not found[broken].isfinite().any()
    sound = [i for i in range(70) if i not in broken]
    assert equal_bits(found[sound], whole[sound])


# -- gated products ----------------------------------------------------------------------------------------------------


def check_gated(machine: Machine, seed: int) -> None:
    rng = random.Random(seed)
    m = draw_rows(rng)
    k, n = draw_k(rng, m), size_in(rng, (1, 40), (1, 200))
    x = normal(rng, m, k, dtype=machine.dtype)
    weight = normal(rng, 2 * n, k, scale=rng.choice((1.0, 4.0)) * k**-0.5, dtype=machine.dtype)
    bias = rng.choice((normal(rng, 2 * n, dtype=machine.dtype), None))

    def compute(machine: Machine, rows: slice | Tensor = slice(None)) -> Tensor:
        inputs = Buffer(rng, machine, len(x[rows]), k, x[rows])
        out = Buffer(rng, machine, len(x[rows]), n)
        fields: dict[str, Any] = {
            "weight": packed(weight, gated=True),
            "bias": None if bias is None else packed_bias(bias, gated=True),
        }
        columns = 2 * (-(-n // 32) * 32)
        run(
            machine, OpKind.LINEAR_SILU, Batch.flat(len(x[rows])), [inputs, out], in_=0, out=1, n=columns, k=k, **fields
        )
        return out.rows

    found = compute(machine)
    both = products(x, weight)
    if bias is not None:
        both = both + Approximate.exactly(bias)
    expected = both[:, :n].silu() * both[:, n:]
    assert_near(found, expected.rounded(machine.dtype), f"[{m}, {k}] @ [{k}, 2 * {n}]")
    some = torch.tensor(rng.sample(range(m), rng.randint(1, min(m, 40))))
    assert equal_bits(compute(machine._replace(threads=rng.choice((1, 2, 3))), some), found[some])


@counts(40)
def test_gated_products_are_near_their_definition(machine: Machine, count: int, request: pytest.FixtureRequest) -> None:
    sweep(request, count, lambda seed: check_gated(machine, seed))


def test_gates_far_from_zero_do_not_overflow(machine: Machine) -> None:
    """silu(x) goes to x on one side and to 0 on the other, without overflow on the way."""
    rng = random.Random(0)
    gates = torch.tensor([-1e6, -3e4, -200.0, -100.0, -88.0, -20.0, -1.0, 0.0, 1.0, 20.0, 88.0, 100.0, 200.0, 1e6])
    n = len(gates)
    weight = torch.cat((gates[:, None], torch.ones(n, 1))).to(machine.dtype)
    inputs, out = Buffer(rng, machine, 1, 1, torch.ones(1, 1)), Buffer(rng, machine, 1, n)
    run(
        machine,
        OpKind.LINEAR_SILU,
        Batch.flat(1),
        [inputs, out],
        in_=0,
        out=1,
        n=64,
        k=1,
        weight=packed(weight, gated=True),
    )
    expected = torch.nn.functional.silu(weight[:n].double().flatten())
    torch.testing.assert_close(out.rows[0].double(), expected, rtol=torch.finfo(machine.dtype).eps, atol=1e-30)


# -- heads -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Heads:
    """x @ weight.T + bias as heads, normalised and rotated; K and V go into a cache."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    heads: int
    kv_heads: int
    head_dim: int
    norms: list[Tensor] | None
    """float32, of q and of k"""
    rotary: Tensor | None
    """float32 [tokens, head_dim]: cosines, sines"""
    rows: list[tuple[int, int]]
    block_size: int

    @classmethod
    def draw(cls, rng: random.Random, machine: Machine) -> Heads:
        dim = 16 * rng.randint(2, 16)
        kv_heads = rng.randint(1, 3)
        heads = kv_heads * rng.randint(1, 4)
        rows = [(size_in(rng, (1, 1), (1, 30), (1, 90)), rng.choice((0, rng.randint(0, 200)))) for _ in range(5)]
        rows = [(new, new + before) for new, before in rows[: rng.randint(1, 5)]]
        if rng.random() < 0.15:
            rows.append((400, 400))
        tokens, n, k = sum(new for new, _ in rows), (heads + 2 * kv_heads) * dim, size_in(rng, (1, 100), (1, 600))
        angles = normal(rng, tokens, dim // 2, scale=10.0)
        return cls(
            x=normal(rng, tokens, k, dtype=machine.dtype),
            weight=normal(rng, n, k, scale=k**-0.5, dtype=machine.dtype),
            bias=rng.choice((normal(rng, n, dtype=machine.dtype), None)),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=dim,
            norms=rng.choice(([1 + 0.3 * normal(rng, dim) for _ in "qk"], None)),
            rotary=rng.choice((torch.cat((angles.cos(), angles.sin()), 1), None)),
            rows=rows,
            block_size=rng.choice((16, 32, 48, 64, 256)),
        )

    def compute(self, machine: Machine, rng: random.Random, rows: list[int]) -> tuple[Cache, list[Tensor]]:
        """Some rows in a batch of their own: the cache, and q of each."""
        ends = [0]
        for new, _ in self.rows:
            ends.append(ends[-1] + new)
        tokens = torch.cat([torch.arange(ends[i], ends[i + 1]) for i in rows])
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        cache = make_cache(
            rng,
            machine,
            [self.rows[i][1] for i in rows],
            block_size=self.block_size,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
        )
        inputs = Buffer(rng, machine, len(tokens), self.x.shape[1], self.x[tokens])
        out = Buffer(rng, machine, len(tokens), self.heads * self.head_dim)
        tables, fields = [], {}
        if self.rotary is not None:
            tables.append(self.rotary[tokens].contiguous())
            fields["rotary"] = 0
        norms = dict(zip(("q_norm", "k_norm"), self.norms or (), strict=False))
        run(
            machine,
            OpKind.QKV,
            Batch([self.rows[i] for i in rows], [cache]),
            [inputs, out],
            [cache],
            tables,
            in_=0,
            out=1,
            n=len(self.weight),
            k=self.weight.shape[1],
            eps=1e-5,
            weight=packed(self.weight),
            bias=None if self.bias is None else packed_bias(self.bias),
            **sizes,
            **norms,
            **fields,
        )
        return cache, list(torch.split(out.rows.view(len(tokens), self.heads, -1), [self.rows[i][0] for i in rows]))

    def expected(self, dtype: torch.dtype) -> tuple[Approximate, Approximate, Approximate]:
        """q, k and v of all tokens, each [tokens, heads, head_dim]."""
        x = products(self.x, self.weight)
        if self.bias is not None:
            x = x + Approximate.exactly(self.bias)
        shape = (len(self.x), -1, self.head_dim)
        x = Approximate(x.value.view(shape), x.error.view(shape))
        parts = [x[:, : self.heads], x[:, self.heads : -self.kv_heads], x[:, -self.kv_heads :]]
        for i in range(2):
            if self.norms is not None:
                parts[i] = parts[i].rms_normed(1e-5).rounded(dtype) * Approximate.exactly(self.norms[i])
            if self.rotary is not None:
                parts[i] = rotated(parts[i], self.rotary[:, None])
        q, k, v = (part.rounded(dtype) for part in parts)
        return q, k, v


def rotated(x: Approximate, table: Tensor) -> Approximate:
    half = table.shape[-1] // 2
    cosine, sine = Approximate.exactly(table[..., :half]), Approximate.exactly(table[..., half:])
    first, second = x[..., :half], x[..., half:]
    parts = first * cosine - second * sine, second * cosine + first * sine
    return Approximate(torch.cat([part.value for part in parts], -1), torch.cat([part.error for part in parts], -1))


def check_heads(machine: Machine, seed: int) -> None:
    rng = random.Random(seed)
    case = Heads.draw(rng, machine)
    everyone = list(range(len(case.rows)))
    cache, queries = case.compute(machine, rng, everyone)
    what = f"{case.heads}+2*{case.kv_heads} heads of {case.head_dim}, rows {case.rows}"
    q, k, v = case.expected(machine.dtype)
    assert_near(torch.cat(queries), q, f"q of {what}")
    start = 0
    for i, (new, end) in enumerate(case.rows):
        expected = k[start : start + new], v[start : start + new]
        if isinstance(cache, Cache8):
            pairs = zip(expected, cache.codes(i, end - new, end), strict=True)
            expected = tuple(Approximate(x.value, x.error + 0.501 * c.scale[..., None]) for x, c in pairs)
        for which, found, near in zip("kv", cache.read(i, end - new, end), expected, strict=True):
            assert_near(found, near, f"{which} of row {i} of {what}")
        start += new
    for i in everyone:
        mine, (query,) = case.compute(machine._replace(threads=rng.choice((1, 2))), rng, [i])
        assert equal_bits(query, queries[i]), f"row {i} of {what} depends on its batch"
        new, end = case.rows[i]
        for here, there in zip(mine.read(0, end - new, end), cache.read(i, end - new, end), strict=True):
            assert torch.equal(here, there), f"row {i} of {what} depends on its batch"
    only_what_was_asked(cache, case.rows)


def only_what_was_asked(cache: Cache, rows: list[tuple[int, int]]) -> None:
    """Nothing was written but the new tokens, and zeros where the last pair of values is not full."""
    for i, (new, end) in enumerate(rows):
        if isinstance(cache, Cache8):
            cache.erase(i, end - new, end)
            continue
        nothing = torch.full((new, cache.kv_heads, cache.head_dim), NAN, dtype=cache.machine.dtype)
        after = cache.after(i, end)
        assert after is None or (after == 0).all(), "the place after an even last token must be cleared"
        cache.write(i, end - new, nothing, nothing)
        if after is not None:
            after.fill_(NAN)
    untouched = cache.kv == 255 if isinstance(cache, Cache8) else cache.kv.isnan()
    assert untouched.all(), "the cache was written to where no token lies"


@counts(40)
def test_heads_are_near_their_definition(machine: Machine, count: int, request: pytest.FixtureRequest) -> None:
    sweep(request, count, lambda seed: check_heads(machine, seed))


@counts(20)
def test_heads_in_8_bits_are_near_their_definition(
    machine: Machine, count: int, request: pytest.FixtureRequest
) -> None:
    sweep(request, count, lambda seed: check_heads(machine._replace(int8_kv=True), seed))


@pytest.mark.parametrize("head_dim", [16, 32, 48, 64, 112, 128, 256])
def test_codes_equal_those_of_torch(head_dim: int, machine: Machine) -> None:
    """The numbers are whole, so sums are exact, with a few large ones among them."""
    rng, machine = random.Random(head_dim), machine._replace(int8_kv=True)
    n, k, count = 4 * head_dim, 40, 70
    x = whole_numbers(rng, count, k, dtype=machine.dtype)
    weight = whole_numbers(rng, n, k, dtype=machine.dtype)
    weight[2 * head_dim : 2 * head_dim + 5] *= 64  # outliers of K
    x[3] = 0  # all equal
    x[4] *= 2.0**100
    x[5] *= 2.0**-140 if machine.dtype == torch.float32 else 2.0**-120
    x[6, 0], x[7, 0], x[8, 0] = NAN, float("inf"), 3e38
    rows, sizes = [(count, count + 9)], {"heads": 2, "kv_heads": 1, "head_dim": head_dim}
    case = Heads(x, weight, None, **sizes, norms=None, rotary=None, rows=rows, block_size=16)
    cache, _ = case.compute(machine, rng, [0])
    assert isinstance(cache, Cache8)
    products_of = (x.float() @ weight.float().T).view(count, 4, head_dim)
    for found, exact in zip(cache.codes(0, 9, 9 + count), (products_of[:, 2:3], products_of[:, 3:]), strict=True):
        true, sound = Codes.of(exact), exact.isfinite().all(-1)
        sound &= ~(found.scale.isnan() & (exact.amax(-1) - exact.amin(-1)).isinf())
        assert found.scale[~sound].isnan().all() and not sound[6:8].any() and sound[9:].all()
        assert torch.equal(found.scale[sound], true.scale[sound])
        assert torch.equal(found.minimum[sound], true.minimum[sound])
        assert torch.equal(found.codes[sound], true.codes[sound])
        assert (found.codes[3] == 0).all() and (found.scale[3] == 0).all()
