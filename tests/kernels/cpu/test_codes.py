"""Products with weights of codes in groups, against the same integers in float64, and bit for bit against themselves.

Changes that must make these fail: a scale of the group before; rows rounded towards zero; the zero of 8 bits for 4
bits; the halves of a byte exchanged; a minimum left out of a last, shorter group; sums of 16 bits over two blocks; sums
of 4-bit floats begun with nothing; tiles (AMX) that do not subtract the code of zero, that add a block twice, or that
write the rows after the last one.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.kernels.cpu.fused_op import OpKind
from chairlift.kernels.cpu.packed_codes import PackedCodes
from chairlift.kernels.grouped import GroupedRows, GroupKind
from tests.kernels.cpu.approximate import Approximate, assert_near
from tests.kernels.cpu.one_op import Batch, Buffer, Machine, counts, equal_bits, normal, run, size_in
from tests.sweep import sweep

pytestmark = pytest.mark.usefixtures("native_library")

NAN, INF = float("nan"), float("inf")
KINDS = [GroupKind(bits, group, minimum) for bits in (8, 4) for group in (32, 64, 128) for minimum in (False, True)]
KINDS += [GroupKind(4, 32, e2m1=True), GroupKind(4, 64, e2m1=True)]


def draw_codes(rng: random.Random, n: int, k: int, kind: GroupKind) -> GroupedRows:
    """Any codes, with scales of float16; sometimes the extremes alone, where sums could overflow."""
    generator = torch.Generator().manual_seed(rng.getrandbits(62))
    groups, top = -(-k // kind.group), (1 << kind.bits) - 1
    codes = torch.randint(0, top + 1, (n, k), generator=generator, dtype=torch.uint8)
    if rng.random() < 0.3:
        codes = torch.where(codes > top // 2, top, rng.choice((0, 7, top))).to(torch.uint8)
    scales = (torch.rand(n, groups, generator=generator) * 0.01).half().float()
    minimums = (torch.randn(n, groups, generator=generator) * 0.1).half().float() if kind.minimum else None
    return GroupedRows(kind, codes, scales, minimums)


def rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [M, blocks, 32] and scales [M, blocks, 1] of rows, in float64, as the kernels round them."""
    blocks = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    highest = blocks.abs().amax(2, keepdim=True)
    inverse = torch.where(highest > 2.0**-100, torch.tensor(127.0) / highest, 0.0)  # 127 / x is 127 * (1 / x) in torch
    return (blocks * inverse).round().double(), highest.double() / 127


@dataclasses.dataclass
class Product:
    """x @ weight.T, gated or not."""

    x: Tensor
    weight: GroupedRows
    gated: bool

    @classmethod
    def draw(cls, rng: random.Random, machine: Machine) -> Product:
        m, kind = size_in(rng, (1, 1), (1, 13), (1, 64), (384, 420)), rng.choice(KINDS)
        k, n = size_in(rng, (1, 33), (1, 300), (500, 1100)), size_in(rng, (1, 40), (1, 200))
        gated = n % 2 == 0 and rng.random() < 0.5
        x = normal(rng, m, k, scale=rng.choice((1e-3, 1.0, 100.0)), dtype=machine.dtype)
        if rng.random() < 0.3:
            x = x.sign() * 2
        if rng.random() < 0.3:
            x[rng.randrange(m), : rng.randint(1, k)] = 0
        return cls(x, draw_codes(rng, n, k, kind), gated)

    def compute(self, machine: Machine, rng: random.Random, rows: slice | Tensor = slice(None)) -> Tensor:
        x, (n, k) = self.x[rows], self.weight.shape
        weight = PackedCodes(n, k, self.weight.kind, interleaved=self.gated)
        cut = rng.randint(0, n)
        weight.pack_rows(self.weight[cut:], cut)
        weight.pack_rows(self.weight[:cut], 0)
        inputs = Buffer(rng, machine, len(x), k, x)
        out = Buffer(rng, machine, len(x), n // 2 if self.gated else n)
        fields: dict[str, Any] = {"format": weight.format, "group": weight.group, "weight": weight.memory.address}
        kind = OpKind.LINEAR_SILU if self.gated else OpKind.LINEAR
        run(machine, kind, Batch.flat(len(x)), [inputs, out], n=weight.n, k=k, in_=0, out=1, **fields)
        return out.rows

    def expected(self) -> Approximate:
        codes, scales = rounded_rows(self.x)
        k = codes.shape[1] * 32
        weight = self.weight.dequantize().double()
        weight = torch.nn.functional.pad(weight, (0, k - weight.shape[1])).unflatten(1, (-1, 32))
        terms = torch.einsum("mbk,nbk->mnb", codes, weight) * scales.squeeze(2)[:, None]
        size = torch.einsum("mbk,nbk->mnb", codes.abs(), weight.abs()) * scales.squeeze(2)[:, None]
        if self.weight.minimums is not None:  # the two parts of a sum may be much larger than it is
            low = self.weight.minimums.double().abs().repeat_interleave(self.weight.kind.group // 32, 1)
            size = size + 2 * torch.einsum(
                "mb,nb->mnb", codes.abs().sum(2) * scales.squeeze(2), low[:, : size.shape[2]]
            )
        result = Approximate(terms.sum(2), 2.0**-22 * size.sum(2))
        if not self.gated:
            return result
        half = len(weight) // 2
        return result[:, :half].silu() * result[:, half:]


def check_product(machine: Machine, seed: int) -> None:
    rng = random.Random(seed)
    product = Product.draw(rng, machine)
    found, about = product.compute(machine, rng), f"{list(product.x.shape)}, {product.weight.kind}, {product.gated}"
    assert_near(found, product.expected().rounded(machine.dtype), about)
    some = torch.tensor(rng.sample(range(len(found)), rng.randint(1, min(len(found), 40))))
    for rows in (some, some[:1]):
        again = product.compute(machine._replace(threads=rng.choice((1, 2, 3))), rng, rows)
        assert equal_bits(again, found[rows]), f"{about}: rows {rows.tolist()} depend on their batch"


@counts(60)
def test_products_of_codes_are_near_and_rows_are_independent(
    machine: Machine, count: int, request: pytest.FixtureRequest
) -> None:
    sweep(request, count, lambda seed: check_product(machine, seed))


def check_edges(machine: Machine, kind: GroupKind) -> None:
    """Numbers of rows around the edges of row blocks: each row has the bits that it has among twelve rows."""
    rng = random.Random(kind.bits)
    product = Product(normal(rng, 260, 1100, dtype=machine.dtype), draw_codes(rng, 70, 1100, kind), gated=False)
    few = torch.cat([product.compute(machine, rng, slice(row, row + 12)).clone() for row in range(0, 260, 12)])
    for rows in (95, 96, 97, 111, 112, 128, 129, 225, 260):
        assert equal_bits(product.compute(machine, rng, slice(0, rows)), few[:rows]), f"{rows} rows, {kind}"


@pytest.mark.parametrize("kind", KINDS[::5])
def test_bits_are_equal_at_edges_of_row_blocks(machine: Machine, kind: GroupKind) -> None:
    check_edges(machine, kind)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("kind", KINDS[::5])
def test_a_broken_row_breaks_no_other(machine: Machine, kind: GroupKind, bad: float) -> None:
    rng = random.Random(3)
    x = normal(rng, 5, 70, dtype=machine.dtype)
    product = Product(x, draw_codes(rng, 40, 70, kind), gated=False)
    whole = product.compute(machine, rng).clone()
    x[2, 33] = bad
    broken = product.compute(machine, rng)
    assert broken[2].isnan().all()
    kept = [0, 1, 3, 4]
    assert equal_bits(broken[kept], whole[kept])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
def test_codes_come_back_as_they_were_packed(kind: GroupKind, gated: bool) -> None:
    rng = random.Random(0)
    given = draw_codes(rng, 70, 100, kind)
    weight = PackedCodes(70, 100, kind, interleaved=gated)
    weight.pack_rows(given[40:], 40)
    weight.pack_rows(given[:40])
    found = weight.rows()
    assert torch.equal(found.codes, given.codes) and torch.equal(found.scales, given.scales)
    assert (found.minimums is None) == (given.minimums is None)
    assert torch.equal(weight.unpack(), given.dequantize())


@pytest.mark.parametrize("kind", KINDS)
def test_an_embedding_of_codes_is_their_rows(machine: Machine, kind: GroupKind) -> None:
    rng = random.Random(0)
    given = draw_codes(rng, 70, 100, kind)
    weight = PackedCodes(70, 100, kind)
    weight.pack_rows(given)
    ids = torch.tensor([0, 69, 33, 33, 31])
    out = Buffer(rng, machine, len(ids), 100)
    fields = {"format": weight.format, "group": weight.group, "weight": weight.memory.address, "flags": 1}
    run(machine, OpKind.EMBED, Batch.flat(len(ids), ids), [out], n=70, k=100, out=0, **fields)
    assert equal_bits(out.rows, given.dequantize()[ids].to(machine.dtype))
