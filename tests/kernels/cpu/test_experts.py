"""The native layer of experts computes what its definition does, and a row's bits depend on that row alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.kernels import ops
from chairlift.kernels.cpu import library as lib
from chairlift.kernels.cpu.fused_op import OpKind
from chairlift.kernels.cpu.program import StepProgram
from chairlift.kernels.experts import route
from chairlift.kernels.grouped import GroupKind
from chairlift.kernels.recording import Recorder
from chairlift.kernels.weights import NATIVE, MatrixShape, Native
from tests.kernels.cpu.one_op import equal_bits
from tests.kernels.cpu.test_program import arrays
from tests.kernels.expert_layers import ExpertLayer, by_hand, random_layer
from tests.native import needs_kernels

pytestmark = needs_kernels

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.02}


class Program:
    """A layer as a step program over rows of ``table`` [N, D], with shared rows of another table."""

    def __init__(
        self, layer: ExpertLayer, table: Tensor, shared: Tensor | None, *,
        isa: str, threads: int = 2, weight_format: Native = NATIVE, max_tokens: int = 700,
    ):  # fmt: skip
        count, dtype = layer.routing.num_experts, table.dtype
        shapes = [
            MatrixShape(*layer.gate_up.shape, layer.gated, stack=count),
            MatrixShape(*layer.down.shape, stack=count),
        ]
        self.weights = weight_format.empty(shapes, dtype, torch.device("cpu"))
        biases = layer.biases or (None, None)
        for weight, rows, bias in zip(self.weights, (layer.gate_up, layer.down), biases, strict=True):
            # In pieces that end anywhere.
            for first in range(0, len(rows), 37):
                weight_format.write(weight, first, rows[first : first + 37], mapped=False)
            weight_format.finish(weight, bias)
        recorder: Any = Recorder(dtype)
        x, more = (None if each is None else ops.embedding(recorder.token_ids, each) for each in (table, shared))
        out: Any = ops.experts(x, more, *self.weights, *layer.rest)  # type: ignore[arg-type]
        self.program = StepProgram(
            recorder, out, [], lib.ThreadPool(threads, pin=False), isa=isa, max_tokens=max_tokens
        )

    def __call__(self, rows: list[int]) -> Tensor:
        return self.program.run(arrays(rows)).clone()


@pytest.mark.parametrize("isa", lib.supported_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(10))
def test_experts_are_near_their_definition(seed: int, dtype: torch.dtype, isa: str) -> None:
    rng = random.Random(seed)
    clamp, gated = rng.choice((None, (1.702, 1.5))), seed % 3 != 2
    layer = random_layer(rng, dtype, biased=rng.random() < 0.5, clamp=clamp if gated else None, gated=gated)
    count = rng.choice((1, 2, 7, 40, 600))
    x, shared = layer.rows(rng, count)
    program = Program(layer, x, shared, isa=isa, threads=rng.randint(1, 3))
    assert [op.kind for op in program.program.plan.ops][-1] == OpKind.EXPERTS
    found, expected = program([*range(count)]), by_hand(layer, x, shared)
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[dtype]
    assert (found.float() - layer(x, shared).float()).abs().max() < 2 * TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("isa", lib.supported_isas())
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_router_may_read_other_rows(dtype: torch.dtype, isa: str) -> None:
    """Rows of as many columns as the experts', of more, and of fewer."""
    rng = random.Random(4)
    for width in (50, 96, 17):
        layer = random_layer(rng, dtype, hidden=50, inner=40, num_experts=6, top_k=3, shared=False, gated=False)
        layer.correction = layer.shared_gate = None
        x, _ = layer.rows(rng, 40)
        layer.router = (torch.randn(6, width, generator=torch.Generator().manual_seed(width)) * 0.3).to(dtype)
        routed = torch.randn(40, width, generator=torch.Generator().manual_seed(1)).to(dtype)
        shapes = [MatrixShape(*layer.gate_up.shape, stack=6), MatrixShape(*layer.down.shape, stack=6)]
        weights = NATIVE.empty(shapes, dtype, torch.device("cpu"))
        for weight, rows in zip(weights, (layer.gate_up, layer.down), strict=True):
            NATIVE.write(weight, 0, rows, mapped=False)
            NATIVE.finish(weight, None)
        recorder: Any = Recorder(dtype)
        given = [ops.embedding(recorder.token_ids, each) for each in (x, routed)]
        rest = (layer.router, layer.routing, None, False)
        out: Any = ops.latent_experts(*given, *weights, *rest)
        program = StepProgram(recorder, out, [], lib.ThreadPool(2, pin=False), isa=isa, max_tokens=40)
        found = program.run(arrays([*range(40)])).clone()
        expected = ops.latent_experts(x, routed, layer.gate_up, layer.down, *rest)
        assert (found.float() - expected.float()).abs().max() < 2 * TOLERANCE[dtype] * expected.float().abs().max()


@pytest.mark.parametrize("isa", lib.supported_isas())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("codes", [None, GroupKind(8, 32), GroupKind(4, 32), GroupKind(4, 32, e2m1=True)])
def test_bits_depend_on_the_row_alone(codes: GroupKind | None, dtype: torch.dtype, isa: str) -> None:
    """The number of other rows, their order, their contents and the number of threads change no bit."""
    rng = random.Random(1)
    fields: dict[str, Any] = {"biased": True, "clamp": (1.702, 2.0)} if codes is not None and codes.e2m1 else {}
    layer = random_layer(rng, dtype, hidden=96, inner=70, num_experts=6, top_k=3, shared=True, **fields)
    x, shared = layer.rows(rng, 640)
    programs = [Program(layer, x, shared, isa=isa, threads=n, weight_format=Native(codes)) for n in (1, 3)]
    together = programs[0]([*range(640)])
    assert equal_bits(programs[1]([*range(640)]), together)
    order = rng.sample(range(640), 640)
    assert equal_bits(programs[1](order), together[order])
    for rows in ([3], [639], [511, 512], rng.sample(range(640), 17), [5] * 40):
        for program in programs:
            assert equal_bits(program(rows), together[rows])


@pytest.mark.parametrize("kind", [GroupKind(8, 32), GroupKind(4, 32), GroupKind(4, 32, e2m1=True)])
def test_experts_in_codes_are_those_codes(kind: GroupKind) -> None:
    rng = random.Random(2)
    layer = random_layer(rng, torch.float32, hidden=64, inner=96, num_experts=5, top_k=2, shared=False)
    x, _ = layer.rows(rng, 50)
    program = Program(layer, x, None, isa=lib.supported_isas()[-1], weight_format=Native(kind))
    layer.gate_up, layer.down = (weight.unpack() for weight in program.weights)
    expected = by_hand(layer, x, None)
    error = (program([*range(50)]).double() - expected).abs().max() / expected.abs().max()
    assert error < 0.03  # rows are rounded to 8 bits too


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_tokens_may_go_to_one_expert(dtype: torch.dtype) -> None:
    rng = random.Random(3)
    layer = random_layer(rng, dtype, num_experts=4, top_k=1, shared=False)
    x, _ = layer.rows(rng, 600)
    x[:, 0] = 1.0
    layer.router.zero_()
    layer.router[2, 0] = 5.0
    for weight in (layer.gate_up, layer.down):  # those of the others are never read
        weight[: len(weight) // 2] = weight[3 * len(weight) // 4 :] = float("nan")
    found, expected = Program(layer, x, None, isa=lib.supported_isas()[-1])([*range(600)]), by_hand(layer, x, None)
    assert (found.double() - expected).abs().max() < TOLERANCE[dtype] * expected.abs().max()


def test_equal_scores_go_to_the_lower_number() -> None:
    """As in the definition: routers with equal rows, and groups of such."""
    for seed, groups in enumerate((1, 3) * 4):
        rng = random.Random(seed)
        fields = {"groups": groups, "kept_groups": min(2, groups), "num_experts": 12, "top_k": 3}
        layer = random_layer(rng, torch.float32, shared=False, **fields)
        for expert in range(12):
            layer.router[expert] = layer.router[expert % rng.randint(1, 4)]
        layer.correction = None if layer.correction is None else torch.zeros(12)
        x, _ = layer.rows(rng, 30)
        found, expected = Program(layer, x, None, isa=lib.supported_isas()[-1])([*range(30)]), layer(x, None)
        assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_broken_row_breaks_no_other() -> None:
    rng = random.Random(4)
    layer = random_layer(rng, torch.float32, num_experts=5, top_k=2, shared=False)
    x, _ = layer.rows(rng, 20)
    sound = Program(layer, x, None, isa=lib.supported_isas()[-1])([*range(20)])
    x[7] = float("nan")
    program = Program(layer, x, None, isa=lib.supported_isas()[-1])
    broken, rest = program([*range(20)]), [row for row in range(20) if row != 7]
    assert broken[7].isnan().all()
    assert equal_bits(broken[rest], sound[rest])
    assert equal_bits(program(rest), sound[rest])


def test_new_weights_are_used() -> None:
    rng = random.Random(5)
    layer = random_layer(rng, torch.bfloat16, hidden=40, num_experts=4, top_k=2, shared=True)
    x, shared = layer.rows(rng, 12)
    program = Program(layer, x, shared, isa=lib.supported_isas()[-1])
    program([*range(12)])
    other = random_layer(rng, torch.bfloat16, hidden=40, inner=layer.inner, num_experts=4, top_k=2, shared=True)
    layer.router.copy_(other.router)
    program.program.refresh()
    expected = by_hand(layer, x, shared)
    assert (program([*range(12)]).double() - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_stack_is_its_weights_one_after_the_other(interleaved: bool) -> None:
    rows = torch.randn(3 * 50, 40, generator=torch.Generator().manual_seed(1))
    shape = MatrixShape(150, 40, interleaved, stack=3)
    (stack,) = NATIVE.empty([shape], torch.float32, torch.device("cpu"))
    NATIVE.write(stack, 0, rows[:71], mapped=False)
    NATIVE.write(stack, 71, rows[71:], mapped=False)
    assert torch.equal(stack.unpack(), rows)
    each = NATIVE.empty([MatrixShape(50, 40, interleaved)] * 3, torch.float32, torch.device("cpu"))
    assert stack.memory.nbytes == sum(weight.memory.nbytes for weight in each) == NATIVE.nbytes(shape, torch.float32)
    for member, weight in enumerate(each):
        NATIVE.write(weight, 0, rows[50 * member : 50 * member + 50], mapped=False)
    whole = stack.memory.tensor(torch.uint8, (stack.memory.nbytes,))
    parts = [weight.memory.tensor(torch.uint8, (weight.memory.nbytes,)) for weight in each]
    assert torch.equal(whole, torch.cat(parts))
    with pytest.raises(ValueError, match="150 outputs make no stack of 4"):
        NATIVE.empty([MatrixShape(150, 40, stack=4)], torch.float32, torch.device("cpu"))


def test_the_kernel_counts_the_tokens_of_each_expert() -> None:
    """Over steps, and over the blocks in which the tokens of one step are routed."""
    rng = random.Random(5)
    layer = random_layer(rng, torch.float32, num_experts=7, top_k=2, shared=False, scoring="softmax")
    x, _ = layer.rows(rng, 700)
    program = Program(layer, x, None, isa=lib.supported_isas()[-1])
    counts, expected = program.program.expert_counts, torch.zeros(7, dtype=torch.int64)
    assert counts is not None
    for rows in ([*range(700)], [3], [5, 5, 9]):
        program(rows)
        chosen = route(x[rows] @ layer.router.T, layer.routing)[1]
        expected += chosen.flatten().bincount(minlength=7)
        assert counts.tolist() == [expected.tolist()]
