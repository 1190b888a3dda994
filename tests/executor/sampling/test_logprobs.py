from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.executor.sampling import logprobs
from chairlift.executor.sampling.logprobs import token_logprobs
from tests.executor.sampling import reference


@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 7),
    vocab=st.integers(1, 50),
    slice_values=st.sampled_from([1, 60, 1 << 21]),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_log_probabilities_equal_their_definition(seed: int, rows: int, vocab: int, slice_values: int) -> None:
    generator = np.random.default_rng(seed)
    logits = torch.from_numpy((generator.integers(-9, 10, (rows, vocab)) / 3).astype(np.float32))
    token_ids = generator.integers(0, vocab, rows).tolist()
    counts = generator.integers(0, min(20, vocab) + 1, rows).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "_VALUES_PER_SLICE", slice_values)
        got = token_logprobs(logits, token_ids, counts)
    expected = torch.log_softmax(logits.double(), dim=-1).numpy()
    for i, found in enumerate(got):
        row = logits[i].tolist()
        ids = [token_ids[i], *reference.top_ids(row, counts[i])]
        assert found.token_ids.tolist() == ids
        assert found.token_ids.dtype == np.int32
        assert found.logprobs.dtype == np.float32
        np.testing.assert_allclose(found.logprobs, expected[i, ids], rtol=1e-5, atol=1e-5)
        assert found.rank == 1 + sum(value > row[token_ids[i]] for value in row)


def test_rank_of_a_tie_is_the_better_one() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    assert [token_logprobs(logits, [i], [0])[0].rank for i in range(4)] == [3, 1, 1, 4]


def test_more_than_the_vocabulary_reports_the_vocabulary() -> None:
    found = token_logprobs(torch.tensor([[1.0, 2.0]]), [0], [20])[0]
    assert found.token_ids.tolist() == [0, 1, 0]


def test_low_precision_logits_are_worked_on_in_float32() -> None:
    logits = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    low, high = token_logprobs(logits, [1, 2, 3], [5] * 3), token_logprobs(logits.float(), [1, 2, 3], [5] * 3)
    for a, b in zip(low, high, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.logprobs.tolist() == b.logprobs.tolist()


def test_a_row_alone_and_in_a_large_batch_agree_bit_for_bit(two_threads: None) -> None:
    logits = torch.randn(20, 151_936, generator=torch.Generator().manual_seed(0))
    together = token_logprobs(logits, list(range(20)), [3] * 20)
    for i in (0, 13, 19):
        alone = token_logprobs(logits[i : i + 1], [i], [3])[0]
        assert alone.logprobs.tolist() == together[i].logprobs.tolist()


def test_prompt_logprobs_are_rows_against_the_next_token() -> None:
    """Row i of the logits predicts token i + 1, as transformers' loss has it."""
    prompt = [3, 1, 4, 1, 5]
    logits = torch.randn(len(prompt), 8, generator=torch.Generator().manual_seed(0))
    found = token_logprobs(logits[:-1], prompt[1:], [0] * 4)
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(prompt[1:]))
    assert -np.mean([entry.logprobs[0] for entry in found]) == pytest.approx(loss.item(), abs=1e-5)


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="must agree"):
        token_logprobs(torch.zeros(2, 4), [1], [0, 0])
    assert token_logprobs(torch.zeros(0, 4), [], []) == []
