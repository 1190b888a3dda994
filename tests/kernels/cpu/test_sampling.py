"""The native sampler against :mod:`chairlift.executor.sampling`, its specification, for random mixtures of settings."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from chairlift.base.sampling_params import SamplingParams
from chairlift.base.sampling_row import SamplingRow
from chairlift.base.step_batch import mask_bits
from chairlift.executor.sampling import sampler as sampler_module
from chairlift.executor.sampling.gumbel import gumbel_argmax, gumbel_noise
from chairlift.executor.sampling.logits import apply_allowed_mask
from chairlift.executor.sampling.logprobs import TokenLogprobs, token_logprobs
from chairlift.executor.sampling.sampler import Sampler
from chairlift.kernels.cpu.library import ISA_NAMES, SAMPLING_ROW, Library, ThreadPool, load, supported_isas

SAMPLED, RAW_NAN, RAW_INF, RAW_NONE, SHAPED_NONE, SHAPED_INF = range(6)
REASONS = {
    RAW_NAN: "contain NaN",
    RAW_INF: "contain +inf",
    RAW_NONE: "every token a logit of -inf",
    SHAPED_NONE: "no token is left",
    SHAPED_INF: "overflow after penalties",
}
Int32 = npt.NDArray[np.int32]
Records = np.ndarray[Any, np.dtype[np.void]]
pytestmark = pytest.mark.usefixtures("native_library")


@dataclasses.dataclass(frozen=True)
class Case:
    """One row: raw logits float32 [V], what was asked, prompt and output so far, and which ids a grammar allows."""

    logits: Tensor
    row: SamplingRow
    history: Int32
    allowed: Tensor | None = None
    """bool [V]"""

    @property
    def mask(self) -> npt.NDArray[np.uint32]:
        assert self.allowed is not None
        return mask_bits(self.allowed.nonzero().flatten().tolist(), len(self.allowed))


@dataclasses.dataclass(frozen=True)
class Result:
    token: int
    status: int
    logprobs: TokenLogprobs | None = None


def known(ids: Sequence[int]) -> Int32:
    return np.array(ids, dtype=np.int32)


def record_of(case: Case, record: Any, kept: list[Any], target: int = -1) -> None:
    """Fill in one native record; `kept` gets what it points to."""
    params = case.row.params

    def address(array: npt.NDArray[Any]) -> int:
        kept.append(array)
        return array.ctypes.data if len(array) else 0

    fields: dict[str, Any] = {"seed": case.row.seed, "position": len(case.history), "target": target}
    fields |= {"history": address(case.history), "history_len": len(case.history)}
    fields["num_prompt_tokens"] = case.row.num_prompt_tokens
    fields["temperature"] = 0.0 if params.greedy else params.temperature
    fields |= {"top_k": max(params.top_k, 0), "top_p": params.top_p, "min_p": params.min_p}
    fields |= {"presence": params.presence_penalty, "frequency": params.frequency_penalty}
    fields["repetition"] = params.repetition_penalty
    allowed, masked = known(params.allowed_token_ids or ()), known(case.row.masked_token_ids(case.history))
    fields |= {"allowed": address(allowed), "num_allowed": len(allowed)}
    fields |= {"masked": address(masked), "num_masked": len(masked)}
    bias = params.logit_bias or {}
    fields |= {"bias_ids": address(known(list(bias))), "num_bias": len(bias)}
    fields["bias"] = address(np.array(list(bias.values()), dtype=np.float32))
    if case.allowed is not None:
        fields["mask_bits"] = address(case.mask)
    count = -1 if params.logprobs is None else params.logprobs
    fields["num_logprobs"] = count
    fields["top_ids"] = address(np.full(1 + count, -7, dtype=np.int32))
    fields["top_logprobs"] = address(np.zeros(1 + count, dtype=np.float32))
    for name, value in fields.items():
        record[name] = value


def native(cases: Sequence[Case], isa: str, targets: Sequence[int] | None = None, threads: int = 1) -> list[Result]:
    """Sample rows of one vocabulary with the kernels."""
    vocab = len(cases[0].logits)
    logits = torch.full((len(cases), -(-vocab // 16) * 16), 1e30)  # what lies behind a row must not matter
    records: Records = np.zeros(len(cases), dtype=SAMPLING_ROW)
    kept: list[list[Any]] = [[] for _ in cases]
    for i, case in enumerate(cases):
        logits[i, :vocab] = case.logits
        record_of(case, records[i], kept[i], -1 if targets is None else targets[i])
    library = load()
    assert library is not None
    with_pool = pool(threads)
    arguments = (logits.data_ptr(), logits.stride(0), len(cases), vocab, records.ctypes.data, ISA_NAMES.index(isa))
    assert library.cl_sample(with_pool.handle, *arguments) == 0
    results = []
    for record, arrays in zip(records, kept, strict=True):
        token, status = int(record["token"]), int(record["status"])
        found = TokenLogprobs(arrays[-2], arrays[-1], int(record["rank"])) if record["num_logprobs"] >= 0 else None
        results.append(Result(token, status, found if status == SAMPLED or targets is not None else None))
    return results


@functools.cache
def pool(threads: int) -> ThreadPool:
    return ThreadPool(threads, pin=False)


def reference(cases: Sequence[Case]) -> list[tuple[int, TokenLogprobs | None, str]]:
    """Token, log-probabilities and error of each row, one row at a time."""
    out = []
    for case in cases:
        masks = None if case.allowed is None else {0: case.mask}
        got = Sampler()(case.logits.unsqueeze(0), [case.row], [case.history], masks)
        out.append((got.token_ids[0], got.logprobs[0], got.errors.get(0, "")))
    return out


def make_logits(rng: np.random.Generator, vocab: int) -> Tensor:
    scale = rng.choice([0.05, 1.0, 2.0, 8.0])
    logits = rng.standard_normal(vocab).astype(np.float32) * np.float32(scale)
    kind = rng.integers(0, 8)
    if kind == 0:
        logits = np.round(logits)  # many ties
    elif kind == 1:
        logits = np.round(logits * 16) / 16
    elif kind == 2:
        logits[rng.random(vocab) < 0.9] = -np.inf
    elif kind == 3:
        logits[:] = logits[0]
    elif kind == 4:
        logits[rng.integers(0, vocab, 5)] += 12
    elif kind == 5:
        logits += rng.choice([-1e4, 1e4])
    if not np.isfinite(logits.max()):
        logits[rng.integers(0, vocab)] = 0.0
    return torch.from_numpy(logits)


def make_case(rng: np.random.Generator, vocab: int, logits: Tensor | None = None) -> Case:
    """Any mixture of settings, each there in about a third of the cases."""
    maybe = (rng.random(16) < 0.33).tolist()
    fields: dict[str, Any] = {"max_tokens": None}
    fields["temperature"] = float(rng.choice([0.0, 0.1, 0.7, 1.0, 1.0, 2.5, 50.0]))
    if maybe[0]:
        fields["top_k"] = int(rng.choice([1, 2, 5, 50, 1024, 1025, vocab // 2, vocab - 1, vocab, vocab + 5]))
    if maybe[1]:
        fields["top_p"] = float(rng.choice([1e-6, 0.3, 0.5, 0.9, 0.99, 0.9999, 1 - 1e-12]))
    if maybe[2]:
        fields["min_p"] = float(rng.choice([1e-6, 1e-3, 0.05, 0.3, 1.0]))
    if maybe[3]:
        fields["repetition_penalty"] = float(rng.choice([0.5, 0.9, 1.1, 1.7]))
    if maybe[4]:
        fields["presence_penalty"] = float(rng.uniform(-2, 2))
    if maybe[5]:
        fields["frequency_penalty"] = float(rng.uniform(-2, 2))
    if maybe[6]:
        ids = rng.integers(0, vocab + 10, 6).tolist()
        fields["logit_bias"] = {token_id: float(rng.uniform(-20, 20)) for token_id in ids}
    if maybe[7]:
        fields["allowed_token_ids"] = rng.integers(0, vocab + 10, rng.integers(6, vocab)).tolist()
    if maybe[8]:
        fields["min_tokens"] = int(rng.integers(0, 30))
    if maybe[9]:
        fields["logprobs"] = int(rng.choice([0, 1, 5, 20]))
    history = rng.integers(-2, vocab + 3, rng.integers(1, 60)).astype(np.int32)  # some ids there are not
    if maybe[10]:
        history[-10:] = history[0]
    words = [(int(rng.integers(0, vocab + 10)),), (int(history[-1]), int(rng.integers(0, vocab)))] if maybe[11] else []
    row = SamplingRow(
        params=SamplingParams(**fields),
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        num_prompt_tokens=int(rng.integers(1, len(history) + 1)),
        stop_token_ids=(3, 11),
        bad_word_ids=tuple(words),
    )
    allowed = torch.from_numpy(rng.random(vocab) < 0.7) if maybe[12] else None
    return Case(make_logits(rng, vocab) if logits is None else logits, row, history, allowed)


def without(case: Case, **settings: Any) -> Case:
    return dataclasses.replace(
        case, row=dataclasses.replace(case.row, params=dataclasses.replace(case.row.params, **settings))
    )


def nucleus_is_unsure(case: Case, token: int) -> bool:
    """Whether the token is right for a top_p that differs by a rounding error."""
    scores = case.logits.clone().unsqueeze(0)
    if case.allowed is not None:
        apply_allowed_mask(scores, torch.tensor([0]), torch.from_numpy(case.mask.view(np.int32)).unsqueeze(0))
    rest = without(case, top_p=1.0)
    sampler_module._reshape(scores, [rest.row], [rest.history])
    sampler_module._truncate(scores, [rest.row])
    ranked, order = scores[0].sort(descending=True, stable=True)
    before = torch.cumsum(torch.softmax(ranked.double(), -1), -1) - torch.softmax(ranked.double(), -1)
    for slack in (-1e-6, 1e-6):
        cut = scores.clone()
        cut[0, order[1:][before[1:] >= case.row.params.top_p + slack]] = -math.inf
        if gumbel_argmax(cut, [case.row.seed], [len(case.history)]).item() == token:
            return True
    return False


def compare(cases: Sequence[Case], isa: str) -> None:
    for case, got, (token, logprobs, error) in zip(cases, native(cases, isa), reference(cases), strict=True):
        assert (got.status != SAMPLED) == bool(error), (got, error, case)
        if error:
            assert REASONS[got.status] in error and got.token == -1
            continue
        if got.token != token:
            assert case.row.params.top_p < 1 and nucleus_is_unsure(case, got.token), (got.token, token, case)
            case_logprobs = [case.row.params.logprobs] if case.row.params.logprobs is not None else []
            found = token_logprobs(case.logits.unsqueeze(0), [got.token], case_logprobs) if case_logprobs else [None]
            logprobs = found[0]
        assert_same_logprobs(got.logprobs, logprobs, case.logits)


def assert_same_logprobs(got: TokenLogprobs | None, expected: TokenLogprobs | None, logits: Tensor) -> None:
    assert (got is None) == (expected is None)
    if got is not None and expected is not None:
        count = len(expected.token_ids)  # fewer than asked for where the vocabulary is small
        assert got.token_ids[:count].tolist() == expected.token_ids.tolist()
        assert got.rank == expected.rank
        np.testing.assert_allclose(got.logprobs[:count], expected.logprobs, atol=1e-6, rtol=1.2e-7)
        exact = torch.log_softmax(logits.double(), -1).numpy()[expected.token_ids]
        np.testing.assert_allclose(got.logprobs[:count], exact, atol=1e-6, rtol=6e-8)


SMALL_VOCABS = (17, 32, 63, 100, 129, 257, 1000)
LARGE_VOCABS = (1041, 4099, 32_000, 50_257, 151_936, 152_000)


@pytest.mark.parametrize("vocab", SMALL_VOCABS)
def test_draws_from_small_vocabularies_equal_the_reference(vocab: int, isa: str) -> None:
    rng = np.random.default_rng(vocab)
    compare([make_case(rng, vocab) for _ in range(60)], isa)


@pytest.mark.parametrize("vocab", LARGE_VOCABS)
def test_draws_from_large_vocabularies_equal_the_reference(vocab: int, isa: str) -> None:
    rng = np.random.default_rng(vocab)
    compare([make_case(rng, vocab) for _ in range(max(3, 80_000 // vocab))], isa)


@pytest.mark.nightly
@pytest.mark.parametrize("vocab", [*SMALL_VOCABS, *LARGE_VOCABS])
def test_draws_of_many_cases_equal_the_reference(vocab: int, isa: str) -> None:
    rng = np.random.default_rng(10 * vocab)
    for _ in range(10):
        compare([make_case(rng, vocab) for _ in range(60 if vocab < 1041 else max(3, 80_000 // vocab))], isa)


def make_row(seed: int = 5, **settings: Any) -> SamplingRow:
    return SamplingRow(params=SamplingParams(max_tokens=None, **settings), seed=seed, num_prompt_tokens=1)


def some_logits(vocab: int, seed: int = 0, scale: float = 2.0) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale


SEED = 5


@functools.cache
def noise_of(token_id: int) -> Tensor:
    """Noise of one id at 200,000 positions."""
    count = 200_000
    return gumbel_noise([SEED] * count, range(count), torch.full((count, 1), token_id)).squeeze(1)


def winning_case(logits: Tensor, token_id: int, row: SamplingRow) -> Case:
    """A position at which that id wins as long as nothing is cut."""
    for position in noise_of(token_id).topk(20).indices.tolist():
        if gumbel_argmax(logits.unsqueeze(0), [SEED], [position]).item() == token_id:
            return Case(logits, row, np.zeros(position, dtype=np.int32))
    pytest.fail(f"{token_id} never wins")


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("k", [1, 50, 1024, 1025, 2500])
def test_top_k_cuts_at_the_right_id(k: int, ties: bool, isa: str) -> None:
    """Noise that would let the last id that stays win, and the first one that falls."""
    logits = some_logits(3000, scale=0.02)
    if ties:
        logits = (logits * 50).round() / 50
    order = logits.sort(descending=True, stable=True).indices.tolist()
    for token_id, stays in ((order[k - 1], True), (order[k], False)):
        case = winning_case(logits, token_id, make_row(SEED, top_k=k))
        assert (native([case], isa)[0].token == token_id) == stays
        compare([case], isa)


def test_top_k_keeps_the_few_ids_that_are_left(isa: str) -> None:
    logits = some_logits(3000, scale=0.02) - 5
    logits[torch.arange(3000) % 16 != 0] = -math.inf
    order = logits.sort(descending=True, stable=True).indices.tolist()
    for token_id, stays in ((order[149], True), (order[150], False)):
        case = winning_case(logits, token_id, make_row(SEED, top_k=150, logprobs=20))
        assert (native([case], isa)[0].token == token_id) == stays
        compare([case], isa)


NUCLEI = [(0.02, 1), (0.02, 700), (0.02, 2222), (1.0, 40), (1.0, 1500), (2.5, 20), (0.0, 1500)]


@pytest.mark.parametrize(("scale", "kept"), NUCLEI)
@pytest.mark.parametrize("top_k", [0, 1000, 2400])
def test_top_p_cuts_at_the_right_id(scale: float, kept: int, top_k: int, isa: str) -> None:
    logits = some_logits(3000, scale=scale)
    order = logits.sort(descending=True, stable=True).indices[: top_k or None]
    if kept >= len(order):
        kept = 990
    ranked = torch.softmax(logits[order].double(), -1).tolist()
    row = make_row(SEED, top_p=math.fsum(ranked[:kept]) - ranked[kept - 1] / 2, top_k=top_k)
    for token_id, stays in ((int(order[kept - 1]), True), (int(order[kept]), False)):
        case = winning_case(logits, token_id, row)
        assert (native([case], isa)[0].token == token_id) == stays
        compare([case], isa)


@pytest.mark.parametrize("kept", [1, 30, 800])
def test_min_p_cuts_at_the_right_id(kept: int, isa: str) -> None:
    logits = some_logits(3000, scale=1.0)
    values, order = logits.sort(descending=True, stable=True)
    row = make_row(SEED, min_p=math.exp((values[kept - 1] + values[kept]) / 2 - values[0]))
    for token_id, stays in ((int(order[kept - 1]), True), (int(order[kept]), False)):
        case = winning_case(logits, token_id, row)
        assert (native([case], isa)[0].token == token_id) == stays
        compare([case], isa)


@pytest.mark.parametrize("temperature", [0.0, 0.05, 1.0, 20.0])
@pytest.mark.parametrize("vocab", [17, 512, 5000, 151_936])
def test_fused_and_stored_choices_agree(vocab: int, temperature: float, isa: str) -> None:
    """Rows that need nothing else are chosen chunk by chunk; asking for a log-probability stores the logits."""
    cases = [
        Case(some_logits(vocab, seed), make_row(seed, temperature=temperature), np.zeros(seed + 1, dtype=np.int32))
        for seed in range(10 if vocab < 100_000 else 3)
    ]
    compare(cases, isa)
    tokens = [result.token for result in native(cases, isa)]
    assert tokens == [result.token for result in native([without(case, logprobs=0) for case in cases], isa)]
    if vocab > 17 and temperature > 0.05:
        assert len(set(tokens)) > 1


BAD_LOGITS = {
    "nan": (math.nan, RAW_NAN),
    "inf": (math.inf, RAW_INF),
    "inf before nan": (math.inf, RAW_NAN),
    "none": (-math.inf, RAW_NONE),
}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 0.7, "top_p": 0.5, "logprobs": 1},
]


@pytest.mark.parametrize("kind", BAD_LOGITS)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_bad_logits_fail_their_row_only(kind: str, settings: dict[str, Any], isa: str) -> None:
    value, status = BAD_LOGITS[kind]
    for vocab, place in ((40, 0), (40, 39), (1000, 517)):
        bad = torch.full((vocab,), value) if kind == "none" else some_logits(vocab)
        bad[place] = value
        if kind == "inf before nan":
            bad[vocab - 1 - place] = math.nan
        row, history = make_row(**settings), np.array([1, 2], dtype=np.int32)
        good = Case(some_logits(vocab, 1), row, history)
        cases = [good, Case(bad, row, history), good]
        compare(cases, isa)
        results = native(cases, isa)
        assert [result.status for result in results] == [SAMPLED, status, SAMPLED]
        assert results[0].token == results[2].token


def test_nothing_left_and_overflow_have_their_own_status(isa: str) -> None:
    vocab, history = 50, np.array([1, 2], dtype=np.int32)
    logits = some_logits(vocab)
    huge = torch.full((vocab,), 3e38)
    nothing = torch.zeros(vocab, dtype=torch.bool)
    tiny, lowest = make_row(temperature=0.01), torch.full((vocab,), -3e38)
    penalised = make_row(temperature=0.0, repetition_penalty=0.01)
    cases = [
        (Case(logits, make_row(temperature=1.0, allowed_token_ids=[900]), history), SHAPED_NONE),
        (Case(logits, make_row(temperature=0.0), history, nothing), SHAPED_NONE),
        (Case(lowest, tiny, history), SHAPED_NONE),
        (Case(lowest, without(Case(lowest, tiny, history), top_k=3).row, history), SHAPED_NONE),
        (Case(huge, tiny, history), SHAPED_INF),
        (Case(huge, without(Case(huge, tiny, history), top_k=3).row, history), SHAPED_INF),
        (Case(huge, penalised, history), SHAPED_INF),
        (Case(huge, make_row(temperature=1.0), history), SAMPLED),
    ]
    compare([case for case, _ in cases], isa)
    assert [result.status for result in native([case for case, _ in cases], isa)] == [status for _, status in cases]


@pytest.mark.parametrize("vocab", [17, 1000, 50_257, 151_936])
def test_log_probabilities_equal_the_reference(vocab: int, isa: str) -> None:
    for scale in (0.1, 2.0, 10.0):
        for rounded in (False, True):
            logits = some_logits(vocab, scale=scale)
            row = make_row(temperature=1.0, logprobs=16)
            compare([Case(logits.round() if rounded else logits, row, known([1]))], isa)


@pytest.mark.parametrize("vocab", [30, 2000, 32_000])
def test_targets_report_what_they_would_have_been_drawn_with(vocab: int, isa: str) -> None:
    logits = torch.stack([some_logits(vocab, seed, 3.0) for seed in range(4)])
    logits[2] = (logits[2] / 3).round()
    logits[3, ::2] = -math.inf
    targets, counts = [0, vocab - 1, 7, 4], [0, 3, 20, 25]
    cases = [
        # Parameters for generated tokens must not touch the prompt's log-probabilities.
        Case(row, make_row(temperature=1.0, top_k=2, logprobs=min(count, 20), allowed_token_ids=[5]), known([1, 2]))
        for row, count in zip(logits, counts, strict=True)
    ]
    expected = token_logprobs(logits, targets, [min(count, 20) for count in counts])
    results = native(cases, isa, targets)
    for target, got, logprobs, row_logits in zip(targets, results, expected, logits, strict=True):
        assert (got.token, got.status) == (target, SAMPLED)
        assert_same_logprobs(got.logprobs, logprobs, row_logits)
    (failed,) = native([dataclasses.replace(cases[1], logits=logits[0] / 0.0)], isa, [1])
    assert failed.status == RAW_INF and failed.logprobs is not None and np.isnan(failed.logprobs.logprobs).all()


def snapshot(results: Sequence[Result]) -> list[tuple[Any, ...]]:
    """All bits of the results."""
    return [
        (r.token, r.status, *((r.logprobs.token_ids.tobytes(), r.logprobs.logprobs.tobytes()) if r.logprobs else ()))
        for r in results
    ]


@pytest.mark.parametrize("vocab", [100, 5000])
def test_a_row_does_not_depend_on_the_others(vocab: int, isa: str) -> None:
    """Alone, in a batch, in another order, on two threads, and on another path: the same bits."""
    rng = np.random.default_rng(vocab)
    cases = [make_case(rng, vocab) for _ in range(40)]
    expected = snapshot([result for case in cases for result in native([case], isa)])
    assert snapshot(native(cases, isa)) == expected
    assert snapshot(native(cases[::-1], isa)) == expected[::-1]
    assert snapshot(native(cases, isa, threads=2)) == expected
    assert snapshot(native(cases, supported_isas()[0])) == expected


def test_only_settings_that_change_scores_need_stored_logits(native_library: Library) -> None:
    rows = {True: SETTINGS[1:2] + SETTINGS[3:], False: [SETTINGS[0], SETTINGS[2]]}
    rows[True] += [{"min_p": 0.1}, {"logit_bias": {1: 1.0}}, {"allowed_token_ids": [1]}, {"presence_penalty": 0.1}]
    rows[True] += [{"frequency_penalty": 0.1}, {"repetition_penalty": 1.1}, {"logprobs": 0}]
    for expected, all_settings in rows.items():
        for settings in all_settings:
            record: Records = np.zeros(1, dtype=SAMPLING_ROW)
            record_of(Case(some_logits(20), make_row(**settings), known([1])), record[0], [])
            assert bool(native_library.cl_needs_logits(record.ctypes.data)) == expected
