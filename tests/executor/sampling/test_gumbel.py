from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from chairlift.base.seeds import sample_seed
from chairlift.executor.sampling.gumbel import gumbel_argmax, gumbel_noise, philox4x32
from tests.executor.sampling import reference

F32 = 2**32 - 1
KNOWN_ANSWERS = [  # Random123's kat_vectors, philox4x32 with 10 rounds
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((F32, F32, F32, F32), (F32, F32), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def argmax_over_the_full_row(scores: Tensor, seeds: list[int], positions: list[int]) -> Tensor:
    return (scores + gumbel_noise(seeds, positions, torch.arange(scores.shape[1]))).argmax(dim=-1)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_its_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    k0, k1 = (torch.tensor([word]) for word in key)
    words = philox4x32(tuple(torch.tensor([word]) for word in counter), (k0, k1))
    assert tuple(int(word) for word in words) == expected


@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**31),
    token_ids=st.lists(st.integers(0, 2**18), min_size=1, max_size=9),
)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_noise_follows_its_definition(seed: int, position: int, token_ids: list[int]) -> None:
    got = gumbel_noise([seed], [position], torch.tensor([token_ids]))
    expected = [np.float32(reference.gumbel(seed, position, token_id)) for token_id in token_ids]
    assert got.dtype == torch.float32
    assert got[0].tolist() == [float(value) for value in expected]


def test_noise_is_between_its_bounds() -> None:
    for word, bound in ((0, -math.log(33 * math.log(2))), (F32, -math.log(-math.log1p(-(2.0**-33))))):
        assert -math.log(-math.log((word + 0.5) / 2**32)) == pytest.approx(bound, abs=1e-6)


def test_noise_has_gumbel_moments() -> None:
    noise = gumbel_noise(list(range(8)), [3] * 8, torch.arange(50_000)).double()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)  # Euler's constant
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)


@given(
    rng=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 5),
    vocab=st.integers(1, 300),
    scale=st.sampled_from([0.0, 0.01, 1.0, 5.0, 30.0, 1e4, 1e8]),
    holes=st.floats(0.0, 0.95),
)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_pruning_never_changes_the_answer(rng: int, rows: int, vocab: int, scale: float, holes: float) -> None:
    generator = np.random.default_rng(rng)
    scores = torch.from_numpy((generator.integers(-8, 9, (rows, vocab)) / 4 * scale).astype(np.float32))
    hole = torch.from_numpy(generator.random((rows, vocab)) < holes)
    hole[:, int(generator.integers(vocab))] = False
    scores.masked_fill_(hole, -math.inf)
    seeds = [int(x) for x in generator.integers(0, 2**64, rows, dtype=np.uint64)]
    positions = [int(x) for x in generator.integers(0, 2**20, rows)]
    assert (
        gumbel_argmax(scores, seeds, positions).tolist() == argmax_over_the_full_row(scores, seeds, positions).tolist()
    )


@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0, 20.0])
def test_pruning_never_changes_the_answer_in_a_large_vocabulary(scale: float) -> None:
    scores = torch.randn(3, 151_936, generator=torch.Generator().manual_seed(1)) * scale
    seeds, positions = [1, 2**63, 2**64 - 1], [0, 17, 40_000]
    expected = argmax_over_the_full_row(scores, seeds, positions).tolist()
    assert gumbel_argmax(scores, seeds, positions).tolist() == expected
    alone = [gumbel_argmax(scores[i : i + 1], seeds[i : i + 1], positions[i : i + 1]).item() for i in range(3)]
    assert alone == expected


def test_lowest_id_wins_a_tie() -> None:
    """At 1e30 the noise is smaller than one unit in the last place, so these scores tie exactly."""
    scores = torch.zeros(1, 64)
    scores[0, [9, 11, 50]] = 1e30
    assert {gumbel_argmax(scores, [seed], [0]).item() for seed in range(20)} == {9}


def chi_square(temperature: float, draws: Tensor, logits: Tensor) -> float:
    expected = torch.softmax(logits.double() / temperature, dim=-1) * len(draws)
    observed = torch.bincount(draws, minlength=len(logits)).double()
    return float(((observed - expected) ** 2 / expected).sum())


def test_draws_follow_the_softmax_over_positions_and_over_seeds() -> None:
    """The 0.1 % critical value of chi-square with 9 degrees of freedom is 27.9; a wrong temperature must exceed it."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, 0.0, -0.5, -1.0, -1.5, -2.0])
    count = 20_000
    scores = logits.expand(count, -1).contiguous()
    over_positions = gumbel_argmax(scores, [sample_seed(7, 0)] * count, list(range(count)))
    over_seeds = gumbel_argmax(scores, [sample_seed(seed, 0) for seed in range(count)], [12] * count)
    over_samples = gumbel_argmax(scores, [sample_seed(7, index) for index in range(count)], [12] * count)
    for draws in (over_positions, over_seeds, over_samples):
        assert chi_square(1.0, draws, logits) < 27.9
        assert chi_square(1.1, draws, logits) > 27.9


def test_neighbouring_positions_are_independent() -> None:
    """Pairs of successive draws fill a 4 x 4 table evenly: 15 degrees of freedom, 0.1 % critical value 37.7."""
    count = 16_000
    draws = gumbel_argmax(torch.zeros(count, 4), [5] * count, list(range(count)))
    pairs = torch.bincount(draws[:-1] * 4 + draws[1:], minlength=16).double()
    assert float(((pairs - count / 16) ** 2 / (count / 16)).sum()) < 37.7
