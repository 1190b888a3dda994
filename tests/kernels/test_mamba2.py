"""The Mamba-2 cell computes what one loop over tokens, heads and channels does, however the tokens are cut."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from chairlift.kernels.mamba2 import BLOCK, Mamba2, Mamba2Shape
from chairlift.kernels.recurrent import recur_packed
from chairlift.kernels.short_conv import ShortConv

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"heads": 4, "head_dim": 8, "state_size": 6},
    "groups": {"heads": 6, "head_dim": 4, "state_size": 5, "groups": 3, "norm_groups": 2},
    "limited steps": {"heads": 4, "head_dim": 8, "state_size": 6, "groups": 2, "time_limit": (0.2, 0.8)},
    "norm before the gate": {"heads": 2, "head_dim": 6, "state_size": 4, "norm_first": True, "norm_eps": 0.1},
}


def cell(shape: Mamba2Shape, taps: int = 4, *, norm: bool = True, bias: bool = True, seed: int = 0) -> Mamba2:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    conv = ShortConv(drawn(shape.channels, 1, taps), drawn(shape.channels) if bias else None, silu=True)
    heads = (drawn(shape.heads) for _ in range(3))
    return Mamba2(shape, conv, *heads, 1 + 0.1 * drawn(shape.inner) if norm else None)


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def by_token(cell: Mamba2, rows: list[list[float]]) -> list[list[float]]:
    """Result for one sequence, from the definition, in Python's floats."""
    shape, taps, weight = cell.shape, cell.conv.taps, cell.conv.weight.squeeze(1).tolist()
    bias = [0.0] * shape.channels if cell.conv.bias is None else cell.conv.bias.tolist()
    states = [[[0.0] * shape.head_dim for _ in range(shape.state_size)] for _ in range(shape.heads)]
    outputs = []
    for t in range(len(rows)):
        mixed = []
        for channel in range(shape.channels):
            past = [rows[i][shape.inner + channel] if i >= 0 else 0.0 for i in range(t - taps + 1, t + 1)]
            mixed.append(silu(sum(a * b for a, b in zip(past, weight[channel], strict=True)) + bias[channel]))
        y: list[float] = []
        for head in range(shape.heads):
            step = math.log1p(math.exp(rows[t][shape.inner + shape.channels + head] + float(cell.dt_bias[head])))
            step = min(max(step, shape.time_limit[0]), shape.time_limit[1])
            decay = math.exp(-step * math.exp(float(cell.a_log[head])))
            group = head * shape.groups // shape.heads
            b = mixed[shape.inner + group * shape.state_size :]
            c = mixed[shape.inner + (shape.groups + group) * shape.state_size :]
            for p in range(shape.head_dim):
                x, out = mixed[head * shape.head_dim + p], 0.0
                for n in range(shape.state_size):
                    states[head][n][p] = decay * states[head][n][p] + b[n] * step * x
                    out += states[head][n][p] * c[n]
                y.append(out + float(cell.skip[head]) * x)
        outputs.append(gated(cell, y, [silu(gate) for gate in rows[t][: shape.inner]]))
    return outputs


def gated(cell: Mamba2, y: list[float], gates: list[float]) -> list[float]:
    if cell.norm is None:
        return [a * b for a, b in zip(y, gates, strict=True)]
    shape, size = cell.shape, cell.shape.inner // cell.shape.norm_groups
    y = y if shape.norm_first else [a * b for a, b in zip(y, gates, strict=True)]
    out: list[float] = []
    for at in range(0, shape.inner, size):
        scale = 1 / math.sqrt(sum(a * a for a in y[at : at + size]) / size + shape.norm_eps)
        out += [a * scale * float(w) for a, w in zip(y[at : at + size], cell.norm[at : at + size], strict=True)]
    return [a * b for a, b in zip(out, gates, strict=True)] if shape.norm_first else out


def close(found: Tensor, expected: Tensor, tolerance: float = 2e-6) -> bool:
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max())


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_the_blockwise_scan_equals_a_loop_over_tokens(name: str, taps: int) -> None:
    shape = Mamba2Shape(**SHAPES[name])
    for norm, bias in itertools.product((True, False), repeat=2):
        made = cell(shape, taps, norm=norm, bias=bias)
        rows = torch.randn(19, shape.columns, generator=torch.Generator().manual_seed(5))
        assert made.width(shape.columns) == shape.inner
        assert close(recur_packed(made, (rows,), [0, 19]), torch.tensor(by_token(made, rows.tolist())))


def test_tokens_may_be_cut_anywhere() -> None:
    """Blocks of the plain scan end where they may; the state carries over, also between long pieces."""
    made = cell(Mamba2Shape(**SHAPES["groups"]))
    count = 2 * BLOCK + 9
    rows = torch.randn(1, count, made.shape.columns, generator=torch.Generator().manual_seed(1))
    start = tuple(torch.zeros(1, *part.shape) for part in made.parts)
    whole, after = made.scan((rows,), start)
    expected = torch.tensor(by_token(made, rows[0].tolist()))
    assert close(whole[0], expected, 1e-5)
    for cuts in ([1], [3, 4, 70], [BLOCK], list(range(1, count))):
        state, pieces = start, []
        for begin, end in itertools.pairwise([0, *cuts, count]):
            out, state = made.scan((rows[:, begin:end],), state)
            pieces.append(out)
        assert close(torch.cat(pieces, dim=1)[0], expected, 1e-5)
        assert all(close(a, b, 1e-5) for a, b in zip(state, after, strict=True))


def test_long_decays_neither_overflow_nor_vanish() -> None:
    """Heads that forget at once, and heads that never do, over many blocks."""
    made = dataclasses.replace(cell(Mamba2Shape(**SHAPES["plain"])), a_log=torch.tensor([-12.0, 6.0, 12.0, 0.0]))
    rows = torch.randn(300, made.shape.columns, generator=torch.Generator().manual_seed(2))
    found = recur_packed(made, (rows,), [0, 300])
    assert close(found, torch.tensor(by_token(made, rows.tolist())), 1e-5)


def test_gradients_are_those_of_a_loop() -> None:
    made = cell(Mamba2Shape(**SHAPES["groups"]))
    leaves = [made.conv.weight, made.a_log, made.dt_bias, made.skip]
    rows = torch.randn(BLOCK + 5, made.shape.columns, generator=torch.Generator().manual_seed(3))
    for leaf in (*leaves, rows):
        leaf.requires_grad_()
    weights = torch.randn(BLOCK + 5, made.shape.inner, generator=torch.Generator().manual_seed(4))
    whole = torch.autograd.grad((recur_packed(made, (rows,), [0, BLOCK + 5]) * weights).sum(), [*leaves, rows])
    state: tuple[Tensor, ...] = tuple(torch.zeros(1, *part.shape) for part in made.parts)
    outputs = []
    for token in rows.unsqueeze(0).split(1, dim=1):
        out, state = made.scan((token,), state)
        outputs.append(out[0])
    single = torch.autograd.grad((torch.cat(outputs) * weights).sum(), [*leaves, rows])
    assert all(close(a, b, 1e-4) for a, b in zip(whole, single, strict=True))


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="takes rows of 80, got rows of \\[79\\]"):
        cell(Mamba2Shape(**SHAPES["plain"])).width(79)
