"""Recorded operations that a program computes together: fewer launches, and the same bits."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.kernels import ops, recording
from chairlift.kernels.fp8 import Fp8Weight
from chairlift.kernels.triton import program
from chairlift.kernels.triton.launch import attention_launch
from chairlift.kernels.triton.operations import OPERATIONS
from chairlift.kernels.triton.program import PagedKV, StepTensors, TritonProgram
from tests.kernels.triton.probes import needs_fp8, normal

VOCABULARY = 20
SHAPES = {"the sum of down is split": (16, 512), "the sum of gate and up is split": (512, 16)}
"""Widths of (hidden states, inner layer) for 132 multiprocessors."""


def embedded(recorder: recording.Recorder, weight: Tensor) -> Any:
    ids: Any = recorder.token_ids
    return ops.embedding(ids, weight)


class Network:
    """A feed-forward block with random weights."""

    def __init__(self, hidden: int, inner: int, dtype: torch.dtype, device: torch.device, fp8: bool) -> None:
        numbers = itertools.count()

        def tensor(*shape: int) -> Tensor:
            return normal(*shape, dtype=dtype, seed=next(numbers), device=device)

        def layer(rows: int, columns: int) -> dict[str, Any]:
            weight, bias = tensor(rows, columns) / columns**0.5, tensor(rows)
            if not fp8:
                return {"weight": weight, "bias": bias}
            rounded = Fp8Weight(rows, columns, device)
            rounded.pack_rows(weight)
            return {"weight": rounded, "bias": bias}

        self.linear = ops.fp8_linear if fp8 else ops.linear
        self.embedding = tensor(VOCABULARY, hidden)
        self.norms = tensor(hidden), tensor(hidden)
        self.up, self.down = layer(2 * inner, hidden), layer(hidden, inner)

    def __call__(self, recorder: recording.Recorder) -> Any:
        x: Any = embedded(recorder, self.embedding)
        normed = ops.rms_norm(x, self.norms[0], 1e-6)
        x = x + self.linear(ops.silu_and_mul(self.linear(normed, **self.up)), **self.down)
        return ops.rms_norm(x, self.norms[1], 1e-6)


def counted(function: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    def call(*args: Any, **how: Any) -> Any:
        calls[function.__name__] += 1
        return function(*args, **how)

    return call


def launches(
    monkeypatch: pytest.MonkeyPatch,
    model: Callable[[recording.Recorder], Any],
    device: torch.device,
    rows: int,
    *,
    step: tuple[Any, ...] = (),
    kv: PagedKV | None = None,
    **how: Any,
) -> tuple[list[Counter[str]], list[Tensor]]:
    """(functions of the program that were called, results), without fusions and with all of them."""
    counts, results = [], []
    ids = torch.arange(rows, dtype=torch.int32, device=device) % VOCABULARY
    for fusions in (frozenset[str](), program.FUSIONS):
        called = Counter[str]()
        with monkeypatch.context() as patch:
            for name in ("add_rms_norm", "linear_parts", "linear_small", "scaled_linear", "silu_and_mul"):
                patch.setattr(program, name, counted(getattr(program, name), called))
            patch.setattr(program, "FUSIONS", fusions)
            recorder = recording.Recorder(torch.float32)
            output = model(recorder)
            fused = TritonProgram(recorder.nodes, output, kv or PagedKV([], []), device, 132, **how)
            results.append(fused.run({recorder.token_ids: ids}, *step))
        counts.append(called)
    return counts, results


def test_the_list_of_operations_is_that_of_the_kernels() -> None:
    """The list is for reports on machines without Triton."""
    assert program._KERNELS.keys() == OPERATIONS


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("how", [{}, {"batch_invariant": True}], ids=["plain", "batch_invariant"])
@pytest.mark.parametrize("shape", SHAPES)
def test_fusions_change_no_bit(
    shape: str, how: dict[str, Any], rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Network(*SHAPES[shape], torch.bfloat16, device, fp8=False)
    (plain, fused), (expected, result) = launches(monkeypatch, model, device, rows, **how)
    assert plain == Counter(linear_small=2, silu_and_mul=1)
    parts = 1 if shape == "the sum of down is split" and not how else 0
    # A sum that is split has a second launch inside linear_small. SwiGLU is a part of a matmul in tiles of 64 rows.
    swiglu = 1 if rows <= 16 and not how else 0
    expected_calls = Counter(linear_small=2 - parts, add_rms_norm=1)
    assert fused == expected_calls + Counter(linear_parts=parts, silu_and_mul=swiglu)
    assert torch.equal(result, expected)


@needs_fp8
def test_fusions_change_no_bit_in_fp8(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Network(16, 512, torch.bfloat16, device, fp8=True)
    (_, fused), (expected, result) = launches(monkeypatch, model, device, 20)
    assert fused == Counter(linear_small=1, linear_parts=1, add_rms_norm=1)
    assert torch.equal(result, expected)


def test_with_many_rows_the_library_computes_and_swiglu_follows(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "SMALL_ROWS", 2)
    model = Network(16, 512, torch.float32, device, fp8=False)
    (_, fused), (expected, result) = launches(monkeypatch, model, device, 3)
    assert fused == Counter(silu_and_mul=1, add_rms_norm=1)
    assert torch.equal(result, expected)


def test_heads_add_the_parts_of_the_layer_before_them(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = torch.bfloat16
    embedding, weight = (normal(n, 512, dtype=dtype, seed=n, device=device) / 16 for n in (VOCABULARY, 4 * 16))
    bias = normal(4 * 16, dtype=dtype, seed=1, device=device)
    caches = [torch.zeros((1, 4, 1, 16), dtype=dtype, device=device) for _ in "kv"]

    def model(recorder: recording.Recorder) -> Any:
        x = embedded(recorder, embedding)
        heads: Any = ops.rotary_heads(ops.linear(x, weight, bias), None, 2, 1, 16)
        return recorder.attend(0, *heads, scale=0.25, window=None)

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    step = StepTensors(ints(), ints(), ints(3), ints(0, 3), ints(0), [ints(0)[None]], [ints(0, 1, 2).long()])
    launch = attention_launch(
        head_dim=16, group=2, num_kv_heads=1, max_rows=1, decode_only=False, num_multiprocessors=132
    )
    kv = PagedKV([(caches[0], caches[1])], [0])
    (plain, fused), (expected, result) = launches(monkeypatch, model, device, 3, step=(step, launch), kv=kv)
    assert plain == Counter(linear_small=1) and fused == Counter(linear_parts=1)
    assert torch.equal(result, expected) and result.isfinite().all() and result.count_nonzero() > 0


@pytest.mark.parametrize("rows", [3, 20])
def test_swiglu_with_a_factor_is_its_definition(
    rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedding, weight = (normal(n, 16, dtype=torch.float32, seed=n, device=device) for n in (VOCABULARY, 64))

    def model(recorder: recording.Recorder) -> Any:
        return ops.silu_and_mul(ops.linear(embedded(recorder, embedding), weight, None), 0.5)

    counts, results = launches(monkeypatch, model, device, rows)
    assert counts == [Counter(linear_small=1, silu_and_mul=1)] * 2
    for result in results:
        torch.testing.assert_close(result, ops.silu_and_mul(embedding[:rows] @ weight.T, 0.5), rtol=1e-4, atol=1e-4)


def test_outputs_that_another_operation_reads_are_not_fused(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs of a layer that are also read later, or in the other order."""
    weight = normal(64, 64, dtype=torch.float32, seed=1, device=device) / 8
    embedding, ones = normal(VOCABULARY, 64, dtype=torch.float32, seed=2, device=device), torch.ones(64, device=device)

    def model(recorder: recording.Recorder) -> Any:
        x: Any = embedded(recorder, embedding)
        first = ops.linear(x, weight, None)
        gated = ops.linear(ops.silu_and_mul(first), weight[:, :32].contiguous(), None)
        second = ops.linear(gated, weight, None)
        total = second + x  # the layer's outputs come first
        third = ops.linear(ops.rms_norm(total, ones, 1e-6), weight, None)
        total = total + third
        return ops.rms_norm(total, ones, 1e-6) + first + third

    (plain, fused), (expected, result) = launches(monkeypatch, model, device, 3)
    assert fused == plain + Counter(add_rms_norm=1)  # into the second sum; its layer is read once more
    assert torch.equal(result, expected)
