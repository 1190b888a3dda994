"""Each transform against a slow reference, and against transformers where it has the same one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from chairlift.base.step_batch import mask_bits
from chairlift.executor.sampling import logits as transforms
from tests.executor.sampling import reference

ROWS, VOCAB = 5, 40


def tied_logits(seed: int, rows: int = ROWS, vocab: int = VOCAB) -> Tensor:
    """Few distinct values, so that ties are everywhere."""
    return torch.from_numpy((np.random.default_rng(seed).integers(-6, 7, (rows, vocab)) / 2).astype(np.float32))


def smooth_logits(seed: int, rows: int = ROWS, vocab: int = VOCAB) -> Tensor:
    return torch.from_numpy((np.random.default_rng(seed).standard_normal((rows, vocab)) * 3).astype(np.float32))


def rows_of(values: dict[int, float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int64)


def kept(row: Tensor) -> list[int]:
    return torch.isfinite(row).nonzero().squeeze(-1).tolist()


def by_row(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[int, Any]]:
    """A value for some of the rows, in ascending order."""
    return st.dictionaries(st.integers(0, ROWS - 1), values, min_size=1).map(lambda asked: dict(sorted(asked.items())))


subsets = by_row(st.floats(0.01, 0.99))


@given(seed=st.integers(0, 10**6), asked=by_row(st.integers(1, VOCAB)))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_a_tie(seed: int, asked: dict[int, int]) -> None:
    logits = tied_logits(seed)
    got = logits.clone()
    transforms.apply_top_k(got, torch.tensor(list(asked)), list(asked.values()))
    for i in range(ROWS):
        expected = reference.top_ids(logits[i].tolist(), asked.get(i, VOCAB))
        assert kept(got[i]) == sorted(expected)
        assert torch.equal(got[i, expected], logits[i, expected])


@given(seed=st.integers(0, 10**6), asked=subsets, head=st.sampled_from([1, 4, 1024]))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_top_p_keeps_the_nucleus(seed: int, asked: dict[int, float], head: int) -> None:
    logits = tied_logits(seed)
    got = logits.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transforms, "_NUCLEUS_HEAD", head)  # 1 and 4 are often too few, which takes the full sort
        transforms.apply_top_p(got, rows_of(asked), torch.tensor(list(asked.values()), dtype=torch.float64))
    for i in range(ROWS):
        expected = reference.nucleus(logits[i].tolist(), asked[i]) if i in asked else range(VOCAB)
        assert kept(got[i]) == sorted(expected)
        assert torch.equal(got[i, list(expected)], logits[i, list(expected)])


@given(seed=st.integers(0, 10**6), asked=subsets)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_min_p_keeps_tokens_by_their_share_of_the_best(seed: int, asked: dict[int, float]) -> None:
    logits = smooth_logits(seed)
    got = logits.clone()
    transforms.apply_min_p(got, rows_of(asked), torch.tensor(list(asked.values())))
    probs = torch.softmax(logits.double(), dim=-1)
    for i in range(ROWS):
        share = probs[i] / probs[i].max()
        clear = (share - asked.get(i, 0.0)).abs() > 1e-6
        assert torch.equal(torch.isfinite(got[i])[clear], (share >= asked.get(i, 0.0))[clear])


@given(seed=st.integers(0, 10**6), asked=subsets)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_penalties_touch_only_the_given_pairs(seed: int, asked: dict[int, float]) -> None:
    generator = np.random.default_rng(seed)
    logits = smooth_logits(seed)
    pairs = [(row, int(token_id)) for row in asked for token_id in set(generator.integers(0, VOCAB, 6).tolist())]
    rows, ids = torch.tensor(pairs).T
    strength = torch.tensor([asked[row] for row, _ in pairs])
    counts = torch.from_numpy(generator.integers(1, 5, len(pairs)).astype(np.float32))
    repeated, subtracted = logits.clone(), logits.clone()
    transforms.apply_repetition_penalty(repeated, rows, ids, strength)
    transforms.apply_presence_and_frequency_penalties(subtracted, rows, ids, counts, strength, 2 * strength)
    expected_repeated, expected_subtracted = logits.tolist(), logits.tolist()
    for (row, token_id), count in zip(pairs, counts.tolist(), strict=True):
        value, penalty = expected_repeated[row][token_id], asked[row]
        expected_repeated[row][token_id] = value / penalty if value > 0 else value * penalty
        expected_subtracted[row][token_id] -= 2 * penalty * count + penalty
    torch.testing.assert_close(repeated, torch.tensor(expected_repeated))
    torch.testing.assert_close(subtracted, torch.tensor(expected_subtracted))


def test_biases_and_masks_change_only_the_given_tokens() -> None:
    logits = smooth_logits(0)
    rows, ids = torch.tensor([0, 0, 3]), torch.tensor([1, 2, 39])
    biased, masked, only = logits.clone(), logits.clone(), logits.clone()
    transforms.add_logit_bias(biased, rows, ids, torch.tensor([1.0, -2.0, 100.0]))
    transforms.mask_token_ids(masked, rows, ids)
    transforms.keep_only_token_ids(only, torch.tensor([0, 3]), rows, ids)
    difference = biased - logits
    assert difference[rows, ids].tolist() == pytest.approx([1.0, -2.0, 100.0], abs=1e-4)
    assert difference.count_nonzero() == 3
    assert [kept(row) for row in masked] == [
        [i for i in range(VOCAB) if (r, i) not in {(0, 1), (0, 2), (3, 39)}] for r in range(ROWS)
    ]
    assert [kept(row) for row in only] == [[1, 2], *[list(range(VOCAB))] * 2, [39], list(range(VOCAB))]


def test_keep_only_with_nothing_left_masks_the_row() -> None:
    logits = smooth_logits(0)
    none = torch.empty(0, dtype=torch.int64)
    transforms.keep_only_token_ids(logits, torch.tensor([2]), none, none)
    assert [len(kept(row)) for row in logits] == [VOCAB, VOCAB, 0, VOCAB, VOCAB]


@given(seed=st.integers(0, 10**6), vocab=st.integers(1, 70))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_a_grammar_mask_excludes_tokens_of_its_rows_only(seed: int, vocab: int) -> None:
    generator = np.random.default_rng(seed)
    allowed = generator.random((ROWS, vocab)) < 0.5
    rows = np.flatnonzero(generator.random(ROWS) < 0.7)
    bits = np.zeros((len(rows), -(-vocab // 32)), dtype=np.uint32)
    for i, row in enumerate(rows):
        bits[i] = mask_bits(np.flatnonzero(allowed[row]).tolist(), vocab)
    logits = smooth_logits(seed, vocab=vocab)
    expected = logits.clone()
    for row in rows:
        expected[row, ~torch.from_numpy(allowed[row])] = -torch.inf
    transforms.apply_allowed_mask(logits, torch.from_numpy(rows), torch.from_numpy(bits.view(np.int32)))
    assert torch.equal(logits, expected)


def rank(logits: Tensor, k: int) -> list[list[int]]:
    values, ids = transforms.rank_token_ids(logits, k)
    assert torch.equal(values, logits.gather(-1, ids))
    return ids.tolist()


@given(seed=st.integers(0, 10**6), k=st.integers(0, VOCAB))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_ranking_is_exact_under_ties(seed: int, k: int) -> None:
    logits = tied_logits(seed)
    assert rank(logits, k) == [reference.top_ids(row, k) for row in logits.tolist()]


Processor = Callable[[], LogitsProcessor]
Ours = Callable[[Tensor], None]
EVERY = torch.arange(ROWS)
COMPARED: list[tuple[Processor, Ours]] = [
    (
        lambda: TemperatureLogitsWarper(0.7),
        lambda x: transforms.apply_temperature(x, torch.full((ROWS,), 0.7)),
    ),
    (lambda: TopKLogitsWarper(7), lambda x: transforms.apply_top_k(x, EVERY, [7] * ROWS)),
    (
        lambda: TopPLogitsWarper(0.8),
        lambda x: transforms.apply_top_p(x, EVERY, torch.full((ROWS,), 0.8, dtype=torch.float64)),
    ),
    (lambda: MinPLogitsWarper(0.1), lambda x: transforms.apply_min_p(x, EVERY, torch.full((ROWS,), 0.1))),
]


@pytest.mark.parametrize(("theirs", "ours"), COMPARED, ids=["temperature", "top_k", "top_p", "min_p"])
def test_each_transform_equals_that_of_transformers(theirs: Processor, ours: Ours) -> None:
    for seed in range(20):
        logits = smooth_logits(seed)
        expected = theirs()(torch.zeros(ROWS, 1, dtype=torch.int64), logits.clone())
        ours(logits)
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


def test_the_repetition_penalty_equals_that_of_transformers() -> None:
    for seed in range(20):
        logits = smooth_logits(seed)
        tokens = torch.from_numpy(np.random.default_rng(seed).integers(0, VOCAB, (ROWS, 12)))
        expected = RepetitionPenaltyLogitsProcessor(1.3)(tokens, logits.clone())
        pairs = [(row, token_id) for row in range(ROWS) for token_id in sorted(set(tokens[row].tolist()))]
        rows, ids = torch.tensor(pairs).T
        transforms.apply_repetition_penalty(logits, rows, ids, torch.full((len(pairs),), 1.3))
        assert torch.equal(logits, expected)


@pytest.mark.parametrize("vocab", [151_936])
def test_rows_do_not_depend_on_their_batch_in_a_large_vocabulary(vocab: int, two_threads: None) -> None:
    """Bit for bit, with every transform that reduces over the vocabulary."""
    logits = smooth_logits(3, rows=4, vocab=vocab)

    def apply(x: Tensor) -> Tensor:
        rows = torch.arange(len(x))
        transforms.apply_min_p(x, rows, torch.full((len(x),), 1e-5))
        transforms.apply_top_k(x, rows, [20_000] * len(x))
        transforms.apply_top_p(x, rows, torch.full((len(x),), 0.95, dtype=torch.float64))
        return x

    together = apply(logits.clone())
    assert all(1024 < len(kept(row)) < 20_000 for row in together)  # large enough for the full sort
    for i in range(len(logits)):
        assert torch.equal(apply(logits[i : i + 1].clone())[0], together[i])


def test_a_temperature_of_one_changes_no_bit() -> None:
    logits = smooth_logits(1)
    got = logits.clone()
    transforms.apply_temperature(got, torch.tensor([1.0, 0.5, 1.0, 2.0, 1.0]))
    assert torch.equal(got[[0, 2, 4]], logits[[0, 2, 4]])
    assert torch.equal(got[[1, 3]], logits[[1, 3]] * torch.tensor([[2.0], [0.5]]))
    assert math.isfinite(got.sum().item())
