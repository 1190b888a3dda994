"""Draws with given random words: the winner of the definition, and noise only where it can change the winner."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import TensorHandle

from chairlift.kernels.triton import sampling as kernels
from tests.kernels.triton import conftest
from tests.kernels.triton.probes import mutated, rough_noise

pytestmark = pytest.mark.skipif(conftest.ON_GPU, reason="only interpreted kernels can be given words")
CHUNK, VOCAB = 16, 70
CPU = torch.device("cpu")
LARGEST = 2**32 - 1
NONE = 2**31 - 1
"""A word whose noise is 0.37."""


class Row(NamedTuple):
    """A row to draw from, with its random words."""

    raw: Tensor
    """float32 [V]."""
    words: Tensor
    """int64 [V]."""
    temperature: float = 1.0
    kept: tuple[float, int] = (-torch.inf, NONE)
    """(lowest kept score, last kept id with that score)."""


def noise_of(words: Tensor) -> Tensor:
    return (-torch.log(-torch.log((words.double() + 0.5) * 2.0**-32))).float()


def winner(row: Row) -> int:
    """The definition: the lowest id with the highest sum of score and noise; -1 if the row is broken."""
    scores = row.raw / torch.tensor(row.temperature)
    bar, last = row.kept
    allowed = (scores > bar) | ((scores == bar) & (torch.arange(len(scores)) <= last))
    if not bool(scores.max().isfinite()):  # NaN, too
        return -1
    totals = torch.where(allowed, scores + noise_of(row.words), -torch.inf)
    return int((totals == totals.max()).nonzero()[0])


def draw(rows: list[Row], module: ModuleType, *, bounded: bool) -> tuple[list[int], list[int]]:
    """(token of each row, number of chunks for which its random words were computed)."""
    count = len(rows)
    computed = [0] * count

    def given(seed: Any, position: Any, first_id: Any, size: int) -> Any:
        row, first = int(seed.handle.data[0]), int(first_id.handle.data[0])
        computed[row] += 1
        padded = torch.nn.functional.pad(rows[row].words, (0, size))[first : first + size]
        kind = tl.block_type(tl.uint32, [size])
        return tl.tensor(TensorHandle(padded.numpy().astype(np.uint32), tl.uint32), kind)

    def floats(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)

    index = torch.arange(count, dtype=torch.int32)
    settings = kernels.SamplingSettings(
        index.long(), floats([row.temperature for row in rows]), floats([0.0] * count), index, index.double()
    )
    kept = kernels.Kept(
        floats([row.kept[0] for row in rows]), torch.tensor([row.kept[1] for row in rows], dtype=torch.int32)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_words", given)
        patch.setattr(module, "CONCURRENT_CHUNKS", 0 if bounded else 1 << 30)
        logits = torch.stack([row.raw for row in rows])
        tokens, _ = module.sample(logits, settings, index, index, kept, chunk=CHUNK)
    return tokens.tolist(), computed


@functools.cache
def neighbours() -> tuple[Tensor, Tensor, Tensor]:
    """(words, the noise of the definition, approximate noise), ascending, around a noise of 2.03125. There sums with
    1e6, whose last bit stands for 0.0625, are rounded up or down."""
    middle = int(2**32 * np.exp(-np.exp(-2.03125)))
    words = middle + torch.arange(-(1 << 12), 1 << 12)
    return words, noise_of(words), rough_noise(words)


def equal_but(approximate: Tensor, exact: Tensor) -> tuple[int, int]:
    """Two neighbours of which the second has more of ``approximate``, and both have the same ``exact`` number."""
    words, _, _ = neighbours()
    found = ((approximate[1:] > approximate[:-1]) & (exact[1:] == exact[:-1])).nonzero()[0]
    return int(words[found]), int(words[found + 1])


@functools.cache
def cases() -> dict[str, Row]:
    draw = torch.Generator().manual_seed(1)
    low = torch.full((VOCAB,), NONE)

    def normal(factor: float) -> Tensor:
        return torch.randn(VOCAB, generator=draw) * factor

    def random_words() -> Tensor:
        return torch.randint(0, 2**32, (VOCAB,), generator=draw)

    def with_words(raw: Tensor, words: dict[int, int], **more: Any) -> Row:
        given = low.clone()
        for place, word in words.items():
            given[place] = word
        return Row(raw, given, **more)

    peaked = torch.full((VOCAB,), -12.4)
    peaked[3] = 10.0
    few = torch.full((VOCAB,), -9.0)
    few[[20, 40]] = torch.tensor([3.0, 5.0])
    tied = torch.zeros(VOCAB)
    broken, silent, infinite = normal(1.0), torch.full((VOCAB,), -torch.inf), normal(1.0)
    broken[50], infinite[50] = torch.nan, torch.inf
    holes = normal(2.0)
    holes[::2] = -torch.inf
    _, exact, rough = neighbours()
    equal, higher = equal_but(rough, exact)
    lower, better = equal_but(exact, rough)
    down, up = equal_but(1e6 + rough, 1e6 + exact)
    return {
        "flat": Row(normal(0.1), random_words()),
        "peaked": Row(peaked + 100.0 * (peaked > 0), random_words()),
        "cold": Row(normal(2.0), random_words(), 0.01),
        "hot": Row(normal(20.0), random_words(), 10.0),
        "forbidden ids": Row(holes, random_words()),
        "NaN": Row(broken, random_words()),
        "infinity": Row(infinite, random_words()),
        "nothing": Row(silent, random_words()),
        "the largest word": with_words(peaked, {60: LARGEST}),
        "the largest word of a cold row": with_words(peaked / 100, {60: LARGEST}, temperature=0.01),
        "equal draws in three chunks": with_words(tied, {60: 2**32 - 9, 33: 2**32 - 9, 18: 2**32 - 9}),
        "equal draws in a chunk": with_words(tied, {20: 2**32 - 9, 21: 2**32 - 9}),
        "scores that round noise away": Row(torch.full((VOCAB,), 3e8), random_words()),
        "equal draws look different": with_words(tied, {10: equal, 60: higher}),
        "different draws look equal": with_words(tied, {10: lower, 60: better}),
        "a sum is rounded down": with_words(torch.full((VOCAB,), 1e4), {10: down, 60: up}, temperature=0.01),
        "two kept ids": with_words(few, {23: LARGEST, 41: LARGEST}, kept=(3.0, 20)),
        "equal scores at the end": with_words(tied, {7: 2**32 - 9, 30: LARGEST}, kept=(0.0, 8)),
    }


@pytest.mark.parametrize("bounded", [False, True])
def test_the_winner_is_that_of_the_definition(bounded: bool) -> None:
    """All rows together. Whether programs may skip chunks that cannot win changes nothing."""
    expected = {name: winner(row) for name, row in cases().items()}
    tokens, _ = draw(list(cases().values()), kernels, bounded=bounded)
    assert dict(zip(cases(), tokens, strict=True)) == expected
    assert list(expected.values()).count(-1) == 3 and expected["the largest word"] == 60


def saves_noise(module: ModuleType) -> bool:
    """Whether chunks get no noise that have no kept ids, or that cannot win, or whose best is not near the row's. The
    winner's chunk gets it twice."""
    names = ("two kept ids", "equal scores at the end", "peaked", "forbidden ids", "nothing")
    rows = [cases()[name] for name in names]
    chunks = -(-VOCAB // CHUNK)
    free, bounded = (draw(rows, module, bounded=bounded)[1] for bounded in (False, True))
    return free == [3, 2, chunks + 1, chunks + 1, 0] and bounded == [3, 2, 2, chunks + 1, 0]


def test_noise_is_computed_only_where_it_can_change_the_winner() -> None:
    assert saves_noise(kernels)


EXACT = "noise = (-tl.log(-tl.log(u))).to(tl.float32)"
FAULTS: dict[str, tuple[str, str]] = {
    "the bound forgets large words": ("tl.constexpr(22.875)", "tl.constexpr(21.0)"),
    "the bound is the first row's": ("tl.load(reached_ptr + row, volatile", "tl.load(reached_ptr, volatile"),
    "one chunk is computed exactly": ("near = near & (c > chunk)", "near = near & (c < 0)"),
    "noise stays approximate": (EXACT, "noise = _rough_noise(word.to(tl.uint32))"),
    "only the best is computed exactly": ("2e-3 + tl.abs(top) * 9.5", "0.0 * 9.5"),
    "large sums are taken for exact": ("tl.abs(top) * 9.5367431640625e-07", "0.0"),
    "what is not kept may win": ("row, bar_ptr, last_id_ptr)\n        words", "row, None, None)\n        words"),
    "the last of equal ids wins": ("tl.where(total > won", "tl.where(total >= won"),
}


@pytest.mark.planted("test_the_winner_is_that_of_the_definition")
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, tmp_path: Path) -> None:
    rows = list(cases().values())
    rows = [cases()["peaked"], *rows] if "first row's" in fault else rows
    tokens, _ = draw(rows, mutated(kernels, *FAULTS[fault], tmp_path), bounded=True)
    assert tokens != [winner(row) for row in rows]


WASTE = {
    "every row raises the first row's bound": ("atomic_max(reached_ptr + row, value", "atomic_max(reached_ptr, value"),
    "chunks without kept ids get noise": ('(value > float("-inf")) & (value + ', "(value + "),
    "the bound is not used": ("needed = _cut(tl.load(reached", "_cut(tl.load(reached"),
    "every chunk is computed exactly": ("near = (value >= needed) & (v", "near = (v"),
}


@pytest.mark.planted("test_noise_is_computed_only_where_it_can_change_the_winner")
@pytest.mark.parametrize("fault", WASTE)
def test_planted_waste_is_found(fault: str, tmp_path: Path) -> None:
    assert not saves_noise(mutated(kernels, *WASTE[fault], tmp_path))
