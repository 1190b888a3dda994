"""Adapters in Triton: against their definition in float64, and bit for bit in any company."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from chairlift.errors import InvariantError, ModelLoadError
from chairlift.kernels import ops
from chairlift.kernels.coded import CodedWeight
from chairlift.kernels.cpu.low_rank import LowRankPart, MatrixChange
from chairlift.kernels.grouped import GroupedRows, GroupKind
from chairlift.kernels.low_rank_pool import HEAD_WORDS, LowRankPool, LowRankSite, PoolLayout, SiteShape
from chairlift.kernels.triton import low_rank as kernels
from chairlift.kernels.triton.coded_linear import coded_linear
from chairlift.kernels.triton.launch import GemmLaunch, shrink_launch
from chairlift.kernels.triton.linear_small import linear_parts, linear_small
from chairlift.kernels.triton.low_rank import expand, shrink
from chairlift.kernels.triton.norms import silu_and_mul
from tests.kernels.triton.probes import TOLERANCE, normal, seeds
from tests.sweep import sweep


class Case(NamedTuple):
    """A layer in a pool. Everything that no adapter uses is NaN."""

    site: LowRankSite
    changes: dict[int, MatrixChange]
    """Slot -> its adapter."""


class Layer(NamedTuple):
    case: Case
    rows: list[int]
    """Adapter of each row."""
    x: Tensor
    weight: Tensor


def vector(count: int, seed: int, device: torch.device) -> Tensor:
    return normal(count, dtype=torch.float32, seed=seed, device=device)


def adapter(draw: random.Random, outputs: int, inputs: int, parts: int, most: int, dtype: torch.dtype) -> MatrixChange:
    """An adapter with matrices for some of the parts of a layer, each for its share of the outputs."""
    found = []
    bounds = [outputs * p // parts for p in range(parts + 1)]
    for start, end in itertools.pairwise(bounds):
        if start < end and draw.random() < 0.8:
            rank, seed = draw.randint(1, most), draw.randrange(10**6)
            a, b = (
                normal(*shape, dtype=dtype, seed=seed + i, device=torch.device("cpu"))
                for i, shape in enumerate(((rank, inputs), (end - start, rank)))
            )
            found.append(LowRankPart(start, a, b * 0.3))
    scaled = draw.random() < 0.4
    some = vector(outputs, draw.randrange(10**6), torch.device("cpu"))
    return MatrixChange(found, None, 1 + 0.3 * some if scaled else None, some.flip(0) if draw.random() < 0.3 else None)


def poisoned(pool: LowRankPool) -> None:
    pool.numbers.fill_(float("nan"))
    pool.words.fill_(1 << 20)


def make(draw: random.Random, shape: SiteShape, dtype: torch.dtype, device: torch.device, slots: int = 6) -> Case:
    """A pool whose adapters are in some of its slots, in any order."""
    layout = PoolLayout({"before": SiteShape(3, 5, 1), "layer": shape}, draw.choice([1, 16, 20, 40]), dtype)
    pool = LowRankPool(layout, slots, device)
    poisoned(pool)
    changes = {}
    for slot in draw.sample(range(slots), draw.randint(1, slots - 1)):
        changes[slot] = change = adapter(draw, *shape, layout.rank, dtype)
        put(pool, slot, change)
    return Case(pool.sites["layer"], changes)


def put(pool: LowRankPool, slot: int, change: MatrixChange) -> None:
    """Copy an adapter into a slot. Its unused ranks are NaN."""
    pool.copy(slot, pool.layout.pack({"layer": change}))
    site, outputs = pool.sites["layer"], pool.layout.shapes["layer"].out_features
    for p in range(pool.layout.shapes["layer"].parts):
        rank = len(change.parts[p].a) if p < len(change.parts) else 0
        site.a[slot, p, rank:] = float("nan")
    for n, part in enumerate(site.words[slot, HEAD_WORDS : HEAD_WORDS + outputs].tolist()):
        site.b[slot, n, 0 if part < 0 else len(change.parts[part].a) :] = float("nan")


def definition(x: Tensor, base: Tensor, bias: Tensor | None, rows: Sequence[int], case: Case) -> Tensor:
    """``base`` [M, out], the float64 results without bias, as the adapters of the rows change them."""
    out = base.clone()
    for row, slot in enumerate(rows):
        if slot < 0:
            continue
        change = case.changes[slot]
        for start, a, b in change.parts:
            low = (x[row].double() @ a.double().T.to(x.device)).to(x.dtype)
            out[row, start : start + len(b)] += low.double() @ b.double().T.to(x.device)
        out[row] *= 1.0 if change.gains is None else change.gains.double().to(x.device)
        out[row] += 0.0 if change.offsets is None else change.offsets.double().to(x.device)
    return out if bias is None else out + bias.double()


def slots_of(draw: random.Random, case: Case, count: int) -> list[int]:
    """The adapters of ``count`` rows: none, one, all, or any."""
    kind = draw.randrange(4)
    if kind == 0:
        return [-1] * count
    if kind == 1:
        return [draw.choice(list(case.changes))] * count
    return [draw.choice([*case.changes, *([-1] if kind == 2 else [])]) for _ in range(count)]


def tensor(rows: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=device)


def close(ours: Tensor, truth: Tensor, x: Tensor, case: Case) -> None:
    """The low products are rounded to the model's dtype, perhaps to the neighbour of what the definition rounds to."""
    ulp = torch.finfo(x.dtype).eps
    torch.testing.assert_close(ours.double(), truth, rtol=2 * ulp, atol=ulp * 40 + 2e-4 * (x.dtype == torch.float32))


@pytest.mark.parametrize("count", seeds(10))
def test_a_layer_with_adapters_equals_its_definition(
    request: pytest.FixtureRequest, count: int, device: torch.device
) -> None:
    def check(seed: int) -> None:
        draw = random.Random(seed)
        dtype = draw.choice(list(TOLERANCE))
        shape = SiteShape(draw.choice([1, 16, 40, 66]), draw.choice([1, 16, 50, 96]), draw.choice([1, 2, 3]))
        case = make(draw, shape, dtype, device)
        rows = slots_of(draw, case, draw.choice([1, 3, 16, 17, 33]))
        x = normal(len(rows), shape.in_features + 8, dtype=dtype, seed=seed, device=device)[:, : shape.in_features]
        weight = normal(*shape[:2], dtype=dtype, seed=seed + 1, device=device)
        bias = normal(shape.out_features, dtype=dtype, seed=seed + 2, device=device) if draw.random() < 0.5 else None
        launch = GemmLaunch(draw.choice([16, 64]), *draw.choices([16, 32], k=2), draw.choice([1, 1, 2, 3]), 4, 2)
        term = shrink(x, case.site, tensor(rows, device), any_rows=draw.random() < 0.5)
        ours = linear_small(x, weight, bias, launch=launch, term=term)
        close(ours, definition(x, x.double() @ weight.double().T, bias, rows, case), x, case)
        plain = linear_small(x, weight, bias, launch=launch)
        none = [row for row, slot in enumerate(rows) if slot < 0]
        assert torch.equal(ours[none], plain[none]), "a row without an adapter changed"
        many = ops.linear(x, weight, bias)
        changed = many.clone()
        expand(changed, term, bias)
        close(changed, definition(x, x.double() @ weight.double().T, bias, rows, case), x, case)
        assert torch.equal(changed[none], many[none])

    sweep(request, count, check)


def a_layer(device: torch.device, dtype: torch.dtype = torch.bfloat16, inputs: int = 96) -> Layer:
    """Five adapters, of which one has gains and offsets, and 21 rows."""
    layout = PoolLayout({"layer": SiteShape(40, inputs, 2)}, 20, dtype)
    pool = LowRankPool(layout, 6, device)
    poisoned(pool)
    changes, draw = {}, random.Random(5)
    for slot in (4, 0, 5, 2, 3):
        change = adapter(draw, 40, inputs, 2, 20, dtype)
        if slot == 5:
            change = change._replace(gains=1 + vector(40, 1, torch.device("cpu")), offsets=torch.arange(40.0))
        changes[slot] = change
        put(pool, slot, change)
    rows = [4, -1, 0, 5, 5, 2, -1, 3, 4, 0, 0, -1, 2, 2, 5, 3, 3, -1, 4, 0, 5]
    x, weight = (normal(count, inputs, dtype=dtype, seed=count, device=device) for count in (len(rows), 40))
    return Layer(Case(pool.sites["layer"], changes), rows, x, weight)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_row_has_the_same_bits_in_any_company(num_splits: int, device: torch.device) -> None:
    """Also in company of other adapters, and as a row without adapters where nobody has one."""
    case, rows, x, weight = a_layer(device)
    launch = GemmLaunch(16, 16, 32, num_splits, 4, 2)

    def computed(chosen: list[int]) -> Tensor:
        term = shrink(x[chosen], case.site, tensor([rows[row] for row in chosen], device))
        return linear_small(x[chosen], weight, None, launch=launch, term=term)

    together = computed(list(range(21)))
    for chosen in ([0], [20], [7, 3], [1, 2, 6], list(range(16, 20)), list(range(20, -1, -1))):
        assert torch.equal(computed(chosen), together[chosen])
    none = [row for row, slot in enumerate(rows) if slot < 0]
    assert torch.equal(together[none], linear_small(x, weight, None, launch=launch)[none])
    assert not torch.equal(together, linear_small(x, weight, None, launch=launch))


def test_the_number_of_rows_does_not_matter_for_any_rows(device: torch.device) -> None:
    case, rows, x, _ = a_layer(device)
    many, owners = x.repeat(5, 1), rows * 5
    assert shrink_launch(105, 96, 32).block_m == 64 and shrink_launch(105, 96, 32, any_rows=True).block_m == 16
    few, all_rows = (
        shrink(some, case.site, tensor(own, device), any_rows=True) for some, own in ((x, rows), (many, owners))
    )
    for row, slot in enumerate(rows):
        for p, part in enumerate(case.changes[slot].parts if slot >= 0 else ()):
            ranks = slice(p * 32, p * 32 + len(part.a))
            assert torch.equal(all_rows.low[:, row::21, ranks], few.low[:, row : row + 1, ranks].expand(-1, 5, -1))


@pytest.mark.parametrize("gated", [False, True])
def test_codes_and_gates_keep_the_bits_of_a_plain_layer(gated: bool, device: torch.device) -> None:
    case, rows, x, _ = a_layer(device)
    weight = CodedWeight(40, 96, GroupKind(4, 32), x.dtype, device)
    draw = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (40, 96), generator=draw, dtype=torch.uint8)
    weight.pack_rows(GroupedRows(GroupKind(4, 32), codes, torch.rand(40, 3, generator=draw).half().float() / 8, None))
    bias, plain = normal(40, dtype=x.dtype, seed=3, device=device), weight.unpack(x.dtype)
    term = shrink(x, case.site, tensor(rows, device))
    for splits in (1, 2):
        launch = GemmLaunch(16, 32, 32, splits, 4, 2)
        ours = coded_linear(x, weight, bias, launch=launch, gated=gated, term=term)
        outputs = linear_small(x, plain, bias, launch=launch, term=term)
        assert torch.equal(ours, silu_and_mul(outputs) if gated else outputs)
        fused = linear_small(x, plain, bias, launch=launch, gated=gated, term=term)
        assert torch.equal(fused, ours)


def test_outputs_that_nobody_changes_keep_the_sign_of_zero(device: torch.device) -> None:
    """Adding a term of zero would lose it."""
    layout = PoolLayout({"layer": SiteShape(40, 16, 2)}, 16, torch.float32)
    pool = LowRankPool(layout, 2, device)
    part = LowRankPart(20, torch.ones(3, 16), torch.ones(10, 3))
    pool.copy(1, layout.pack({"layer": MatrixChange([part])}))
    x, rows, out = torch.ones(4, 16, device=device), [1, -1, -1, 1], torch.full((4, 40), -0.0, device=device)
    expand(out, shrink(x, pool.sites["layer"], tensor(rows, device)), None)
    changed = torch.zeros(4, 40, dtype=torch.bool)
    changed[[0, 3], 20:30] = True
    assert torch.equal(out.signbit().cpu(), ~changed) and (out[changed.to(device)] == 48).all()


def test_an_adapter_with_nan_harms_only_its_rows(device: torch.device) -> None:
    case, rows, x, weight = a_layer(device)
    launch = GemmLaunch(16, 16, 32, 2, 4, 2)
    before = linear_small(x, weight, None, launch=launch, term=shrink(x, case.site, tensor(rows, device)))
    case.site.a[5] = float("nan")
    after = linear_small(x, weight, None, launch=launch, term=shrink(x, case.site, tensor(rows, device)))
    own = torch.tensor([slot == 5 for slot in rows])
    assert after[own].isnan().any(dim=1).all() and torch.equal(after[~own], before[~own])


def test_the_number_of_programs_depends_on_shapes_only() -> None:
    """What adapters the rows have when a graph is captured must not matter."""
    few, many = shrink_launch(3, 96, 64), shrink_launch(130, 96, 64)
    assert kernels._shrink_grid(few, 3, 8, 192) == (1, 8 * 6, few.num_splits)
    assert kernels._shrink_grid(few, 33, 200, 192) == (3, 16 * 6, few.num_splits)
    assert kernels._shrink_grid(many, 130, 200, 64) == (3, 64 * 2, 1)


def test_edge_shapes_give_empty_results_or_are_refused(device: torch.device) -> None:
    case, _, x, weight = a_layer(device)
    term = shrink(x[:0], case.site, tensor([], device))
    assert linear_small(x[:0], weight, None, launch=GemmLaunch(16, 16, 32, 2, 4, 2), term=term).shape == (0, 40)
    expand(torch.zeros((0, 40), dtype=x.dtype, device=device), term, None)
    with pytest.raises(InvariantError, match=r"x \[3, 95\] .* and \[3\] slots do not fit to A \[6, 2, 32, 96\]"):
        shrink(x[:3, :95], case.site, tensor([0, 0, 0], device))
    with pytest.raises(InvariantError, match=r"out \[0, 39\] does not fit"):
        expand(torch.zeros((0, 39), dtype=x.dtype, device=device), term, None)


def test_what_a_slot_has_no_room_for_is_refused() -> None:
    layout = PoolLayout({"layer": SiteShape(8, 4, 2)}, 3, torch.float32)
    assert layout.rank == 16

    def part(start: int, rows: int, rank: int = 2) -> LowRankPart:
        return LowRankPart(start, torch.ones(rank, 4), torch.ones(rows, rank))

    for change, words in (
        ({"other": MatrixChange([part(0, 8)])}, "changes other"),
        ({"layer": MatrixChange(whole=torch.zeros(8, 4))}, "replaces the weight of layer"),
        ({"layer": MatrixChange([part(0, 8), part(4, 4)])}, "two low-rank matrices of layer change the same outputs"),
    ):
        with pytest.raises(ModelLoadError, match=words):
            layout.pack(change)
    for parts in ([part(0, 2), part(2, 2), part(4, 2)], [part(0, 8, 17)]):
        with pytest.raises(InvariantError, match="room for 2 of rank 16"):
            layout.pack({"layer": MatrixChange(parts)})
    with pytest.raises(InvariantError, match="8 parts"):
        PoolLayout({"layer": SiteShape(8, 4, 8)}, 3, torch.float32)


def parts_are_right(module: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether float32 sums of rows with the adapters of ``module`` are those of their definition, and results of
    torch's library are changed to these."""
    case, rows, x, weight = a_layer(device, torch.float32, inputs=300)
    bias = normal(40, dtype=torch.float32, seed=7, device=device)
    term = module.shrink(x, case.site, tensor(rows, device))
    launch = GemmLaunch(16, 16, 32, 2, 4, 2)
    with monkeypatch.context() as patch:
        patch.setattr("chairlift.kernels.triton.linear_small.add_low_rank", module.add_low_rank)
        parts = linear_parts(x, weight, launch=launch, term=term)
    truth = definition(x, x.double() @ weight.double().T, None, rows, case)
    out = ops.linear(x, weight, bias)
    module.expand(out, term, bias)
    found = (parts.double().sum(0), out.double() - bias.double())
    return all(torch.allclose(each, truth, rtol=1e-5, atol=1e-3) for each in found)


def test_sums_of_rows_with_adapters_are_right(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts_are_right(kernels, device, monkeypatch)


FAULTS: dict[str, tuple[str, str]] = {
    "a tile has one adapter": (
        "        slot = _next_slot(slots, slot)\n    return",
        "        slot = _NONE\n    return",
    ),
    "the first adapter is skipped": (
        "slot = _next_slot(slots, -1)\n    while",
        "slot = _next_slot(slots, 0)\n    while",
    ),
    "programs have the first adapter": ("range(tl.program_id(1) // TILES)", "range(tl.program_id(1) // TILES * 0)"),
    "unused ranks are read": (
        "r = first + tl.arange(0, BLOCK_R)\n        known = (r < rank)",
        "r = first + tl.arange(0, BLOCK_R)\n        known = (r < RANK)",
    ),
    "parts share the ranks of the first": ("(PARTS * RANK) + PART * RANK + r", "(PARTS * RANK) + r"),
    "parts share the matrix of the first": ("a_stride + r[:, None]", "a_stride + (r % RANK)[:, None]"),
    "the last rank is cut": ("known = (r < rank)[None, :]", "known = (r < rank - 1)[None, :]"),
    "the last input is cut": ("inside = (k < num_in)", "inside = (k < num_in - 1)"),
    "every split adds the term": ("if split == 0:", "if split >= 0:"),
    "every split adds the offset": ("tl.where(split == 0, offset", "tl.where(split >= 0, offset"),
    "splits of A overlap": ("range(split * share, tl", "range(split * (share - 1), tl"),
    "one split of A is read": ("tl.static_range(LOW_SPLITS)", "tl.static_range(1)"),
    "gains are forgotten": ("changed * gain[None, :]", "changed"),
    "gains are those of the offsets": ("of_output + num_out,", "of_output + 2 * num_out,"),
    "gains multiply the bias": ("changed -= bias[None, :]", "changed -= 0 * bias[None, :]"),
}


@pytest.fixture
def mutated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], ModuleType]:
    """Function that loads a copy of the kernels with one text replaced by another."""

    def load(old: str, new: str) -> ModuleType:
        source = inspect.getsource(kernels)
        assert source.count(old) == 1, old
        path = tmp_path / "mutated_low_rank.py"
        path.write_text(source.replace(old, new))
        spec = importlib.util.spec_from_file_location("mutated_low_rank", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # a dataclass looks for its module there
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.planted("test_sums_of_rows_with_adapters_are_right")
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(
    fault: str, mutated: Callable[[str, str], Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not parts_are_right(mutated(*FAULTS[fault]), device, monkeypatch)
