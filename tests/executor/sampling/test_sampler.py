from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from chairlift.base.sampling_params import SamplingParams
from chairlift.base.sampling_row import SamplingRow
from chairlift.base.seeds import sample_seed
from chairlift.base.step_batch import mask_bits
from chairlift.executor.sampling import sampler as sampler_module
from chairlift.executor.sampling.sampler import Sampler, SamplerOutput
from tests.executor.sampling import reference

VOCAB = 60
EOS = 7
Tokens = npt.NDArray[np.int32]
Case = tuple[SamplingRow, Tokens]

sample = Sampler()


def greedy(**settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=None, **settings)


def make_row(params: SamplingParams, prompt: int = 4, seed: int = 0, **more: Any) -> SamplingRow:
    return SamplingRow(params=params, seed=sample_seed(seed, 0), num_prompt_tokens=prompt, **more)


def some_tokens(seed: int, length: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, VOCAB, length, dtype=np.int32)


def some_logits(seed: int, rows: int, vocab: int = VOCAB, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """One request with any mixture of settings, and its tokens so far."""
    ids = st.integers(0, VOCAB - 1)
    maybe = st.booleans()
    fields: dict[str, Any] = {"max_tokens": None}
    fields["temperature"] = draw(st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5]))
    if draw(maybe):
        fields["top_k"] = draw(st.integers(1, VOCAB + 5))
    if draw(maybe):
        fields["top_p"] = draw(st.floats(0.05, 0.99))
    if draw(maybe):
        fields["min_p"] = draw(st.floats(0.001, 0.9))
    if draw(maybe):
        fields["repetition_penalty"] = draw(st.floats(0.5, 2.0))
    if draw(maybe):
        fields["presence_penalty"] = draw(st.floats(-2, 2))
    if draw(maybe):
        fields["frequency_penalty"] = draw(st.floats(-2, 2))
    if draw(maybe):
        fields["logit_bias"] = draw(st.dictionaries(ids, st.floats(-20, 20), max_size=4))
    if draw(maybe):
        fields["allowed_token_ids"] = draw(st.lists(ids, min_size=3, max_size=30))
    if draw(maybe):
        fields["min_tokens"] = draw(st.integers(0, 20))
    if draw(maybe):
        fields["logprobs"] = draw(st.integers(0, 5))
    prompt, output = draw(st.lists(ids, min_size=1, max_size=12)), draw(st.lists(ids, max_size=12))
    words = draw(st.lists(st.lists(ids, min_size=1, max_size=3), max_size=3))
    if draw(maybe) and output:
        words.append([output[-1], draw(ids)])  # one that is about to be completed
    row = SamplingRow(
        params=SamplingParams(**fields),
        seed=draw(st.integers(0, 2**64 - 1)),
        num_prompt_tokens=len(prompt),
        stop_token_ids=(EOS, 11),
        bad_word_ids=tuple(tuple(word) for word in words),
    )
    return row, np.array(prompt + output, dtype=np.int32)


def reference_scores(logits: Tensor, row: SamplingRow, tokens: Tokens) -> list[float]:
    history = tokens.tolist()
    prompt, output = history[: row.num_prompt_tokens], history[row.num_prompt_tokens :]
    shaped = reference.reshape(logits.tolist(), row.params, prompt, output, row.stop_token_ids, row.bad_word_ids)
    if row.params.greedy or max(shaped) == -math.inf:
        return shaped
    noisy = reference.truncate(shaped, row.params)
    return [x + reference.gumbel(row.seed, len(history), i) for i, x in enumerate(noisy)]


def summary(output: SamplerOutput, i: int) -> tuple[object, ...]:
    logprobs = output.logprobs[i]
    found = None if logprobs is None else (logprobs.token_ids.tolist(), logprobs.logprobs.tolist(), logprobs.rank)
    return output.token_ids[i], found, output.errors.get(i)


@given(batch=st.lists(cases(), min_size=1, max_size=6), seed=st.integers(0, 10**6))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_whole_pipeline_equals_the_slow_reference_and_each_row_alone(batch: list[Case], seed: int) -> None:
    logits = some_logits(seed, len(batch))
    before = logits.clone()
    rows, tokens = [row for row, _ in batch], [history for _, history in batch]
    output = sample(logits, rows, tokens)
    assert torch.equal(logits, before)
    for i, (row, history) in enumerate(batch):
        scores = reference_scores(logits[i], row, history)
        token_id = output.token_ids[i]
        if max(scores) == -math.inf:
            assert token_id == -1
            assert "no token is left" in output.errors[i]
        else:
            # float32 against float64: the choice may differ where the scores do not, and at the very edge of a nucleus.
            assert scores[token_id] == pytest.approx(max(scores), abs=1e-4)
            assert (output.logprobs[i] is None) == (row.params.logprobs is None)
        assert summary(sample(logits[i : i + 1], [row], [history]), 0) == summary(output, i)


ALONE: dict[str, dict[str, Any]] = {
    "logit_bias": {"logit_bias": {3: 9.0}},
    "allowed_token_ids": {"allowed_token_ids": [4, 5]},
    "repetition_penalty": {"repetition_penalty": 2.0},
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": 2.0},
}


@pytest.mark.parametrize("settings", ALONE.values(), ids=list(ALONE))
def test_every_setting_works_alone(settings: dict[str, Any]) -> None:
    """Each of them takes the token from the one that would have won, which stands in the output once."""
    logits = torch.linspace(0, 1, VOCAB).flip(0).unsqueeze(0).contiguous()  # token 0 leads
    row, tokens = make_row(greedy(**settings), prompt=1), np.array([30, 0], dtype=np.int32)
    scores = reference_scores(logits[0], row, tokens)
    drawn = sample(logits, [row], [tokens]).token_ids[0]
    assert drawn == scores.index(max(scores)) != 0


def test_plain_greedy_takes_the_lowest_of_the_highest() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = torch.zeros(2, VOCAB, dtype=dtype)
        logits[0, [40, 9, 33]] = 2.0
        rows = [make_row(greedy())] * 2
        assert rows[0].plain_greedy
        assert sample(logits, rows, [some_tokens(0, 5)] * 2) == SamplerOutput([9, 0], [None, None], {})


def test_top_k_one_is_greedy_also_on_a_tie() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [40, 9, 33]] = 2.0
    for seed in range(10):
        assert sample(logits, [make_row(SamplingParams(top_k=1), seed=seed)], [some_tokens(0, 5)]).token_ids == [9]


SETTINGS = {
    "plain greedy": greedy(),
    "greedy with logprobs": greedy(logprobs=2),
    "greedy with penalties": greedy(repetition_penalty=1.5),
    "sampled": SamplingParams(),
    "sampled with top_p": SamplingParams(top_p=0.5, logprobs=0),
}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_finite_logits_fails_alone(bad: float) -> None:
    params = list(SETTINGS.values())
    rows, tokens = [make_row(p, seed=i) for i, p in enumerate(params)], [some_tokens(i, 9) for i in range(len(params))]
    logits = some_logits(0, len(rows))
    healthy = sample(logits, rows, tokens)
    assert healthy.errors == {}
    for broken in range(len(rows)):
        spoilt = logits.clone()
        if bad == -math.inf:
            spoilt[broken] = bad
        else:
            spoilt[broken, 17] = bad
        output = sample(spoilt, rows, tokens)
        assert list(output.errors) == [broken]
        assert {math.inf: "+inf", -math.inf: "-inf"}.get(bad, "NaN") in output.errors[broken]
        assert output.token_ids[broken] == -1
        assert output.logprobs[broken] is None
        for i in range(len(rows)):
            assert i == broken or summary(output, i) == summary(healthy, i)


def test_settings_that_exclude_every_token_fail_the_row() -> None:
    params = greedy(allowed_token_ids=[EOS], min_tokens=3)
    rows = [make_row(greedy()), make_row(params, stop_token_ids=(EOS,)), make_row(SamplingParams())]
    output = sample(some_logits(0, 3), rows, [some_tokens(0, 4)] * 3)
    assert [token_id == -1 for token_id in output.token_ids] == [False, True, False]
    assert list(output.errors) == [1]
    assert "no token is left" in output.errors[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_overflowing_scores_fail_the_row(temperature: float) -> None:
    row = make_row(SamplingParams(temperature=temperature, repetition_penalty=1e-6))
    output = sample(torch.full((1, VOCAB), 1e35), [row], [some_tokens(0, 4)])
    assert output.token_ids == [-1]
    assert "overflow" in output.errors[0]


def test_min_tokens_masks_stop_tokens_until_reached() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS], logits[0, 20] = 5.0, 4.0
    row = make_row(greedy(min_tokens=3), prompt=4, stop_token_ids=(EOS,))
    got = [sample(logits, [row], [some_tokens(0, 4 + generated)]).token_ids[0] for generated in range(6)]
    assert got == [20, 20, 20, EOS, EOS, EOS]


def test_bad_words_look_at_the_output_only() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 5] = 1.0
    row = make_row(greedy(), prompt=2, bad_word_ids=((8, 9, 5), (3,)))

    def next_token(*tokens: int) -> int:
        return sample(logits, [row], [np.array(tokens, dtype=np.int32)]).token_ids[0]

    assert next_token(8, 9) == 5  # the words before it stand in the prompt
    assert next_token(1, 8, 9) == 5  # half of them do
    assert next_token(1, 1, 8, 9) == 0
    assert next_token(1, 1, 9, 8) == 5


def test_ids_outside_the_vocabulary_are_harmless() -> None:
    params = greedy(min_tokens=5, logit_bias={VOCAB + 3: 100.0}, repetition_penalty=1.1)
    row = make_row(params, stop_token_ids=(VOCAB + 1,), bad_word_ids=((VOCAB,),))
    logits = some_logits(0, 1)
    assert sample(logits, [row], [np.array([VOCAB + 9], dtype=np.int32)]).token_ids == [int(logits.argmax())]


def test_masks_hold_for_greedy_and_sampled_rows() -> None:
    logits = some_logits(4, 40)
    allowed = dict.fromkeys(range(40), mask_bits([3, 4, 50], VOCAB))
    rows = [make_row(greedy() if i % 2 else SamplingParams(), seed=i) for i in range(40)]
    drawn = sample(logits, rows, [some_tokens(0, 5)] * 40, allowed).token_ids
    assert set(drawn) == {3, 4, 50}
    for i in range(1, 40, 2):
        assert drawn[i] == max((3, 4, 50), key=lambda token_id: float(logits[i, token_id]))
    assert sample(logits[1::2], rows[1::2], [some_tokens(0, 5)] * 20, allowed).token_ids == drawn[1::2]


def test_each_row_has_its_own_mask_also_across_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "_VALUES_PER_SLICE", 2 * VOCAB)
    masks = {i: mask_bits([10 + i], VOCAB) for i in range(7)}
    rows = [make_row(greedy() if i % 2 else SamplingParams(), seed=i) for i in range(7)]
    logits, histories = some_logits(4, 7), [some_tokens(0, 5)] * 7
    assert sample(logits, rows, histories, masks).token_ids == list(range(10, 17))
    free = sample(logits, rows, histories).token_ids
    assert sample(logits, rows, histories, {4: masks[4]}).token_ids == [*free[:4], 14, *free[5:]]


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = some_logits(1, 1)
    row = make_row(SamplingParams(temperature=0.2, logit_bias={4: 100.0}, logprobs=3), seed=3)
    output = sample(logits, [row], [some_tokens(0, 5)])
    found = output.logprobs[0]
    assert found is not None
    assert output.token_ids == [4]
    assert found.token_ids.tolist() == [4, *reference.top_ids(logits[0].tolist(), 3)]
    assert found.logprobs[0] == pytest.approx(torch.log_softmax(logits[0], -1)[4].item(), abs=1e-6)


def test_the_same_seed_draws_the_same_and_others_do_not() -> None:
    logits = some_logits(2, 1, scale=0.1).expand(200, -1).contiguous()

    def draw(position: int, seeds: list[int]) -> list[int]:
        rows = [SamplingRow(SamplingParams(), seed, 4) for seed in seeds]
        return sample(logits, rows, [some_tokens(0, position)] * 200).token_ids

    assert len(set(draw(5, [sample_seed(9, 0)] * 200))) == 1
    assert draw(5, [sample_seed(9, i) for i in range(200)]) == draw(5, [sample_seed(9, i) for i in range(200)])
    assert len(set(draw(5, [sample_seed(9, i) for i in range(200)]))) > VOCAB // 2
    assert draw(5, [sample_seed(9, i) for i in range(200)]) != draw(6, [sample_seed(9, i) for i in range(200)])


def test_a_row_does_not_depend_on_its_batch_in_a_large_vocabulary(
    monkeypatch: pytest.MonkeyPatch, two_threads: None
) -> None:
    """Bit for bit in bfloat16, across slices of three rows, with every kind of row in the batch.

    The vocabulary is larger than the 32,768 values from which torch splits one reduction over threads.
    """
    vocab = 50_000
    monkeypatch.setattr(sampler_module, "_VALUES_PER_SLICE", 3 * vocab)
    kinds = [
        *SETTINGS.values(),
        SamplingParams(temperature=0.6, top_k=50, top_p=0.9, min_p=0.01, logprobs=5),
        SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, top_p=0.97),
    ]
    rows = [make_row(kinds[i % len(kinds)], seed=i) for i in range(21)]
    logits = some_logits(7, len(rows), vocab=vocab, scale=3.0).to(torch.bfloat16)
    tokens = [some_tokens(i, 6 + i) for i in range(len(rows))]
    together = sample(logits, rows, tokens)
    assert together.errors == {}
    for i in range(len(rows)):
        assert summary(sample(logits[i : i + 1], rows[i : i + 1], tokens[i : i + 1]), 0) == summary(together, i)


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="must agree"):
        sample(torch.zeros(2, 4), [make_row(greedy())], [some_tokens(0, 3)])
    assert sample(torch.zeros(0, 4), [], []) == SamplerOutput([], [], {})
