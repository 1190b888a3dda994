from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from chairlift.errors import ConfigError
from chairlift.kernels.cpu.library import PRODUCTS, ThreadPool, supported_isas
from chairlift.kernels.ops import experts as ops_experts
from chairlift.kernels.roof import Roof
from chairlift_lab.bench.kernel_report import kernel_table
from chairlift_lab.bench.kernels import KernelSettings, Measurement, measure_kernels
from chairlift_lab.bench.limits import Limits, LimitsNow, Peak, Rate
from chairlift_lab.bench.machine import HostMachine, describe_machine
from chairlift_lab.bench.programs import BLOCK_SIZE, ExpertTokens, Kernels, expert_bytes, kv_bytes
from chairlift_lab.bench.report import text
from chairlift_lab.bench.shapes import ExpertLayer, LayerShapes, MatmulShape, Shapes
from tests.native import needs_kernels

pytestmark = needs_kernels

TINY = LayerShapes("tiny", hidden=48, intermediate=80, heads=4, kv_heads=2, head_dim=32, vocab_size=500)
EXPERTS = ExpertLayer("few", num_experts=6, chosen=2, k=50, inner=40)
SHAPES = Shapes((MatmulShape("odd", 50, 70),), (TINY,), (EXPERTS,))
ISA = (supported_isas() or ("none",))[0]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@pytest.fixture(scope="module")
def machine() -> HostMachine:
    return dataclasses.replace(describe_machine(), l3_bytes=1 << 20)


def settings(dtype: torch.dtype = torch.bfloat16, **changes: object) -> KernelSettings:
    base = KernelSettings(1, ISA, dtype, SHAPES, (1, 5), (16, 40), (2,), repeats=3, seconds=1e-5)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def limits(bandwidth: float = 1e10, peak: float = 1e11) -> Limits:
    return Limits(1, {1: Rate(bandwidth, bandwidth)}, tuple(Peak(ISA, kind, 1, Rate(peak, peak)) for kind in PRODUCTS))


@pytest.fixture(scope="module", params=DTYPES)
def measured(request: pytest.FixtureRequest, machine: HostMachine) -> tuple[int, list[list[Measurement]]]:
    dtype = DTYPES[request.param]
    return dtype.itemsize, list(measure_kernels(settings(dtype), machine, limits(), lambda: Roof(1e10, 1e11)))


def test_counted_bytes_and_operations_equal_those_by_hand(measured: tuple[int, list[list[Measurement]]]) -> None:
    itemsize, (products, experts, decodes, prefills, heads) = measured
    assert [(each.labels["rows"], each.nbytes, each.operations) for each in products] == [
        (1, 50 * 70 * itemsize, 2 * 50 * 70),
        (5, 50 * 70 * itemsize, 2 * 50 * 70 * 5),
    ]
    # Gate, up and down of the experts that some token chose; two experts for each token.
    assert [each.labels["rows"] for each in experts] == [1, 5]
    assert experts[0].labels["touched"] == 2 < experts[1].labels["touched"] <= 6
    for each in experts:
        assert each.nbytes == each.labels["touched"] * 3 * 50 * 40 * itemsize
        assert each.operations == 2 * each.labels["rows"] * 2 * 3 * 50 * 40
    # K and V of 2 heads of 32, for 2 sequences; 4 query heads, each a product with K and one with V.
    assert [(each.labels["context"], each.nbytes, each.operations) for each in decodes] == [
        (16, 2 * 2 * 32 * itemsize * 2 * 16, 2 * 2 * 4 * 32 * 2 * 16),
        (40, 2 * 2 * 32 * itemsize * 2 * 40, 2 * 2 * 4 * 32 * 2 * 40),
    ]
    # As many whole prompts as 512 tokens hold; each query sees itself and what is before it.
    assert [(each.labels["batch"], each.operations) for each in prefills] == [
        (32, 32 * 2 * 2 * 4 * 32 * 16 * 17 // 2),
        (12, 12 * 2 * 2 * 4 * 32 * 40 * 41 // 2),
    ]
    assert [(each.labels["rows"], each.nbytes, each.operations) for each in heads] == [
        (1, 48 * 500 * itemsize, 2 * 48 * 500),
        (5, 48 * 500 * itemsize, 2 * 48 * 500 * 5),
    ]


def test_shares_follow_from_times_and_limits(measured: tuple[int, list[list[Measurement]]]) -> None:
    _, kinds = measured
    assert [each.kind for kind in kinds for each in kind[:1]] == ["product", "experts", "decode", "prefill", "head"]
    for each in (each for kind in kinds for each in kind):
        assert 1 <= each.count <= 512
        floor = max(each.nbytes / 1e10, each.operations / 1e11)
        for timing in each.timings.values():
            assert 0 < timing.best <= timing.median <= timing.worst
            assert timing.share == pytest.approx(floor / timing.median)
        assert (each.extra_cost is None) == (each.kind in ("product", "experts"))
    names = [list(kind[0].timings) for kind in kinds]
    assert names == [["all"], ["all"], ["paged", "in order"], ["paged", "in order"], ["greedy", "drawn"]]


def test_shares_are_of_the_limits_around_each_run(machine: HostMachine) -> None:
    """Memory gets slower and slower: before the first run, then after each; floors are the means of two."""
    bandwidths = iter([4e10, 3e10, *(2e10, 1e10) * 100])
    shapes = dataclasses.replace(SHAPES, models=(), experts=())
    once = settings(shapes=shapes, rows=(1,), repeats=1)
    [[product], *_] = list(measure_kernels(once, machine, limits(), lambda: Roof(next(bandwidths), 1e20)))
    floor = (product.nbytes / 3e10 + product.nbytes / 2e10) / 2  # the first round, before which it is 4e10, warms up
    assert product.main.share == pytest.approx(floor / product.main.median)


def test_limits_measured_in_a_moment_are_plausible(machine: HostMachine) -> None:
    pool = ThreadPool(1)
    roof = LimitsNow(pool, machine, ISA, torch.float32)()
    pool.close()
    assert 1e8 < roof.bandwidth < 1e13
    assert 1e8 < roof.peak < 1e13


def test_results_are_plain_data_and_tables_fit_a_terminal(measured: tuple[int, list[list[Measurement]]]) -> None:
    _, kinds = measured
    json.dumps([dataclasses.asdict(each) for kind in kinds for each in kind])
    for kind in kinds:
        lines = list(text(kernel_table(kind)))
        assert len(lines) == 2 + len(kind)
        assert max(map(len, lines)) <= 100
        assert len({len(line) for line in lines[2:]}) == 1


def test_runs_are_as_long_as_asked_for(machine: HostMachine) -> None:
    [products, *_] = list(measure_kernels(settings(seconds=1.05e-3), machine, limits(bandwidth=7e7)))
    assert products[0].count == 10  # 7,000 bytes at 70 MB/s take 0.1 ms
    [products, *_] = list(measure_kernels(settings(seconds=1e-9), machine, limits()))
    assert products[0].count == 1


def test_a_size_that_memory_cannot_hold_is_refused(machine: HostMachine) -> None:
    huge = settings(contexts=(1 << 17,), batches=(1 << 20,))
    with pytest.raises(ConfigError, match=r"batch 1048576, context 131072: one decode reads .* give smaller"):
        list(measure_kernels(huge, machine, limits()))


@pytest.mark.parametrize("isa", supported_isas() or ["none"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_timed_product_is_the_product(isa: str, dtype: torch.dtype) -> None:
    k, n, rows, pair = 64, 96, 3, 4 // dtype.itemsize
    kernels = Kernels(ThreadPool(1), isa, dtype, region_bytes=1 << 20)
    run = kernels.products(k, n, rows, count=1)["all"]()
    run()
    (ops, *_), (x, y) = run.kept  # type: ignore[attr-defined]
    offset = ops[0].weight - kernels._region.address
    packed = kernels._region.part(offset, n * k * dtype.itemsize).tensor(dtype, (n // 32, k // pair, 32, pair))
    weight = packed.transpose(1, 2).reshape(n, k)
    expected = x[:rows, :k].double() @ weight.double().T
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(y[:rows, :n].double(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("isa", supported_isas() or ["none"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_timed_experts_are_the_experts(isa: str, dtype: torch.dtype) -> None:
    layer = ExpertLayer("few", num_experts=6, chosen=2, k=64, inner=96)
    number, k, inner, pair = layer.num_experts, layer.k, layer.inner, 4 // dtype.itemsize
    tokens = ExpertTokens(layer, 5, dtype)
    kernels = Kernels(ThreadPool(1), isa, dtype, region_bytes=1 << 20)
    run = kernels.experts(layer, tokens, count=2)["all"]()
    run()
    ops, (_, out) = run.kept[0][0], run.kept[1]  # type: ignore[attr-defined]
    last = ops[1]
    sizes = expert_bytes(layer, dtype, None)
    parts = [
        kernels._region.part(address - kernels._region.address, size)
        for address, size in zip((last.weight, last.experts.contents.down), sizes, strict=True)
    ]
    gate_up = parts[0].tensor(dtype, (number, inner // 32, 2, k // pair, 32, pair))
    gate_up = gate_up.permute(0, 2, 1, 4, 3, 5).reshape(-1, k)  # panels of gate and up alternate
    down = parts[1].tensor(dtype, (number, k // 32, inner // pair, 32, pair)).transpose(2, 3).reshape(-1, inner)
    router = tokens.router.roll(1, 0)  # the second layer numbers its experts in another way
    expected = ops_experts(tokens.x, None, gate_up, down, router, tokens.routing)
    assert expected.float().abs().max() > 0.001
    torch.testing.assert_close(out[:5, :k].float(), expected.float(), rtol=2e-2, atol=1e-3 * pair)


def test_every_operation_reads_other_memory_until_all_of_it_was_read() -> None:
    region = 1 << 20
    kernels = Kernels(ThreadPool(1), supported_isas()[-1], torch.bfloat16, region)
    prepare = kernels.products(64, 96, rows=1, count=10)["all"]
    nbytes = 64 * 96 * 2
    addresses = [op.weight for _ in range(20) for op in prepare().kept[0][0]]  # type: ignore[attr-defined]
    assert addresses[0] == kernels._region.address
    assert all(kernels._region.address <= each <= kernels._region.address + region - nbytes for each in addresses)
    distinct = addresses.index(addresses[0], 1)
    assert len(set(addresses[:distinct])) == distinct == region // nbytes
    assert addresses[distinct : 2 * distinct] == addresses[:distinct]


@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_timed_attention_covers_its_sequences(queries: int, shuffled: bool) -> None:
    """Each layer's blocks are used once, and every query gets an answer."""
    batch, context = 3, 40
    kernels = Kernels(ThreadPool(1), supported_isas()[-1], torch.float32, region_bytes=1 << 20)
    prepare = kernels.attention(TINY, queries=queries, context=context, batch=batch, shuffled=shuffled, count=2)
    run = prepare()
    run()
    (_, _, _, layers), (_, out) = run.kept  # type: ignore[attr-defined]
    assert layers[1].kv - layers[0].kv >= kv_bytes(TINY, batch, context, torch.float32)
    table = run.batch._arrays.block_tables[0]  # type: ignore[attr-defined]
    assert sorted(table.ravel()) == list(range(layers[0].num_blocks)) == list(range(3 * 3))
    assert (table.ravel().tolist() == sorted(table.ravel())) == (not shuffled)
    assert kv_bytes(TINY, batch, context, torch.float32) == 2 * 9 * BLOCK_SIZE * 2 * 32 * 4
    answers = out[: batch * queries, : 4 * 32]
    assert answers.isfinite().all()
    assert (answers.abs().sum(1) > 0).all()
    assert not out[batch * queries :].any()
