"""Sampling in Triton: the same words, the same kept ids and the same tokens as the sampler of the CPU."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from chairlift.base.row_failures import raw_reason, shaped_reason
from chairlift.base.sampling_params import SamplingParams
from chairlift.base.sampling_row import SamplingRow
from chairlift.executor.sampling import logits as transforms
from chairlift.executor.sampling.gumbel import gumbel_argmax, philox4x32
from chairlift.executor.sampling.sampler import Sampler
from chairlift.kernels.triton import sampling as kernels
from chairlift.kernels.triton.sampling import SamplingSettings, kept_ids, sample
from tests.kernels.triton.probes import normal, random_words, rough_noise, seeds
from tests.sweep import sweep

SEEDS = [0, 1, 2**32 - 1, 2**63 + 12345, 2**64 - 1]


def signed(seed: int) -> int:
    """The int64 with the bits of an unsigned seed."""
    return seed - 2**64 if seed >= 2**63 else seed


def settings_of(rows: list[SamplingRow], device: torch.device) -> SamplingSettings:
    params = [row.params for row in rows]

    def tensor(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(device)

    return SamplingSettings(
        seeds=tensor([signed(row.seed) for row in rows], torch.int64),
        temperature=tensor([0.0 if p.greedy else p.temperature for p in params], torch.float32),
        log_min_p=torch.log(tensor([p.min_p for p in params], torch.float32)),
        top_k=tensor([p.top_k if p.top_k > 0 else 0 for p in params], torch.int32),
        top_p=tensor([p.top_p for p in params], torch.float64),
    )


def ints(values: list[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("position", "first"), [(0, 0), (7, 64), (2**31 - 1, 151_872)])
def test_random_words_are_those_of_the_cpu(seed: int, position: int, first: int, device: torch.device) -> None:
    ids = torch.arange(first, first + 64)
    zero = torch.zeros_like(ids)
    key = torch.full_like(ids, seed & 0xFFFFFFFF), torch.full_like(ids, seed >> 32)
    words = torch.stack(philox4x32((ids // 4, zero + position, zero, zero), key), -1)
    assert (
        random_words(signed(seed), position, first, device).tolist()
        == words.gather(-1, ids[:, None] % 4)[:, 0].tolist()
    )


def test_rough_noise_is_near_enough(device: torch.device) -> None:
    """A draw gives the definition's noise only to ids that float32 leaves within 2e-3 of the best."""
    edges = [0, 1, 2, 2**28, 2**31, 15 * 2**28 - 1, 15 * 2**28, 15 * 2**28 + 300, 2**32 - 2**20, 2**32 - 2, 2**32 - 1]
    drawn = torch.randint(0, 2**32, (4096 - len(edges),), generator=torch.Generator().manual_seed(1)).tolist()
    words = torch.tensor(edges + drawn, device=device)
    exact = -torch.log(-torch.log((words.double() + 0.5) * 2.0**-32))
    assert float((rough_noise(words).double() - exact).abs().max()) < 1e-4


def any_params(draw: random.Random) -> SamplingParams:
    kind = draw.choice(["greedy", "plain", "all", "all", "top_k", "top_p", "min_p"])
    if kind == "greedy":
        return SamplingParams(temperature=0.0)
    wanted = {
        "top_k": draw.choice([1, 2, 5, 40, 10_000]),
        "top_p": draw.choice([1e-6, 0.3, 0.5, 0.9, 0.999]),
        "min_p": draw.choice([0.01, 0.2, 1.0]),
    }
    chosen = {name: value for name, value in wanted.items() if kind in (name, "all")}
    return SamplingParams(temperature=draw.choice([0.3, 1.0, 2.0]), **chosen)


def any_logits(draw: random.Random, seed: int, device: torch.device) -> tuple[Tensor, list[SamplingRow]]:
    """Few rows: smooth or full of ties, peaked or flat, with forbidden ids; some rows broken."""
    rows, vocab = draw.randint(1, 3), draw.choice([5, 130, 300])
    dtype = draw.choice([torch.float32, torch.bfloat16, torch.float16])
    logits = normal(rows, vocab, dtype=torch.float32, seed=seed, device=device) * draw.choice([0.1, 2.0, 8.0])
    if draw.random() < 0.5:
        logits = logits.round()
    if draw.random() < 0.3:
        logits[:, :: draw.choice([2, 3])] = -math.inf
    if draw.random() < 0.3:
        logits[draw.randrange(rows), draw.randrange(vocab)] = draw.choice([math.nan, math.inf])
    if draw.random() < 0.2:
        logits[draw.randrange(rows)] = -math.inf
    if draw.random() < 0.2:
        logits[0] = -0.0
    return logits.to(dtype), [SamplingRow(any_params(draw), draw.choice(SEEDS), 3) for _ in range(rows)]


@pytest.mark.parametrize("count", seeds(8))
def test_tokens_are_those_of_the_cpu(
    request: pytest.FixtureRequest, count: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(seed: int) -> None:
        monkeypatch.setattr(kernels, "CONCURRENT_CHUNKS", 0 if seed % 2 else 1 << 30)
        draw = random.Random(seed)
        logits, rows = any_logits(draw, seed, device)
        positions = [draw.randint(3, 9) for _ in rows]
        histories = [np.zeros(position, dtype=np.int32) for position in positions]
        expected = Sampler()(logits.cpu(), rows, histories)
        # Row i of the batch is slot R - 1 - i.
        slots = ints(list(range(len(rows)))[::-1], device)
        settings = settings_of(rows[::-1], device)
        kept = kept_ids(logits, settings, slots, block=draw.choice([64, 256]))
        tokens, failing = sample(logits, settings, slots, ints(positions, device), kept, chunk=draw.choice([64, 512]))
        assert tokens.tolist() == expected.token_ids
        reasons = {}
        for i, (raw, shaped) in enumerate(failing.tolist()):
            if not math.isfinite(raw):
                reasons[i] = raw_reason(raw)
            elif not math.isfinite(shaped):
                reasons[i] = shaped_reason(shaped)
        assert reasons == expected.errors

    sweep(request, count, check)


def check_kept(row: Tensor, params: SamplingParams, block: int) -> None:
    """The kernel keeps the same logits of ``row`` [1, V] as the transforms."""
    truth, first = row.cpu().clone(), torch.zeros(1, dtype=torch.int64)
    transforms.apply_temperature(truth, torch.tensor([params.temperature]))
    scores = truth.clone()
    if params.min_p:
        transforms.apply_min_p(truth, first, torch.tensor([params.min_p]))
    if params.top_k:
        transforms.apply_top_k(truth, first, [params.top_k])
    if params.top_p < 1.0:
        transforms.apply_top_p(truth, first, torch.tensor([params.top_p], dtype=torch.float64))
    settings = settings_of([SamplingRow(params, 1, 0)], row.device)
    kept = kept_ids(row, settings, ints([0], row.device), block=block)
    bar, last_id = float(kept.bar), int(kept.last_id)
    ours = (scores > bar) | ((scores == bar) & (torch.arange(row.shape[1]) <= last_id))
    assert ours[0].nonzero().squeeze(-1).tolist() == (truth[0] > -math.inf).nonzero().squeeze(-1).tolist()


@pytest.mark.parametrize("count", seeds(6))
def test_kept_tokens_are_those_that_the_transforms_keep(
    request: pytest.FixtureRequest, count: int, device: torch.device
) -> None:
    def check(seed: int) -> None:
        draw = random.Random(1000 + seed)
        vocab = draw.choice([40, 130, 300])
        row = normal(1, vocab, dtype=torch.float32, seed=seed, device=device) * draw.choice([0.5, 4.0])
        if draw.random() < 0.6:
            row = row.round()  # many equal scores: the lowest ids must win
        params = SamplingParams(
            temperature=draw.choice([0.7, 1.0, 1.5]),
            top_k=draw.choice([0, 1, 3, 20, 39]),
            top_p=draw.choice([1.0, 0.2, 0.5, 0.95]),
            min_p=draw.choice([0.0, 0.05, 0.5]),
        )
        check_kept(row, params, draw.choice([8, 64, 512]))

    sweep(request, count, check)


@pytest.mark.full
@pytest.mark.parametrize("asked", [{"top_p": 0.05}, {"top_p": 0.9}, {"top_k": 3}, {"top_k": 30, "top_p": 0.9}])
def test_the_few_that_are_taken_aside_may_be_too_few_or_too_many(asked: Any, device: torch.device) -> None:
    """In blocks of 8: of a flat row about 16, and 0.9 of it is most of it; of equal scores more than fit."""
    flat = normal(1, 100, dtype=torch.float32, seed=7, device=device) * 0.1
    equal = torch.full((1, 100), -9.0, device=device)
    equal[0, 20:90], equal[0, 99] = 5.0, 9.0  # the best does not fit either
    for row in (flat, equal, equal[:, :60].contiguous()):
        check_kept(row, SamplingParams(temperature=1.0, **asked), 8)


def test_a_nucleus_of_equal_scores_ends_where_it_should(device: torch.device) -> None:
    """Four equal probabilities, 0 and -0 alike: half of them is two, and a hair more is three."""
    row = torch.tensor([[0.0, -0.0, 0.0, -0.0]], device=device)
    for top_p, last_id in [(0.25, 0), (0.5, 1), (0.5000001, 2), (0.75, 2), (0.99, 3)]:
        settings = settings_of([SamplingRow(SamplingParams(temperature=1.0, top_p=top_p), 1, 0)], device)
        kept = kept_ids(row, settings, ints([0], device), block=64)
        assert (float(kept.bar), int(kept.last_id)) == (0.0, last_id)


def test_top_k_cuts_what_min_p_left_equal(device: torch.device) -> None:
    row = torch.tensor([[1.0, 2.0, 2.0, 2.0]], device=device)
    settings = settings_of([SamplingRow(SamplingParams(temperature=1.0, min_p=1.0, top_k=2), 1, 0)], device)
    kept = kept_ids(row, settings, ints([0], device), block=64)
    assert (float(kept.bar), int(kept.last_id)) == (2.0, 2)


def test_the_lowest_of_equal_draws_wins(device: torch.device) -> None:
    """Scores so large that most of the noise is rounded away."""
    row, position = torch.full((1, 12), 3e8, device=device), 5
    for seed in range(4):
        settings = settings_of([SamplingRow(SamplingParams(temperature=1.0), seed, 0)], device)
        token, _ = sample(row, settings, ints([0], device), ints([position], device), chunk=8)
        assert token.tolist() == gumbel_argmax(row.cpu(), [seed], [position]).tolist()


def test_a_row_is_drawn_alike_in_any_company(device: torch.device) -> None:
    logits = normal(4, 200, dtype=torch.bfloat16, seed=3, device=device)
    params = [
        SamplingParams(temperature=1.0, top_k=9),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=2.0),
    ]
    settings = settings_of([SamplingRow(params[i % 3], i, 0) for i in range(4)], device)
    slots, positions = ints([3, 1, -1, 0], device), ints([5, 6, 7, 8], device)
    together, failing = sample(
        logits, settings, slots, positions, kept_ids(logits, settings, slots, block=64), chunk=128
    )
    assert int(together[2]) == -1 and failing[2].tolist() == [0.0, 0.0]
    for i in (0, 1, 3):
        one, slot = logits[i : i + 1], slots[i : i + 1]
        kept = kept_ids(one, settings, slot, block=64)
        alone, _ = sample(one, settings, slot, positions[i : i + 1], kept, chunk=128)
        assert alone.tolist() == together[i : i + 1].tolist()


def test_no_rows_give_no_tokens(device: torch.device) -> None:
    none = ints([], device)
    logits, settings = torch.empty((0, 50), device=device), settings_of([], device)
    tokens, failing = sample(logits, settings, none, none, kept_ids(logits, settings, none))
    assert tokens.shape == (0,) and failing.shape == (0, 2)
