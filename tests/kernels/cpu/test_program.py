"""Models are recorded, their operations are fused and share buffers, and the program computes the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from chairlift.base.step_batch import StepBatch
from chairlift.errors import InvariantError
from chairlift.kernels import ops
from chairlift.kernels.cpu import library as lib
from chairlift.kernels.cpu.fused_op import OpKind
from chairlift.kernels.cpu.lowering import lower
from chairlift.kernels.cpu.placing import LoweringPlan
from chairlift.kernels.cpu.program import StepProgram
from chairlift.kernels.recording import Recorder, Value, expect, operation
from chairlift.kernels.weights import NATIVE, ONEDNN
from chairlift.models.layers.linear import Linear
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from tests.kernels.cpu.models import FAMILIES, tiny_model
from tests.native import needs_kernels

pytestmark = needs_kernels

LAYER = ["RMS_NORM", "QKV", "ATTENTION", "LINEAR", "RMS_NORM", "LINEAR_SILU", "LINEAR"]


def native_linear(n: int, k: int, *, bias: bool = False, interleaved: bool = False, seed: int = 0) -> Linear:
    """A float32 layer in two formats: its own for tensors, and ``native`` for recordings."""
    generator = torch.Generator().manual_seed(seed)
    layer = Linear(k, n, bias=bias, interleaved=interleaved).requires_grad_(False)
    layer.weight.copy_(torch.randn(n, k, generator=generator) * k**-0.5)
    if layer.bias is not None:
        layer.bias.copy_(torch.randn(n, generator=generator))
    [layer.native] = NATIVE.empty([layer.shape], torch.float32, torch.device("cpu"))
    NATIVE.write(layer.native, 0, layer.weight, mapped=False)
    NATIVE.finish(layer.native, layer.bias)
    return layer


def product(layer: Linear, x: Any) -> Any:
    return ops.native_linear(x, layer.native) if isinstance(x, Value) else layer(x)


def kinds(plan: LoweringPlan) -> list[str]:
    return [op.kind.name for op in plan.ops]


def arrays(token_ids: list[int]) -> StepBatch:
    """A step without attention."""
    count = len(token_ids)
    spans = [np.array(values, dtype=np.int32) for values in (token_ids, range(count), [0, count], [count])]
    return StepBatch(*spans, np.zeros((0, 1, 0), dtype=np.int32), np.zeros((0, count), dtype=np.int64))


def compiled(recorder: Recorder, output: Value, max_tokens: int = 64) -> StepProgram:
    return StepProgram(
        recorder, output, [], lib.ThreadPool(2, pin=False), isa=lib.supported_isas()[-1], max_tokens=max_tokens
    )


# -- what models become ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_family_is_seven_operations_per_layer_and_calls_nothing(family: str, dtype: str, tmp_path: Path) -> None:
    model_dir = tiny_model(tmp_path, family, dtype=dtype)
    model = load_model(model_dir, read_config(model_dir), dtype, weight_format=NATIVE)
    recorder = Recorder(torch.float32 if dtype == "float32" else torch.bfloat16)
    hidden: Any = model(recorder.token_ids, recorder.positions, recorder)
    plan = lower(recorder.nodes, hidden)
    assert kinds(plan) == ["EMBED", "ROTARY", *3 * LAYER, "RMS_NORM"]
    qkv, attention = plan.ops[3], plan.ops[4]
    assert (qkv.rotary, qkv.q_norm is not None) == (plan.ops[1].out, family == "qwen3")
    assert attention.fields["window"] == (24 if family == "mistral" else 0)
    assert [op.fields["layer"] for op in plan.ops if op.kind == OpKind.ATTENTION] == [0, 1, 2]
    assert plan.ops[0].fields["flags"] == (family == "qwen2")
    # The residual stream is updated where it lies; norm, q, attention and the gated product have a buffer each.
    assert len(plan.widths) == 5
    residual = plan.buffer_of[plan.ops[0].out]
    assert {plan.buffer_of[op.out] for op in plan.ops if op.kind == OpKind.LINEAR} == {residual}


def test_a_layer_that_is_not_packed_is_called(tmp_path: Path) -> None:
    model_dir = tiny_model(tmp_path, "llama")
    model = load_model(model_dir, read_config(model_dir), "float32", weight_format=ONEDNN)
    recorder = Recorder(torch.float32)
    hidden: Any = model(recorder.token_ids, recorder.positions, recorder)
    called = ["RMS_NORM", "CALL", "HEADS", "ATTENTION", "CALL", "ADD", "RMS_NORM", "CALL", "CALL", "CALL", "ADD"]
    assert kinds(lower(recorder.nodes, hidden)) == ["EMBED", "ROTARY", *3 * called, "RMS_NORM"]


# -- fusing ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorder() -> Recorder:
    return Recorder(torch.float32)


def embedded(recorder: Recorder, width: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    return ops.embedding(recorder.token_ids, torch.randn(50, width, generator=generator))  # type: ignore[arg-type]


def test_a_sum_takes_the_product_on_either_side(recorder: Recorder) -> None:
    layer = native_linear(32, 32)
    x = embedded(recorder, 32)
    y = x + product(layer, x)
    z = product(layer, y) + y
    assert kinds(lower(recorder.nodes, z)) == ["EMBED", "LINEAR", "LINEAR"]


def test_a_sum_of_a_product_and_what_it_reads_is_not_written_where_that_lies(recorder: Recorder) -> None:
    layer, table = native_linear(256, 256), torch.randn(50, 256, generator=torch.Generator().manual_seed(1))
    x = embedded(recorder, 256)
    program = compiled(recorder, product(layer, x) + x)
    rows = table[:48]
    torch.testing.assert_close(program.run(arrays([*range(48)])), product(layer, rows) + rows, rtol=1e-4, atol=1e-4)


def test_a_sum_of_two_products_takes_one(recorder: Recorder) -> None:
    x = embedded(recorder, 32)
    y = product(native_linear(32, 32), x) + product(native_linear(32, 32), x)
    assert kinds(lower(recorder.nodes, y)) == ["EMBED", "LINEAR", "LINEAR"]


def test_a_product_with_two_readers_is_not_fused_away(recorder: Recorder) -> None:
    x = embedded(recorder, 32)
    y = product(native_linear(32, 32), x)
    z = x + y
    assert kinds(lower(recorder.nodes, z + y)) == ["EMBED", "LINEAR", "ADD", "ADD"]
    twice = Recorder(torch.float32)
    x = embedded(twice, 32)
    y = product(native_linear(32, 32), x)
    assert kinds(lower(twice.nodes, y + y)) == ["EMBED", "LINEAR", "ADD"]


def test_an_output_is_not_fused_away(recorder: Recorder) -> None:
    x = embedded(recorder, 32)
    y = product(native_linear(32, 32), x)
    _ = x + y
    assert kinds(lower(recorder.nodes, y)) == ["EMBED", "LINEAR", "ADD"]


def test_a_residual_that_is_read_again_is_not_overwritten(recorder: Recorder) -> None:
    layer = native_linear(32, 32)
    x = embedded(recorder, 32)
    y = x + product(layer, x)  # reads x as input and as residual, so it may not write there
    z = y + product(layer, x)  # y is read for the last time
    plan = lower(recorder.nodes, z)
    assert plan.buffer_of[y] != plan.buffer_of[x]
    assert plan.buffer_of[z] == plan.buffer_of[y]


def test_a_gated_product_must_pair_its_rows(recorder: Recorder) -> None:
    x = embedded(recorder, 32)
    paired = ops.silu_and_mul(product(native_linear(80, 32, interleaved=True), x))
    plain = ops.silu_and_mul(product(native_linear(80, 32), x))
    assert kinds(lower(recorder.nodes, paired + plain)) == ["EMBED", "LINEAR_SILU", "LINEAR", "CALL", "ADD"]
    other = Recorder(torch.float32)
    misused = product(native_linear(64, 32, interleaved=True), embedded(other, 32))
    with pytest.raises(InvariantError, match=r"only be read by ops\.silu_and_mul"):
        lower(other.nodes, misused)


def test_an_operation_without_a_kernel_is_called_and_named(recorder: Recorder) -> None:
    @operation(lambda x, power: expect(x) // 2)
    def halved(x: Tensor, power: int) -> Tensor:
        return x[:, : x.shape[1] // 2] ** power

    def network(ids: Any, table: Tensor) -> Any:
        x: Any = ops.embedding(ids, table)
        return halved(x, 3) + halved(x, power=2)

    table = torch.randn(50, 32, generator=torch.Generator().manual_seed(1))
    program = compiled(recorder, network(recorder.token_ids, table))
    assert kinds(program.plan) == ["EMBED", "CALL", "CALL", "ADD"] and program.plan.calls == ["halved"]
    torch.testing.assert_close(program.run(arrays([4, 9])), network(torch.tensor([4, 9]), table))
    with pytest.raises(TypeError, match="halved: expected rows of this recording"):
        halved(embedded(Recorder(torch.float32), 32), embedded(recorder, 32))


# -- what cannot be recorded -------------------------------------------------------------------------------------------


def test_operations_that_cannot_be_recorded_are_refused_with_call_out(recorder: Recorder) -> None:
    x = embedded(recorder, 32)
    with pytest.raises(TypeError, match=r"torch's tanh cannot be recorded.*ops\.call_out"):
        torch.tanh(x)
    arithmetic: Any = x
    for compute in (lambda: arithmetic * 0.5, lambda: 1 - arithmetic, lambda: arithmetic + 1.0, lambda: -arithmetic):
        with pytest.raises(TypeError, match=r"arithmetic cannot be recorded.*ops\.call_out"):
            compute()
    with pytest.raises(AttributeError, match=r"'view'.*ops\.call_out"):
        x.view(-1)
    with pytest.raises(ValueError, match="rows of 32, got rows of 16"):
        x + embedded(recorder, 16)
    with pytest.raises(TypeError, match="expected rows"):
        x + embedded(Recorder(torch.float32), 32)
    with pytest.raises(TypeError, match=r"ops\.rotary_heads"):
        recorder.attend(0, x, x, x, scale=1.0, window=None)


def test_packed_layers_are_for_programs() -> None:
    layer = native_linear(32, 32)
    layer.take(NATIVE, layer.native)
    with pytest.raises(InvariantError, match="step program"):
        layer(torch.zeros(1, 32))


# -- running -----------------------------------------------------------------------------------------------------------


class Network:
    """A random straight-line program over activations of three widths; the same for tensors and for symbols."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        rng = random.Random(seed)
        self.widths = [rng.randrange(1, 100) for _ in range(3)]
        self.tables = [torch.randn(50, width, generator=torch.Generator().manual_seed(width)) for width in self.widths]
        self.layers = {
            (n, k): native_linear(n, k, bias=(n + k) % 2 == 0, seed=seed) for n in self.widths for k in self.widths
        }
        self.gates = {
            (n, k): native_linear(2 * n, k, bias=n % 2 == 0, interleaved=True, seed=seed)
            for n in self.widths
            for k in self.widths
        }
        self.norms = {width: torch.rand(width) + 0.5 for width in self.widths}

    def __call__(self, token_ids: Any) -> Any:
        rng = random.Random(self.seed)
        by_width = {
            width: [ops.embedding(token_ids, table)] for width, table in zip(self.widths, self.tables, strict=True)
        }

        def some(width: int) -> Any:
            return rng.choice(by_width[width][-4:])

        for _ in range(25):
            width, other = rng.choice(self.widths), rng.choice(self.widths)
            kind = rng.randrange(6)
            if kind == 0:
                new = some(width) + some(width)
            elif kind == 1:
                new = ops.rms_norm(some(width), self.norms[width], 1e-5)
            elif kind == 2:
                new = product(self.layers[width, other], some(other))
            elif kind == 3:
                new = some(width) + product(self.layers[width, other], some(other))
            elif kind == 4:
                new = ops.silu_and_mul(product(self.gates[width, other], some(other)))
            else:
                new = ops.call_out(wave, some(width), some(other), width=width)
            by_width[width].append(ops.rms_norm(new, self.norms[width], 1e-5))
        return some(self.widths[0])


def wave(a: Tensor, b: Tensor) -> Tensor:
    return a.sin() + b.mean(1, keepdim=True)


@pytest.mark.parametrize("seed", range(25))
def test_random_programs_compute_what_torch_computes(seed: int) -> None:
    network, rng = Network(seed), random.Random(seed)
    recorder = Recorder(torch.float32)
    program = compiled(recorder, network(recorder.token_ids))
    for count in (1, 64, 7):  # what an earlier step left behind must not matter
        token_ids = [rng.randrange(50) for _ in range(count)]
        expected = network(torch.tensor(token_ids))
        torch.testing.assert_close(program.run(arrays(token_ids)), expected, rtol=1e-4, atol=1e-4)


def test_token_ids_and_positions_may_be_called_with(recorder: Recorder) -> None:
    table = torch.randn(64, 8)
    x = embedded(recorder, 8)
    y: Any = ops.embedding(recorder.positions, table)  # type: ignore[arg-type]
    given = recorder.token_ids, recorder.positions
    z = ops.call_out(lambda ids, at: (ids + 100 * at)[:, None].expand(-1, 8).float(), *given, width=8)  # type: ignore[arg-type]
    program = compiled(recorder, x + y + z)
    out = program.run(arrays([4, 9]))
    generator = torch.Generator().manual_seed(1)
    words = torch.randn(50, 8, generator=generator)[[4, 9]]
    torch.testing.assert_close(out, words + table[:2] + torch.tensor([[4.0], [109.0]]))
    assert kinds(program.plan) == ["EMBED", "EMBED", "CALL", "ADD", "ADD"]


@pytest.mark.parametrize("activation", [ops.gelu, ops.gelu_tanh, ops.relu, ops.relu_squared], ids=lambda op: op.name)
def test_an_activation_is_part_of_the_product_before_it(activation: Any, recorder: Recorder) -> None:
    layer, table = native_linear(40, 32, bias=True), torch.randn(50, 32, generator=torch.Generator().manual_seed(1))
    x = embedded(recorder, 32)
    program = compiled(recorder, activation(product(layer, x)))
    assert kinds(program.plan) == ["EMBED", "LINEAR"]
    expected = activation(product(layer, table[[4, 9]]))
    torch.testing.assert_close(program.run(arrays([4, 9])), expected, rtol=1e-4, atol=1e-5)
    other = Recorder(torch.float32)
    y = product(layer, embedded(other, 32))
    assert kinds(lower(other.nodes, activation(y) + y)) == ["EMBED", "LINEAR", "CALL", "ADD"]


@pytest.mark.parametrize("width", [64, 40])
def test_inputs_and_several_outputs_keep_their_buffers(width: int, recorder: Recorder) -> None:
    """The blocks of Medusa heads. SiLU of a width that is no multiple of 16 is computed by torch."""
    layers = [native_linear(width, width, bias=True, seed=seed) for seed in range(4)]
    x = recorder.given(width)
    made = []
    for head in (layers[:2], layers[2:]):
        state: Any = x
        for layer in head:
            state = state + ops.silu(product(layer, state))
        made.append(state)
    program = StepProgram(
        recorder,
        made[1],
        [],
        lib.ThreadPool(2, pin=False),
        isa=lib.supported_isas()[-1],
        max_tokens=64,
        others=made[:1],
    )
    assert kinds(program.plan) == 4 * ["LINEAR", "CALL" if width == 40 else "GATED_NORM", "ADD"]
    rows = torch.randn(3, width, generator=torch.Generator().manual_seed(2)) * 3
    program.rows_of(x, 3)[:] = rows
    expected = []
    for head in (layers[:2], layers[2:]):
        state = rows
        for layer in head:
            state = state + torch.nn.functional.silu(product(layer, state))
        expected.append(state)
    program.run_until(made[0], arrays([4, 9, 1]))
    torch.testing.assert_close(program.rows_of(made[0], 3), expected[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(program.rows_of(made[1], 3), expected[1], rtol=0.1, atol=0.1)
    for _ in range(2):
        torch.testing.assert_close(program.run(arrays([4, 9, 1])), expected[1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(program.rows_of(made[0], 3), expected[0], rtol=1e-4, atol=1e-4)


def test_factors_are_part_of_the_embedding_or_of_the_sum(recorder: Recorder) -> None:
    layer, table = native_linear(32, 32), torch.randn(50, 32, generator=torch.Generator().manual_seed(1))
    x = ops.scale(embedded(recorder, 32), 3.0)
    y = x + ops.scale(product(layer, x), 0.5)
    program = compiled(recorder, ops.scale(y, 2.0))
    assert kinds(program.plan) == ["EMBED", "LINEAR", "SCALE"]
    rows = 3 * table[[4, 9]]
    expected = 2 * (rows + 0.5 * product(layer, rows))
    torch.testing.assert_close(program.run(arrays([4, 9])), expected, rtol=1e-4, atol=1e-4)
    other = Recorder(torch.float32)
    x = embedded(other, 32)
    twice = ops.scale(product(layer, x), 0.5)
    assert kinds(lower(other.nodes, (x + twice) + twice)) == ["EMBED", "LINEAR", "SCALE", "ADD", "ADD"]


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 32)], ids=["no bias", "bias"])
def test_layer_norm_runs_natively_and_reads_new_weights(bias: Tensor | None, recorder: Recorder) -> None:
    weight, table = torch.linspace(0.5, 1.5, 32), torch.randn(50, 32, generator=torch.Generator().manual_seed(1))
    program = compiled(recorder, ops.layer_norm(embedded(recorder, 32), weight, bias, 1e-5))
    assert kinds(program.plan) == ["EMBED", "LAYER_NORM"]
    for _ in range(2):
        expected = ops.layer_norm(table[[4, 9]], weight, bias, 1e-5)
        torch.testing.assert_close(program.run(arrays([4, 9])), expected, rtol=1e-5, atol=1e-5)
        weight += 1
        program.refresh()


def test_tokens_that_no_other_needs_are_left_out_behind_the_last_kv(recorder: Recorder) -> None:
    given: list[Tensor] = []
    x = embedded(recorder, 8)
    doubled: Any = ops.call_out(lambda rows: given.append(rows.clone()) or 2 * rows, x, width=8)  # type: ignore[arg-type,func-returns-value]
    program = compiled(recorder, product(native_linear(8, 8), doubled) + x)
    step = arrays([4, 9, 9, 30, 2])
    whole = program.run(step).clone()
    for kept in ([0, 1, 2, 3, 4], [2, 3, 4], [4]):
        assert torch.equal(program.run(step, np.array(kept, dtype=np.intp)), whole[kept])
        assert len(given[-1]) == len(kept)
    calls = len(given)
    assert program.run(step, np.array([], dtype=np.intp)).shape == (0, 8)
    assert len(given) == calls, "nobody wanted anything, and it was computed"


def test_tokens_are_left_out_of_an_output_that_is_done_before(recorder: Recorder) -> None:
    program = compiled(recorder, embedded(recorder, 8))
    whole = program.run(arrays([4, 9, 30])).clone()
    assert torch.equal(program.run(arrays([4, 9, 30]), np.array([1, 2], dtype=np.intp)), whole[1:])


class Watch(TorchDispatchMode):
    """Notes what torch is asked to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_torch_computes_nothing_in_a_step_without_functions(recorder: Recorder) -> None:
    """Its threads would spin on the cores of the pool's for milliseconds, and be more than were asked for."""
    x = embedded(recorder, 8)
    program, step = compiled(recorder, product(native_linear(8, 8), x) + x), arrays([4, 9, 9, 30, 2])
    with Watch() as watch:
        program.run(step)
        program.run(step, np.array([1, 3], dtype=np.intp))
    assert watch.names == {"slice"}


def test_a_function_that_returns_another_shape_is_an_error(recorder: Recorder) -> None:
    x = embedded(recorder, 8)
    program = compiled(recorder, ops.call_out(lambda rows: rows[:, :4], x, width=8))  # type: ignore[arg-type]
    with pytest.raises(InvariantError, match=r"returned \[2, 4\], but its definition says \[T, 8\]"):
        program.run(arrays([1, 2]))


@pytest.mark.parametrize("count", [0, 65])
def test_a_step_larger_than_agreed_is_refused(recorder: Recorder, count: int) -> None:
    program = compiled(recorder, embedded(recorder, 8))
    with pytest.raises(InvariantError, match=f"a step has {count} tokens, but this program allows 1 to 64"):
        program.run(arrays([1] * count))
