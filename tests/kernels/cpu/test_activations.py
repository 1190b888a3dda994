"""Activations and factors of products, LayerNorm, factors of rows, positions, and heads that no product makes."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.kernels.cpu.fused_op import Activation, OpFlag, OpKind
from tests.kernels.cpu.approximate import Approximate, assert_near, products
from tests.kernels.cpu.one_op import (
    Batch,
    Buffer,
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

NAN, INF = float("nan"), float("inf")
EXTREMES = [0.0, 1e-30, 1e-3, 0.5, 1.0, 1.3, 3.0, 5.5, 8.0, 13.0, 40.0, 300.0, 7e4, 1e15, 1e30, 3e38]


def activated(x: Approximate, activation: Activation) -> Approximate:
    if activation == Activation.GELU:
        return x.gelu()
    if activation == Activation.GELU_TANH:
        return x.gelu_tanh()
    if activation in (Activation.RELU, Activation.RELU_SQUARED):
        x = Approximate(x.value.clamp_min(0), x.error)
    return x * x if activation == Activation.RELU_SQUARED else x


# -- products ----------------------------------------------------------------------------------------------------------


def check_product(machine: Machine, seed: int) -> None:
    """scale * f(x @ weight.T + bias) + residual, each row the same bits in any company."""
    rng = random.Random(seed)
    m, k, n = size_in(rng, (1, 1), (1, 13), (1, 90)), size_in(rng, (1, 33), (1, 300)), size_in(rng, (1, 40), (1, 200))
    activation, scale = rng.choice(list(Activation)), rng.choice((0.0, 1.0, 0.3))
    spread = rng.choice((0.5, 3.0))
    x, weight = normal(rng, m, k, dtype=machine.dtype), normal(rng, n, k, scale=spread * k**-0.5, dtype=machine.dtype)
    bias = rng.choice((None, normal(rng, n, dtype=machine.dtype)))
    residual = rng.choice((None, normal(rng, m, n, dtype=machine.dtype)))

    def compute(machine: Machine, rows: slice | Tensor = slice(None)) -> Tensor:
        count = len(x[rows])
        buffers = [Buffer(rng, machine, count, k, x[rows]), Buffer(rng, machine, count, n)]
        fields: dict[str, Any] = {"flags": int(activation), "scale": scale}
        if residual is not None:
            buffers.append(Buffer(rng, machine, count, n, residual[rows]))
            fields["aux"] = 2
        fields |= {"weight": packed(weight), "bias": None if bias is None else packed_bias(bias)}
        run(machine, OpKind.LINEAR, Batch.flat(count), buffers, in_=0, out=1, n=n, k=k, **fields)
        return buffers[1].rows

    expected = products(x, weight)
    expected = expected if bias is None else expected + Approximate.exactly(bias)
    expected = activated(expected, activation)
    if scale not in (0.0, 1.0):
        expected = expected * Approximate.exactly(torch.tensor(scale))
    expected = expected if residual is None else expected + Approximate.exactly(residual)
    found, what = compute(machine), f"{activation.name} of [{m}, {k}] @ [{k}, {n}], scale {scale}"
    assert_near(found, expected.rounded(machine.dtype), what)
    some = torch.tensor(rng.sample(range(m), rng.randint(1, min(m, 40))))
    assert equal_bits(compute(machine._replace(threads=rng.choice((1, 2, 3))), some), found[some]), what


@counts(40)
def test_products_with_activations_are_near_their_definition(
    machine: Machine, count: int, request: pytest.FixtureRequest
) -> None:
    sweep(request, count, lambda seed: check_product(machine, seed))


def of_numbers(machine: Machine, kind: OpKind, x: Tensor, **fields: Any) -> Tensor:
    """An operation of a product whose result is ``x`` [n], once per lane of a row."""
    rng, n = random.Random(0), len(x)
    gated = kind == OpKind.LINEAR_GELU
    weight = torch.cat((x[:, None], torch.ones(n, 1))) if gated else x[:, None]
    inputs, out = Buffer(rng, machine, 1, 1, torch.ones(1, 1)), Buffer(rng, machine, 1, n)
    columns = 2 * (-(-n // 32) * 32) if gated else n
    fields |= {"weight": packed(weight.to(machine.dtype), gated=gated), "n": columns, "k": 1}
    run(machine, kind, Batch.flat(1), [inputs, out], in_=0, out=1, **fields)
    return out.rows[0]


@pytest.mark.parametrize("activation", Activation)
def test_activations_of_extreme_numbers_do_not_overflow(activation: Activation, machine: Machine) -> None:
    """Nothing overflows on the way: one side goes to x, the other to 0."""
    x = torch.tensor([*EXTREMES, *(-each for each in EXTREMES)]).to(machine.dtype)
    found = of_numbers(machine, OpKind.LINEAR, x, flags=int(activation))
    expected = activated(Approximate.exactly(x), activation)
    fits = expected.value.abs() <= torch.finfo(machine.dtype).max
    assert_near(found[fits], expected[fits].rounded(machine.dtype), activation.name)
    assert (found[~fits] == INF).all()
    if activation in (Activation.GELU, Activation.GELU_TANH):
        assert (found[len(EXTREMES) :][-4:] == 0).all()
        gated = of_numbers(machine, OpKind.LINEAR_GELU, x)
        assert_near(gated[fits], Approximate.exactly(x)[fits].gelu_tanh().rounded(machine.dtype), "gated")


@pytest.mark.parametrize("activation", Activation)
def test_not_a_number_stays_one_and_infinity_goes_on(activation: Activation, machine: Machine) -> None:
    found = of_numbers(machine, OpKind.LINEAR, torch.tensor([NAN, INF, 1.0]), flags=int(activation))
    assert found[0].isnan() and found[1] == INF and found[2].isfinite()


@pytest.mark.parametrize("activation", [Activation.GELU, Activation.GELU_TANH])
def test_every_16_bit_number_is_near(activation: Activation, isa: str) -> None:
    """All finite numbers of 16 bits, rounded to 16 bits: at most one number beside what torch has in float64."""
    machine = Machine(isa, torch.bfloat16, 1)
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite() & ((x == 0) | (x.abs() >= torch.finfo(torch.bfloat16).tiny))]
    found = of_numbers(machine, OpKind.LINEAR, x, flags=int(activation))
    assert_near(found, activated(Approximate.exactly(x), activation).rounded(torch.bfloat16), activation.name)


def check_gated(machine: Machine, seed: int) -> None:
    rng = random.Random(seed)
    m, k, n = size_in(rng, (1, 1), (1, 13), (1, 90)), size_in(rng, (1, 33), (1, 300)), size_in(rng, (1, 40), (1, 200))
    x = normal(rng, m, k, dtype=machine.dtype)
    weight = normal(rng, 2 * n, k, scale=rng.choice((1.0, 4.0)) * k**-0.5, dtype=machine.dtype)
    bias = rng.choice((normal(rng, 2 * n, dtype=machine.dtype), None))

    def compute(machine: Machine, rows: slice | Tensor = slice(None)) -> Tensor:
        inputs, out = Buffer(rng, machine, len(x[rows]), k, x[rows]), Buffer(rng, machine, len(x[rows]), n)
        fields: dict[str, Any] = {"n": 2 * (-(-n // 32) * 32), "k": k, "weight": packed(weight, gated=True)}
        fields["bias"] = None if bias is None else packed_bias(bias, gated=True)
        run(machine, OpKind.LINEAR_GELU, Batch.flat(len(x[rows])), [inputs, out], in_=0, out=1, **fields)
        return out.rows

    found, both = compute(machine), products(x, weight)
    both = both if bias is None else both + Approximate.exactly(bias)
    expected = both[:, :n].gelu_tanh() * both[:, n:]
    assert_near(found, expected.rounded(machine.dtype), f"[{m}, {k}] @ [{k}, 2 * {n}]")
    some = torch.tensor(rng.sample(range(m), rng.randint(1, min(m, 40))))
    assert equal_bits(compute(machine._replace(threads=rng.choice((1, 2, 3))), some), found[some])


@counts(30)
def test_gates_with_gelu_are_near_their_definition(
    machine: Machine, count: int, request: pytest.FixtureRequest
) -> None:
    sweep(request, count, lambda seed: check_gated(machine, seed))


# -- rows --------------------------------------------------------------------------------------------------------------


def normed(machine: Machine, rng: random.Random, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    count, width = x.shape
    inputs, out = Buffer(rng, machine, count, width, x), Buffer(rng, machine, count, width)
    fields = {"weight": weight, "bias": bias, "eps": eps, "k": width}
    run(machine, OpKind.LAYER_NORM, Batch.flat(count), [inputs, out], in_=0, out=1, **fields)
    assert equal_bits(inputs.rows, x)
    return out.rows


def check_layer_norm(machine: Machine, seed: int) -> None:
    rng = random.Random(seed)
    tokens, width = size_in(rng, (1, 1), (1, 20), (1, 300)), size_in(rng, (1, 70), (1, 700), (1, 3000))
    x = normal(rng, tokens, width, scale=rng.choice((1e-4, 1.0, 1e4)), dtype=machine.dtype)
    if rng.random() < 0.3:
        x = x + rng.choice((3.0, -10.0))
    weight, bias = 1 + normal(rng, width), rng.choice((normal(rng, width), None))
    eps = rng.choice((1e-12, 1e-5, 0.1))
    found = normed(machine, rng, x, weight, bias, eps)
    expected = Approximate.exactly(x).layer_normed(eps) * Approximate.exactly(weight)
    expected = expected if bias is None else expected + Approximate.exactly(bias)
    assert_near(found, expected.rounded(machine.dtype), f"{tokens} rows of {width}, eps {eps}")
    some = torch.tensor(rng.sample(range(tokens), rng.randint(1, min(tokens, 20))))
    again = normed(machine._replace(threads=rng.choice((1, 2, 3))), rng, x[some], weight, bias, eps)
    assert equal_bits(again, found[some]), f"{tokens} rows of {width} depend on their batch"


@counts(30)
def test_layer_norms_are_near_their_definition(machine: Machine, count: int, request: pytest.FixtureRequest) -> None:
    sweep(request, count, lambda seed: check_layer_norm(machine, seed))


def test_layer_norms_of_every_odd_width_are_right(isa: str, dtype: torch.dtype) -> None:
    """The last element, where most would go wrong, has most of the weight; and what pads a row counts for nothing."""
    for width in (*range(2, 36), 63, 65, 127, 129):
        rng, machine = random.Random(width), Machine(isa, dtype, 2)
        x = 5 + normal(rng, 5, width, dtype=dtype)
        x[:, -1] = -20
        expected = Approximate.exactly(x).layer_normed(1e-6).rounded(dtype)
        assert_near(normed(machine, rng, x, torch.ones(width), None, 1e-6), expected, f"rows of {width}")


def test_layer_norm_of_equal_numbers_is_the_bias(machine: Machine) -> None:
    rng = random.Random(0)
    bias = whole_numbers(rng, 50)
    found = normed(machine, rng, torch.full((3, 50), 4.0, dtype=machine.dtype), torch.ones(50), bias, 1e-5)
    assert torch.equal(found.float(), bias.expand(3, 50))


@counts(20)
def test_factors_of_rows_and_of_embeddings_are_applied(
    machine: Machine, count: int, request: pytest.FixtureRequest
) -> None:
    def check(seed: int) -> None:
        rng = random.Random(seed)
        tokens, width, vocab = size_in(rng, (1, 20), (1, 300)), size_in(rng, (1, 70), (1, 700)), rng.randint(1, 200)
        factor = rng.choice((0.0625, 3.7, 45.25))
        x = normal(rng, tokens, width, dtype=machine.dtype)
        inputs, out = Buffer(rng, machine, tokens, width, x), Buffer(rng, machine, tokens, width)
        run(machine, OpKind.SCALE, Batch.flat(tokens), [inputs, out], in_=0, out=1, n=width, scale=factor)
        assert equal_bits(out.rows, x * factor)
        ids, table = torch.tensor([rng.randrange(vocab) for _ in x]), normal(rng, vocab, width, dtype=machine.dtype)
        for flags, weight in ((0, table), (int(OpFlag.PACKED), packed(table))):
            fields = {"flags": flags, "weight": weight, "n": vocab, "k": width, "scale": factor}
            run(machine, OpKind.EMBED, Batch.flat(tokens, ids), [out], out=0, **fields)
            assert equal_bits(out.rows, table[ids] * factor)

    sweep(request, count, check)


@counts(10)
def test_rows_are_looked_up_by_their_positions(machine: Machine, count: int, request: pytest.FixtureRequest) -> None:
    def check(seed: int) -> None:
        rng = random.Random(seed)
        width, rows = size_in(rng, (1, 70), (1, 700)), [(rng.randint(1, 20), rng.randint(20, 90)) for _ in range(3)]
        batch = Batch(rows)
        table = normal(rng, 90, width, dtype=machine.dtype)
        out = Buffer(rng, machine, batch.num_tokens, width)
        fields = {"flags": int(OpFlag.POSITIONS), "weight": table, "n": 90, "k": width}
        run(machine, OpKind.EMBED, batch, [out], out=0, **fields)
        assert equal_bits(out.rows, table[torch.from_numpy(batch.positions).long()])

    sweep(request, count, check)


# -- heads -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Rows:
    """q, k and v of tokens side by side, which become heads; K and V go into a cache."""

    x: Tensor
    rows: list[tuple[int, int]]
    sizes: dict[str, Any]
    rotary: Tensor | None

    @classmethod
    def draw(cls, rng: random.Random, machine: Machine) -> Rows:
        dim, kv_heads = 16 * rng.randint(1, 16), rng.randint(1, 3)
        heads = kv_heads * rng.randint(1, 4)
        rows = [(size_in(rng, (1, 1), (1, 30)), rng.choice((0, rng.randint(0, 200)))) for _ in range(rng.randint(1, 5))]
        rows = [(new, new + before) for new, before in rows]
        tokens = sum(new for new, _ in rows)
        angles = normal(rng, tokens, dim // 2, scale=10.0)
        rotary = rng.choice((torch.cat((angles.cos(), angles.sin()), 1), None))
        x = normal(rng, tokens, (heads + 2 * kv_heads) * dim, dtype=machine.dtype)
        return cls(x, rows, {"heads": heads, "kv_heads": kv_heads, "head_dim": dim}, rotary)

    def compute(
        self, machine: Machine, kind: OpKind, x: Tensor, rows: list[int], **fields: Any
    ) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
        """Some rows: K and V in the cache, and q."""
        rng, ends = random.Random(0), [0]
        for new, _ in self.rows:
            ends.append(ends[-1] + new)
        tokens = torch.cat([torch.arange(ends[i], ends[i + 1]) for i in rows])
        kept = {name: self.sizes[name] for name in ("kv_heads", "head_dim")}
        cache = make_cache(rng, machine, [self.rows[i][1] for i in rows], block_size=32, **kept)
        buffers = [
            Buffer(rng, machine, len(tokens), x.shape[1], x[tokens]),
            Buffer(rng, machine, len(tokens), self.sizes["heads"] * self.sizes["head_dim"]),
        ]
        tables = [] if self.rotary is None else [self.rotary[tokens].contiguous()]
        fields |= self.sizes | ({} if self.rotary is None else {"rotary": 0})
        batch = Batch([self.rows[i] for i in rows], [cache])
        run(machine, kind, batch, buffers, [cache], tables, in_=0, out=1, eps=1e-5, **fields)
        written = [
            cache.read(place, self.rows[i][1] - self.rows[i][0], self.rows[i][1]) for place, i in enumerate(rows)
        ]
        return written, list(torch.split(buffers[1].rows, [self.rows[i][0] for i in rows]))


def check_heads(machine: Machine, seed: int) -> None:
    """The bits of the product with an identity; with norms over all heads, those of the norms and then that product."""
    rng = random.Random(seed)
    case = Rows.draw(rng, machine)
    heads, kv_heads, dim = case.sizes.values()
    everyone, width = list(range(len(case.rows))), case.x.shape[1]
    how = rng.choice(("plain", "head", "all"))
    sizes = (heads * dim, kv_heads * dim) if how == "all" else (dim, dim)
    norms = {} if how == "plain" else dict(zip(("q_norm", "k_norm"), (1 + normal(rng, n) for n in sizes), strict=True))
    flags = int(OpFlag.ALL_HEADS) if how == "all" else 0
    found = case.compute(machine, OpKind.HEADS, case.x, everyone, flags=flags, **norms)
    x = case.x.clone()
    if how == "all":
        start = 0
        for size, weight in zip(sizes, norms.values(), strict=True):
            part, out = x[:, start : start + size].contiguous(), Buffer(rng, machine, len(x), size)
            buffers = [Buffer(rng, machine, len(x), size, part), out]
            fields = {"k": size, "eps": 1e-5, "weight": weight}
            run(machine, OpKind.RMS_NORM, Batch.flat(len(x)), buffers, in_=0, out=1, **fields)
            x[:, start : start + size] = out.rows
            start += size
        norms = {}
    identity = packed(torch.eye(width, dtype=machine.dtype))
    expected = case.compute(machine, OpKind.QKV, x, everyone, n=width, k=width, weight=identity, **norms)
    what = f"{heads}+2*{kv_heads} heads of {dim}, rows {case.rows}, norms {how}"
    for (keys, values), others, q, other in zip(found[0], expected[0], found[1], expected[1], strict=True):
        assert torch.equal(keys, others[0]) and torch.equal(values, others[1]), what
        assert torch.equal(q, other), what
    if how == "all":
        norms = dict(zip(("q_norm", "k_norm"), (1 + normal(rng, n) for n in sizes), strict=True))
        found = case.compute(machine, OpKind.HEADS, case.x, everyone, flags=flags, **norms)
    for i in everyone:
        again = case.compute(
            machine._replace(threads=rng.choice((1, 3))), OpKind.HEADS, case.x, [i], flags=flags, **norms
        )
        assert equal_bits(again[1][0], found[1][i]), f"{what}: row {i} depends on its batch"
        assert all(torch.equal(a, b) for a, b in zip(again[0][0], found[0][i], strict=True)), what


@counts(20)
@pytest.mark.parametrize("int8_kv", [False, True], ids=["plain", "int8"])
def test_heads_of_rows_are_written_to_their_slots(
    machine: Machine, int8_kv: bool, count: int, request: pytest.FixtureRequest
) -> None:
    sweep(request, count, lambda seed: check_heads(machine._replace(int8_kv=int8_kv), seed))
