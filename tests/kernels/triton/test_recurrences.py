"""Recurrent layers in Triton against their definitions: rows in any slots, chunks of any length, any blocks."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import random
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.config import ONE_STATE
from chairlift.errors import InvariantError
from chairlift.kernels.cells import GRU
from chairlift.kernels.delta_rule import DeltaRule
from chairlift.kernels.mamba2 import Mamba2, Mamba2Shape
from chairlift.kernels.recurrent import Cell, plan_pieces, recur_packed, recur_paged
from chairlift.kernels.short_conv import ShortConv
from chairlift.kernels.triton import delta_rule, gated_norm, mamba2, recurrences, short_conv, states
from chairlift.kernels.triton.operations import CELLS
from chairlift.kernels.triton.recurrences import cell_launch
from chairlift.kernels.triton.states import StateRows
from tests.kernels.triton.probes import TOLERANCE, normal, seeds
from tests.sweep import sweep

NAN = float("nan")
Drawn = Callable[..., Tensor]


def conv(drawn: Drawn, channels: int, taps: int, *, bias: bool = False, **how: Any) -> ShortConv:
    return ShortConv(drawn(channels, 1, taps), drawn(channels) if bias else None, **how)


def delta(drawn: Drawn, keys: int, values: int, key_dim: int, value_dim: int, taps: int = 4) -> DeltaRule:
    weight = drawn(2 * keys * key_dim + values * value_dim, 1, taps)
    heads = (drawn(values, dtype=torch.float32) - 1, 3 * drawn(values, dtype=torch.float32))
    return DeltaRule(weight, *heads, 1 + drawn(value_dim) / 8, 1e-6, keys, values, key_dim, value_dim)


def mamba(drawn: Drawn, *, norm: bool = True, factors: bool = False, taps: int = 4, **sizes: Any) -> Mamba2:
    shape = Mamba2Shape(**sizes)
    ranges = ((shape.inner, 0.5), (shape.channels - shape.inner, 2.0)) if factors else ()
    mixing = conv(drawn, shape.channels, taps, bias=True, silu=True, factors=ranges)
    a_log, bias, skip = (drawn(shape.heads, dtype=torch.float32) - shift for shift in (1, 2, 0))
    return Mamba2(shape, mixing, a_log, bias, skip, 1 + drawn(shape.inner) / 8 if norm else None)


CASES: dict[str, Callable[[Drawn], Cell]] = {
    "gated convolution": lambda drawn: conv(drawn, 70, 3, gated=True),
    "convolution": lambda drawn: conv(drawn, 5, 4, bias=True, silu=True, factors=((2, 0.5), (3, 2.0))),
    "convolution of one token": lambda drawn: conv(drawn, 3, 1, gated=True, bias=True),
    "delta rule": lambda drawn: delta(drawn, 1, 2, 16, 32),
    "delta rule, two panels": lambda drawn: delta(drawn, 1, 1, 8, 64),
    "delta rule, odd sizes": lambda drawn: delta(drawn, 1, 2, 12, 20, taps=2),
    "Mamba-2": lambda drawn: mamba(
        drawn, heads=2, head_dim=16, state_size=8, groups=2, norm_groups=2, time_limit=(0.05, 1.5)
    ),
    "Mamba-2, norm first": lambda drawn: mamba(drawn, heads=1, head_dim=64, state_size=4, norm_first=True, taps=3),
    "Mamba-2, odd sizes": lambda drawn: mamba(
        drawn, heads=3, head_dim=6, state_size=7, norm=False, factors=True, gate_factor=0.4, step_factor=0.6
    ),
}
ONE_HEAD: dict[str, Callable[[Drawn], Cell]] = {
    "gated convolution": lambda drawn: conv(drawn, 70, 4, gated=True),
    "delta rule": lambda drawn: delta(drawn, 1, 1, 8, 16),
    "Mamba-2": lambda drawn: mamba(drawn, heads=1, head_dim=16, state_size=8),
}
"""Cells for tests with many tokens: the interpreter takes milliseconds for a token of a head."""


def make(case: Callable[[Drawn], Cell], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Cell:
    numbers = iter(range(1000 * seed, 1000 * seed + 1000))

    def drawn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return normal(*shape, dtype=dtype, seed=next(numbers), device=device)

    return case(drawn)


def inputs_of(cell: Cell, count: int, dtype: torch.dtype, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    """Random inputs of ``count`` tokens, as rows of a wider tensor."""
    if isinstance(cell, DeltaRule):
        widths = [cell.channels + cell.value_heads * cell.value_dim, 2 * cell.value_heads]
    elif isinstance(cell, Mamba2):
        widths = [cell.shape.columns]
    else:
        assert isinstance(cell, ShortConv)
        widths = [cell.channels * (3 if cell.gated else 1)]
    return tuple(
        normal(count, width + 3, dtype=dtype, seed=97 * seed + i, device=device)[:, :width]
        for i, width in enumerate(widths)
    )


def poisoned(cell: Cell, num_blocks: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """States of blocks that nobody has written yet."""
    return [torch.full((num_blocks, *part.shape), NAN, dtype=part.dtype or dtype, device=device) for part in cell.parts]


def check_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Equal within a fraction of the largest number; NaN at the same places."""
    largest = expected.nan_to_num().abs().max().item() if expected.numel() else 0.0
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=2 * TOLERANCE[dtype] * largest + 1e-30, equal_nan=True)


class Both:
    """Rows whose states the kernels and the definition keep, in the same blocks."""

    def __init__(self, cell: Cell, dtype: torch.dtype, device: torch.device, draw: random.Random, span: int) -> None:
        self.cell, self.dtype, self.device, self.draw, self.span = cell, dtype, device, draw, span
        self.launch = cell_launch(cell, device)
        self.slots, width = 5, 24
        num_blocks = 1 + self.slots * width
        blocks = draw.sample(range(1, num_blocks), num_blocks - 1)
        self.table = torch.tensor(blocks, dtype=torch.int32, device=device).view(self.slots, width)
        self.ours, self.plain = (poisoned(cell, num_blocks, dtype, device) for _ in range(2))
        self.lengths = dict.fromkeys(draw.sample(range(self.slots), 3), 0)

    def ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def step(self, counts: dict[int, int], padding: int, seed: int) -> None:
        """Compute ``counts`` tokens of slots, in this order, in a step that is padded with rows or with tokens."""
        offsets = [0]
        for slot, count in counts.items():
            self.lengths[slot] += count
            offsets.append(offsets[-1] + count)
        one_token = set(counts.values()) == {1}
        total = offsets[-1] + padding
        given = inputs_of(self.cell, total, self.dtype, self.device, seed)
        slots, lengths = list(counts), [self.lengths[slot] for slot in counts]
        pieces = plan_pieces(offsets, lengths, self.table[slots].tolist(), self.span)
        expected = recur_paged(self.cell, tuple(each[: offsets[-1]] for each in given), tuple(self.plain), pieces)
        starts = list(range(total + 1)) if one_token else [*offsets, *[offsets[-1]] * padding]
        at = (self.ints(starts), self.ints(lengths + [0] * padding), self.ints(slots + [-1] * padding))
        rows = StateRows(*at, self.table, self.span, one_token)
        found = self.launch(given, self.ours, rows)
        check_close(found[: offsets[-1]], expected, self.dtype)
        assert bool((found[offsets[-1] :] == 0).all())
        for ours, plain in zip(self.ours, self.plain, strict=True):
            check_close(ours, plain, self.dtype)

    def fork(self) -> None:
        """A new row begins with the newest whole snapshot of another one."""
        source = self.draw.choice(list(self.lengths))
        kept = self.lengths[source] // self.span
        free = [slot for slot in range(self.slots) if slot not in self.lengths]
        if kept and free:
            slot = self.draw.choice(free)
            self.table[slot, :kept] = self.table[source, :kept]
            self.lengths[slot] = kept * self.span


def check_world(case: str, seed: int, device: torch.device, steps: int = 5) -> None:
    draw = random.Random(seed)
    dtype = list(TOLERANCE)[seed % 3]
    both = Both(make(CASES[case], dtype, device, seed), dtype, device, draw, (4, ONE_STATE, 1, 2, 9)[seed % 5])
    for number in range(steps):
        both.fork()
        chosen = draw.sample(list(both.lengths), draw.randint(1, len(both.lengths)))
        most = draw.choice([1, 3, 3])
        both.step({slot: draw.randint(1, most) for slot in chosen}, draw.randint(0, 2), 50 * seed + number)


@pytest.mark.parametrize("count", seeds(2))
@pytest.mark.parametrize("case", CASES)
def test_steps_equal_their_definition(
    case: str, request: pytest.FixtureRequest, count: int, device: torch.device
) -> None:
    """Results, and the states of all blocks: snapshots too, and nothing else."""
    sweep(request, count, lambda seed: check_world(case, seed, device))


def run_pieces(
    cell: Cell, given: tuple[Tensor, ...], counts: Sequence[int], dtype: torch.dtype, beside: int = 0, span: int = 64
) -> tuple[Tensor, list[Tensor]]:
    """(result of one row that is computed in pieces, states of its blocks). ``beside``: number of rows before it in
    each step, with as many tokens."""
    device = given[0].device
    entries = -(-len(given[0]) // span)
    kept = poisoned(cell, (beside + 1) * entries, dtype, device)
    table = torch.arange((beside + 1) * entries, dtype=torch.int32, device=device).flip(0).view(beside + 1, entries)
    others = inputs_of(cell, max(counts) * beside, dtype, device, 5)
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    results = []
    launch = cell_launch(cell, device)
    for start, end in pairwise([0, *ends]):
        count = end - start
        step = tuple(torch.cat((a[: count * beside], b[start:end])) for a, b in zip(others, given, strict=True))
        numbers = (range(0, count * (beside + 2), count), [end] * (beside + 1), range(beside + 1))
        rows = [torch.tensor(list(each), dtype=torch.int32, device=device) for each in numbers]
        results.append(launch(step, kept, StateRows(rows[0], rows[1], rows[2], table, span, count == 1))[-count:])
    return torch.cat(results), [part[table[-1].tolist()] for part in kept]


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("case", ONE_HEAD)
def test_a_row_has_the_same_bits_however_it_is_cut_and_whoever_is_there(
    case: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Pieces of 1, 63, 64, 65 and 130 tokens, over snapshots every 64 tokens."""
    cell = make(ONE_HEAD[case], dtype, device)
    given = inputs_of(cell, 323, dtype, device, 1)
    expected, kept = run_pieces(cell, given, [323], dtype)
    check_close(expected, recur_packed(cell, given, [0, 323]), dtype)
    assert not any(bool(part.isnan().any()) for part in kept)
    found, after = run_pieces(cell, given, (1, 63, 64, 65, 130), dtype)
    assert torch.equal(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(after, kept, strict=True))
    given = tuple(each[:70] for each in given)
    found, after = run_pieces(cell, given, (1, 1, 1, 65, 2), dtype, beside=1)
    assert torch.equal(found, expected[:70])
    assert all(torch.equal(a[0], b[0]) for a, b in zip(after, kept, strict=True))


@pytest.mark.parametrize("case", ONE_HEAD)
def test_a_row_past_its_table_writes_nowhere(case: str, device: torch.device) -> None:
    """It has ended, but the host hears of it one step later."""
    cell = make(ONE_HEAD[case], torch.float32, device)
    kept = poisoned(cell, 6, torch.float32, device)
    table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32, device=device)
    ints = [torch.tensor(values, dtype=torch.int32, device=device) for values in ([0, 1, 2], [9, 8], [0, 1])]
    given = inputs_of(cell, 2, torch.float32, device, 1)
    cell_launch(cell, device)(given, kept, StateRows(ints[0], ints[1], ints[2], table, 4, True))
    # The other row's new state has at least its new inputs; the rest comes from NaN.
    assert [block for block in range(6) if not all(bool(part[block].isnan().all()) for part in kept)] == [4]


@pytest.mark.parametrize("case", CASES)
def test_no_rows_give_empty_results(case: str, device: torch.device) -> None:
    cell = make(CASES[case], torch.float32, device)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    rows = StateRows(none, none[:0], none[:0], none[None], 4, True)
    given = inputs_of(cell, 0, torch.float32, device, 1)
    out = cell_launch(cell, device)(given, poisoned(cell, 1, torch.float32, device), rows)
    assert out.shape == (0, cell.width(*(each.shape[1] for each in given)))


def test_the_list_of_cells_is_that_of_the_kernels(device: torch.device) -> None:
    """The list is for reports on machines without Triton."""
    assert recurrences._LAUNCHES.keys() == CELLS
    with pytest.raises(InvariantError, match="no Triton kernels for the recurrent cell GRU"):
        cell_launch(GRU(torch.zeros((3, 1)), None), device)


def test_steps_of_small_inputs_are_exact(device: torch.device) -> None:
    """Softplus of -10 to -30, where 1 + exp(x) rounds to few bits: a state that takes up little forgets nothing."""
    cell = make(CASES["Mamba-2"], torch.float32, device)
    assert isinstance(cell, Mamba2)
    shape = dataclasses.replace(cell.shape, time_limit=(0.0, float("inf")))
    for bias in (-10.0, -30.0):
        exact = dataclasses.replace(cell, shape=shape, dt_bias=torch.full((2,), bias, device=device), norm=None)
        given = inputs_of(exact, 3, torch.float32, device, 2)
        _, kept = run_pieces(exact, given, [3], torch.float32)
        zeros = tuple(torch.zeros((1, *part.shape), dtype=torch.float64, device=device) for part in exact.parts)
        _, after = exact.scan(tuple(each[None] for each in given), (zeros[0].float(), zeros[1].float()))
        torch.testing.assert_close(kept[1], after[1], rtol=0, atol=2e-6 * after[1].abs().max().item())


MODULES = (states, short_conv, delta_rule, mamba2, gated_norm, recurrences)
FAULTS: dict[str, tuple[ModuleType, str, str, str]] = {
    "a new row reads an old state": (states, "gated convolution", "wanted & (position >= 0)", "wanted"),
    "padding rows compute": (short_conv, "convolution", "(at + t < count)", "(at + t < places)"),
    "padding rows have no results": (states, "delta rule", "range(count, places)", "range(0, 0)"),
    "heads share a panel": (states, "Mamba-2", "num_programs(1) + tl.program_id(1)", "num_programs(1)"),
    "softplus is coarse": (states, "Mamba-2", "2.0 * s * (1.0 + q * p)", "2.0 * s"),
    "states of other slots": (states, "delta rule", "tl.load(table_rows_ptr + row)", "tl.minimum(row, 4)"),
    "a window begins too early": (short_conv, "gated convolution", "end - (TAPS - 1) + j", "end - TAPS + j"),
    "a convolution keeps the newest state only": (short_conv, "convolution", "newest - oldest + 1, 0", "1, 0"),
    "the oldest state is stored first": (
        *(short_conv, "convolution", "entry = newest - back"),
        "entry = newest - tl.where(back == 0, newest - oldest, back - 1)",
    ),
    "the first inputs are zeros": (short_conv, "delta rule", "(i < 0) & (i * 0 + before >= 0)", "(i < 0) & (i > 0)"),
    "b is the gate": (short_conv, "gated convolution", "(CHANNELS + c)", "(0 * CHANNELS + c)"),
    "factors are left out": (short_conv, "convolution", "factors_ptr is not None", "False"),
    "nothing decays": (delta_rule, "delta rule", "memory = memory * decay", "decay = decay"),
    "keys keep their length": (delta_rule, "delta rule", "k = _unit(tl", "k = (lambda x, eps: x)(tl"),
    "a value head has its own key": (delta_rule, "delta rule", "// (VALUE_HEADS // KEY_HEADS)", "// KEY_HEADS"),
    "the state is read before the change": (
        *(delta_rule, "delta rule", "        read = tl.sum(memory * q[:, None], axis=0)"),
        "        read = tl.sum((memory - k[:, None] * change[None, :]) * q[:, None], axis=0)",
    ),
    "a delta rule keeps the newest state only": (
        *(delta_rule, "delta rule", "(t + 1 == count) | ((first + t + 1) % SPAN == 0)"),
        "t + 1 == count",
    ),
    "Mamba-2 keeps the newest state only": (
        *(mamba2, "Mamba-2", "(t + 1 == count) | ((first + t + 1) % SPAN == 0)"),
        "t + 1 == count",
    ),
    "steps have no least": (mamba2, "Mamba-2", "tl.maximum(step, least_step)", "step"),
    "x is not skipped": (mamba2, "Mamba-2", " + skip * x", ""),
    "heads share the first group": (mamba2, "Mamba-2", "head // (HEADS // GROUPS)", "0 * head"),
    "a step has no factor": (mamba2, "Mamba-2, odd sizes", "given * STEP_FACTOR", "given"),
    "all groups have the first weights": (gated_norm, "Mamba-2", "at % WEIGHTS", "i"),
    "the gate comes first": (gated_norm, "Mamba-2, norm first", "if not NORM_FIRST", "if NORM_FIRST"),
    "gates have no factor": (gated_norm, "Mamba-2, odd sizes", ".to(tl.float32) * FACTOR", ".to(tl.float32)"),
}


@pytest.fixture
def plant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType, str, str], None]:
    """Function that replaces a module of the kernels by a copy with one text replaced by another."""

    def change(module: ModuleType, old: str, new: str) -> None:
        source = inspect.getsource(module)
        assert old in source, old
        path = tmp_path / "mutated_kernels.py"
        path.write_text(source.replace(old, new))
        spec = importlib.util.spec_from_file_location("mutated_kernels", path)
        assert spec is not None and spec.loader is not None
        copy = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "mutated_kernels", copy)  # dataclasses look there
        spec.loader.exec_module(copy)
        for user in MODULES:
            for name in module.__all__:
                if user is not module and getattr(user, name, None) is getattr(module, name):
                    monkeypatch.setattr(user, name, getattr(copy, name))

    return change


@pytest.mark.planted("test_steps_equal_their_definition")
@pytest.mark.skipif(torch.cuda.is_available(), reason="only interpreted kernels can be replaced")
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(
    fault: str,
    plant: Callable[[ModuleType, str, str], None],
    request: pytest.FixtureRequest,
    device: torch.device,
) -> None:
    module, case, *texts = FAULTS[fault]
    plant(module, *texts)
    with pytest.raises(AssertionError):
        sweep(request, 8, lambda seed: check_world(case, seed, device))
