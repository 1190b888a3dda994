"""``bench kernels`` times what it says on a GPU: equal operations on different memory, with right results."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import Tensor

from chairlift.kernels.fp8 import quantize
from chairlift.kernels.roof import GPU
from chairlift_lab.bench.device_programs import DeviceKernels
from chairlift_lab.bench.kernel_report import kernel_table
from chairlift_lab.bench.kernels import KernelSettings, measure_kernels
from chairlift_lab.bench.limits import Limits, Peak, Rate
from chairlift_lab.bench.machine import describe_machine
from chairlift_lab.bench.programs import WEIGHT_STD, Prepare
from chairlift_lab.bench.report import text
from chairlift_lab.bench.shapes import LayerShapes, MatmulShape, Shapes
from tests.rowwise import needs_rowwise_products

TINY = LayerShapes("tiny", hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=16, vocab_size=60)
PAGE = 1024
"""Numbers: where the next operand begins is a multiple of it."""


@pytest.fixture
def kernels(device: torch.device) -> DeviceKernels:
    return DeviceKernels(device, torch.float32, 1 << 20)


def drawn_next(kernels: DeviceKernels) -> torch.Generator:
    """A generator that will give what the next call draws."""
    twin = torch.Generator(kernels._generator.device)
    twin.set_state(kernels._generator.get_state())
    return twin


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.empty(shape, device=generator.device).normal_(generator=generator)


def result(prepare: Prepare) -> Tensor:
    out = prepare()()
    assert isinstance(out, Tensor)
    return out.cpu()


def operand(kernels: DeviceKernels, page: int, *shape: int) -> Tensor:
    start = page * PAGE
    return kernels._region[start : start + torch.Size(shape).numel()].view(shape).cpu().double()


@pytest.mark.parametrize(
    ("rows", "names"), [(3, ["streamed", "library"]), (100, ["library", "streamed"]), (140, ["library"])]
)
def test_a_timed_product_is_the_product(kernels: DeviceKernels, rows: int, names: list[str]) -> None:
    twin = drawn_next(kernels)
    variants = kernels.products(64, 40, rows, count=3)
    assert list(variants) == names
    x, last = normal(twin, rows, 64).cpu().double(), operand(kernels, 2 * 3, 40, 64)  # the third weight: 2,560 numbers
    for prepare in variants.values():
        torch.testing.assert_close(result(prepare).double(), x @ last.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "names"), [(3, ["streamed", "library"]), (100, ["library", "streamed"]), (140, ["library"])]
)
def test_a_timed_product_in_fp8_is_the_product(rows: int, names: list[str], device: torch.device) -> None:
    needs_rowwise_products(device)
    kernels = DeviceKernels(device, torch.float8_e4m3fn, 1 << 20)
    twin = drawn_next(kernels)
    variants = kernels.products(64, 48, rows, count=2)
    assert list(variants) == names
    x = torch.empty(rows, 64, dtype=kernels._dtype, device=device).normal_(generator=twin)
    start = 3 * PAGE  # the second weight: 3,072 numbers
    last = kernels._region[start : start + 48 * 64].view(48, 64).double() * WEIGHT_STD
    values, scales = quantize(x)
    rounded = values.double() * scales.double()[:, None]
    assert last.std().item() == pytest.approx(WEIGHT_STD, rel=0.1)
    for name, prepare in variants.items():
        truth = (rounded if name == "library" else x.double()) @ last.T
        torch.testing.assert_close(result(prepare).double(), truth.cpu(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_timed_attention_is_attention(kernels: DeviceKernels, queries: int, shuffled: bool) -> None:
    batch, context, blocks = 3, 20, 2
    twin = drawn_next(kernels)
    prepare = kernels.attention(TINY, queries=queries, context=context, batch=batch, shuffled=shuffled, count=2)
    order = torch.arange(batch * blocks)
    if shuffled:
        order = torch.randperm(batch * blocks, generator=twin, device=twin.device).cpu()
    q = normal(twin, batch, queries, 4, 16).cpu().double()
    out = result(prepare).double().view(batch, queries, 4, 16)
    pages = 3  # of one cache: 6 blocks of 16 tokens, 2 heads of 16
    keys, values = (operand(kernels, pages * i, batch * blocks, 16, 2, 16) for i in (2, 3))
    for sequence, table in enumerate(order.view(batch, blocks)):
        k, v = (x[table].reshape(-1, 2, 16)[:context].repeat_interleave(2, 1) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q[sequence], k) / 4
        hidden = torch.arange(context) > torch.arange(context - queries, context)[:, None]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        torch.testing.assert_close(out[sequence], torch.einsum("hqk,khd->qhd", weights, v), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows", [2, 40])
def test_a_timed_head_chooses_the_likeliest_or_draws(kernels: DeviceKernels, rows: int) -> None:
    twin = drawn_next(kernels)
    greedy = kernels.head(32, 60, rows, temperature=0.0, count=1)
    logits = normal(twin, rows, 32).cpu().double() @ operand(kernels, 0, 60, 32).T
    assert result(greedy).tolist() == logits.argmax(1).tolist()
    drawn = result(kernels.head(32, 60, rows, temperature=100.0, count=1))
    assert ((drawn >= 0) & (drawn < 60)).all()
    assert len(set(drawn.tolist())) > 1


def test_every_operation_reads_other_memory_until_all_of_it_was_read(kernels: DeviceKernels) -> None:
    size = len(kernels._region) // PAGE
    places = [kernels._take(PAGE - 1).data_ptr() for _ in range(2 * size)]
    assert len(set(places)) == size
    assert places[:size] == places[size:]


@pytest.mark.nightly
def test_all_kinds_are_measured_and_printed(device: torch.device) -> None:
    rate = Rate(1e10, 1e10)
    limits = Limits(1, {1: rate}, (Peak(GPU, "f32", 1, rate),))
    shapes = Shapes((MatmulShape("odd", 50, 70),), (dataclasses.replace(TINY, heads=1, kv_heads=1),))
    settings = KernelSettings(
        1, GPU, torch.float32, shapes, (1, 140), (16,), (2,), repeats=1, device=str(device), seconds=1e-9
    )
    kinds = list(measure_kernels(settings, describe_machine(), limits))
    assert [list(each.timings) for each in kinds[0]] == [["streamed", "library"], ["library"]]
    assert [each.extra_cost is None for each in kinds[0]] == [False, True]
    json.dumps([dataclasses.asdict(each) for kind in kinds for each in kind])
    lines = [list(text(kernel_table(kind))) for kind in kinds]
    assert ["streaming costs" in table[1] for table in lines] == [True, False, False, False]
    for table in lines:
        assert len({len(line) for line in table[2:]}) == 1
        assert max(map(len, table)) <= 100


def test_products_in_fp8_are_measured(device: torch.device) -> None:
    needs_rowwise_products(device)
    rate = Rate(1e10, 1e10)
    limits = Limits(1, {1: rate}, (Peak(GPU, "fp8", 1, rate),))
    shapes = Shapes((MatmulShape("even", 48, 64),), (TINY,))
    settings = KernelSettings(
        1, GPU, torch.float8_e4m3fn, shapes, (1, 140), repeats=1, device=str(device), seconds=1e-9
    )
    (products,) = measure_kernels(settings, describe_machine(), limits)
    assert [list(each.timings) for each in products] == [["streamed", "library"], ["library"]]
    assert [(each.nbytes, each.operations) for each in products] == [(48 * 64, 2 * 48 * 64), (48 * 64, 280 * 48 * 64)]
