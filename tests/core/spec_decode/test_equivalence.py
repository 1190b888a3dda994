"""An answer with drafts is the answer without them, whatever the drafts are: on the native kernels to the last bit.

Each case is a random model and a random mixture of requests. They are answered one at a time without drafts, then
together under random settings with drafts: right ones, wrong ones, some beyond the end, some that end the answer, some
that are stale. PyTorch rounds by the size of a batch, so there only the tokens are compared, in float32.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from chairlift import LLM, RequestOutput, SamplingParams
from chairlift.core.kv_cache.state_backups import StateBackups
from chairlift.core.kv_cache.tables import NewBlocks
from chairlift.core.request import Request
from chairlift.core.scheduler.drafts import Drafts, Speculator
from chairlift.core.scheduler.output import Chunk
from chairlift.core.spec_decode.adaptive import AdaptiveSpeculator
from chairlift.core.spec_decode.ngram import NgramProposer
from chairlift.core.spec_decode.suffix import SuffixProposer
from chairlift.errors import InvariantError
from chairlift.executor.input_batch import InputBatch
from chairlift.kernels.cpu.library import supported_isas
from chairlift_lab.sim.drafts import ScriptedDrafts
from tests.equivalence.cases import EOS, Job, longest, run
from tests.equivalence.test_determinism import MODELS, SAMPLING, WITHOUT_STATES, facts, first_difference
from tests.kernels.cpu.models import VOCAB, tiny_model
from tests.models.tiny import RECURRENT_FAMILIES
from tests.native import needs_kernels
from tests.sweep import sweep

MOST_TOKENS = 400
STATEFUL: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {"hidden_size": 64, **RECURRENT_FAMILIES[name]}) for name in ("falcon_h1", "mamba2", "qwen3_5_text")
}
"""Models with recurrent states, beside ``lfm2``."""
WITH_STATES = ["lfm2", *STATEFUL]
ASKED: list[dict[str, Any]] = [
    *SAMPLING,
    {"temperature": 1.5, "stop": ["w7", "w12 w"], "include_stop_str_in_output": True},
    {"temperature": 1.5, "stop": ["w7"], "min_tokens": 6},
    {"temperature": 1.0, "stop_token_ids": list(range(20, 40))},
    {"temperature": 1.5, "stop_token_ids": list(range(20, 60)), "min_tokens": 7},
    {"temperature": 1.5, "bad_words": [f"w{i}" for i in range(2, 90)]},
    {"temperature": 0.0, "bad_words": ["w3 w4", *(f"w{i}" for i in range(60, 90))], "frequency_penalty": 1.0},
]
Hook = Callable[[LLM], Speculator]


def draw_jobs(rng: random.Random, repetitive: bool) -> list[Job]:
    """A few requests; half of them begin alike. Repetitive ones hold few different tokens."""
    most = rng.choice((20, 60, 60, 120))
    known = [rng.randrange(2, VOCAB) for _ in range(3)] if repetitive else range(2, VOCAB)
    root = [rng.choice(known) for _ in range(most)]
    jobs: list[Job] = []
    for _ in range(rng.randint(2, 7)):
        shared = root[: rng.randint(1, most)] if rng.random() < 0.5 else []
        fresh = [rng.choice(known) for _ in range(rng.randint(1, max(1, most - len(shared))))]
        more: dict[str, Any] = {"seed": rng.getrandbits(40), **rng.choice(ASKED)}
        if repetitive:
            more.setdefault("allowed_token_ids", [EOS, *known, *range(20, 23)])
            more.pop("bad_words", None)  # they could leave no token
        if rng.random() < 0.6:
            more["logprobs"] = rng.choice((0, 1, 5))
        if rng.random() < 0.15:
            more["prompt_logprobs"] = rng.choice((0, 2))
        params = SamplingParams(
            n=rng.choice((1, 1, 1, 3)),
            max_tokens=rng.randint(8, 24),
            ignore_eos=rng.random() < 0.5,
            priority=rng.choice((None, -1, 2)),
            **more,
        )
        jobs.append(Job((shared + fresh)[:most], params))
    return jobs


def draw_settings(rng: random.Random) -> dict[str, Any]:
    return {
        "max_num_batched_tokens": rng.choice((3, 7, 16, 17, 33, 64, 256, 2048)),
        "max_num_seqs": rng.choice((1, 3, 8, 64)),
        "block_size": rng.choice((16, 16, 32, 64)),
        "enable_prefix_caching": rng.random() < 0.6,
        "num_lookahead_steps": rng.choice((None, 0, 1, 2)),
        "batching": rng.choice(("continuous", "continuous", "continuous", "static", "dynamic")),
        "preemption_mode": rng.choice(("auto", "recompute", "swap")),
        "threads": rng.choice((1, 2)),
    }


class Models:
    """Tiny models, and for each an engine that answers one request at a time without drafts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.model_dir = functools.cache(self._model_dir)
        self.alone = functools.cache(self._alone)

    def _model_dir(self, model: str) -> Path:
        family, more = {**MODELS, **STATEFUL}[model]
        where = tiny_model(self._folder / model, family, max_position_embeddings=MOST_TOKENS, **more)
        vocabulary = {f"w{index}": index for index in range(VOCAB)}
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
        words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        words.save(str(where / "tokenizer.json"))
        (where / "tokenizer_config.json").write_text("{}")
        return where

    def _alone(self, model: str, kernels: str, dtype: str) -> LLM:
        return self.llm(model, kernels, dtype, num_kv_blocks=120, enable_prefix_caching=False, threads=1)

    def llm(self, model: str, kernels: str, dtype: str, **settings: Any) -> LLM:
        return LLM(
            self.model_dir(model), kernels=kernels, dtype=dtype, scheduling_policy="priority", seed=0, **settings
        )


def everything(output: RequestOutput) -> list[tuple[str, Any]]:
    texts = [(f"text of answer {answer.index}", (answer.text, answer.stop_reason)) for answer in output.outputs]
    return [*facts(output), *texts]


def only_tokens(output: RequestOutput) -> list[tuple[str, Any]]:
    return [(name, fact) for name, fact in everything(output) if "logprobs" not in name]


def compare(
    expected: Sequence[RequestOutput],
    outputs: Sequence[RequestOutput],
    jobs: Sequence[Job],
    about: Sequence[Any],
    look: Callable[[RequestOutput], list[tuple[str, Any]]] = everything,
) -> None:
    """Fail if an output with drafts differs from the one without. The message contains ``about``, the settings."""
    for i, (one, other) in enumerate(zip(expected, outputs, strict=True)):
        for (name, truth), (_, found) in zip(look(one), look(other), strict=True):
            assert found == truth, (
                f"{name} of request {i} of {len(jobs)} differ without and with drafts: {first_difference(truth, found)}"
                f" ({', '.join(map(str, about))}, {jobs[i].params})"
            )


def scripted(seed: int, outputs: Sequence[RequestOutput]) -> Speculator:
    """Drafts made from the answers that were given without."""
    known: dict[str, list[int]] = {}
    for index, output in enumerate(outputs):
        for answer in output.outputs:
            known[f"{index}#{answer.index}" if len(output.outputs) > 1 else f"{index}"] = list(answer.token_ids)
    return ScriptedDrafts(seed, lambda request: known[request.request_id], VOCAB, EOS)


def eager(speculator: AdaptiveSpeculator) -> AdaptiveSpeculator:
    """Let the first rows have as many drafts as later ones."""
    speculator.reach = speculator.most
    return speculator


def by_ngrams(seed: int) -> Speculator:
    """The real proposer, for which every draft pays."""
    rng = random.Random(seed)
    return eager(AdaptiveSpeculator(lambda step: 1.0, rng.randint(1, 8), NgramProposer(rng.randint(1, 3))))


def by_suffixes(seed: int) -> Speculator:
    """Suffixes of the request's own tokens and of answers of earlier requests, for which every draft pays."""
    rng = random.Random(seed)
    proposer = SuffixProposer(rng.randint(1, 3), 24, rng.choice((1.0, 3.0)), rng.choice((0.0, 0.3)), 50)
    return eager(AdaptiveSpeculator(lambda step: 1.0, rng.randint(1, 8), proposer))


def by_predictions(seed: int) -> Speculator:
    """Texts that requests expect, alone or before n-grams."""
    rng = random.Random(seed)
    return eager(AdaptiveSpeculator(lambda step: 1.0, rng.randint(1, 8), rng.choice((None, NgramProposer(2)))))


def expecting(job: Job, output: RequestOutput, rng: random.Random) -> Job:
    """The request with a text that it expects: its answer with a few changes."""
    text = list(rng.choice(output.outputs).token_ids)
    for _ in range(rng.randint(0, 3)):
        place = rng.randrange(len(text) + 1)
        text[place : place + rng.randint(0, 2)] = [rng.randrange(2, VOCAB) for _ in range(rng.randint(0, 2))]
    return Job(job.prompt, dataclasses.replace(job.params, prediction=text or None))


def check(
    models: Models,
    kernels: str,
    dtypes: Sequence[str],
    seed: int,
    kind: str,
    names: Sequence[str] = WITHOUT_STATES,
    **further: Any,
) -> collections.Counter[str]:
    """``further`` are settings that are not drawn."""
    rng = random.Random(seed)
    model, dtype, settings = rng.choice(names), rng.choice(dtypes), draw_settings(rng) | further
    jobs = draw_jobs(rng, repetitive=kind != "scripted")
    alone = models.alone(model, kernels, dtype)
    expected = [run(alone, [job])[0] for job in jobs]
    most = -(-longest(jobs) // settings["block_size"]) * max(job.params.n for job in jobs)
    blocks = most + 2 if rng.random() < 0.4 else len(jobs) * most + 2
    llm = models.llm(model, kernels, dtype, num_kv_blocks=blocks, **settings)
    scheduler = llm.engine.scheduler
    if kind == "predicted":
        jobs = [expecting(job, output, rng) for job, output in zip(jobs, expected, strict=True)]
        speculator = by_predictions(seed)
    else:
        makers = {"ngrams": by_ngrams, "suffixes": by_suffixes}
        speculator = makers[kind](seed) if kind in makers else scripted(seed, expected)
    scheduler.drafts = Drafts(scheduler.batch, speculator)
    arrival, preempting = rng.choice(("together", "reversed", "staggered", "staggered")), rng.random() < 0.3
    outputs = run(llm, jobs, arrival, preempting=preempting, seed=seed)
    about = (model, dtype, kernels, settings, arrival)
    compare(expected, outputs, jobs, about, only_tokens if kernels == "torch" else everything)
    told = collections.Counter[str]()
    for answer in (answer for output in outputs for answer in output.outputs):
        told.update(accepted=answer.accepted_prediction_tokens, rejected=answer.rejected_prediction_tokens)
    if speculator.only_known:
        assert told["accepted"] == scheduler.drafts.num_accepted
        assert told.total() == scheduler.drafts.num_drafts
    return collections.Counter(
        predicted=told["accepted"],
        accepted=scheduler.drafts.num_accepted,
        rejected=scheduler.drafts.num_drafts - scheduler.drafts.num_accepted,
        preempted=scheduler.num_preemptions,
        swapped=scheduler.preemptor.num_swaps,
        cached=sum(output.num_cached_tokens for output in outputs),
    )


def check_all(
    models: Models, kernels: str, dtypes: Sequence[str], count: int, kind: str, request: pytest.FixtureRequest
) -> None:
    seen: collections.Counter[str] = collections.Counter()
    sweep(request, count, lambda seed: seen.update(check(models, kernels, dtypes, seed, kind)))
    if request.config.getoption("--seeds") is None:  # else there may be too few to say
        enough = {"accepted": 3.0 if count >= 10 else 2.0, "rejected": 3.0}  # a few cases differ more
        if kind == "predicted":
            enough["predicted"] = 3.0
        if count >= 30:
            enough.update(cached=1, preempted=1 / 4, swapped=1 / 20)
        few = [name for name, share in enough.items() if seen[name] < share * count]
        assert not few, f"{seen}: equality would prove little"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


KINDS = ("scripted", "ngrams", "suffixes", "predicted")
SHARE = 30 // max(1, len(supported_isas()))
"""Cases of each instruction-set path; many more at night."""


@needs_kernels
@pytest.mark.parametrize("count", [SHARE, pytest.param(20 * SHARE, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("isa", supported_isas())
def test_drafts_change_no_bit_on_the_native_kernels(
    isa: str, kind: str, count: int, models: Models, request: pytest.FixtureRequest
) -> None:
    check_all(models, isa, ("bfloat16", "float32"), count, kind, request)


@needs_kernels
@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.nightly)])
def test_wrong_drafts_change_no_bit_of_recurrent_states(
    count: int, models: Models, request: pytest.FixtureRequest
) -> None:
    """States go back to their copies. Snapshots are taken often, so that drafts reach their borders."""
    seen: collections.Counter[str] = collections.Counter()
    further = {"batching": "continuous", "block_size": 16, "max_num_seqs": 8}

    def one(seed: int) -> None:
        spans = random.Random(seed).choice((16, 32, None))
        more = {**further, "state_snapshot_interval": spans}
        seen.update(check(models, supported_isas()[-1], ("bfloat16", "float32"), seed, "scripted", WITH_STATES, **more))

    sweep(request, count, one)
    assert seen["accepted"] > count and seen["rejected"] > count, seen


@pytest.mark.parametrize("count", [4, pytest.param(100, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token_on_pytorch(
    kind: str, count: int, models: Models, request: pytest.FixtureRequest
) -> None:
    check_all(models, "torch", ("float32",), count, kind, request)


# -- the test can fail -------------------------------------------------------------------------------------------------


def accepts_too_much(patch: pytest.MonkeyPatch) -> None:
    right = Chunk.num_accepted
    patch.setattr(Chunk, "num_accepted", lambda self, tokens: min(len(self.drafts), right(self, tokens) + 1))


def keeps_what_was_rejected(patch: pytest.MonkeyPatch) -> None:
    settle = InputBatch._settle

    def wrong(self: InputBatch, verifies: Any, token_ids: list[int]) -> None:
        settle(self, verifies, token_ids)
        for _, slot, chunk in verifies:
            self.num_computed[slot] = chunk.end

    patch.setattr(InputBatch, "_settle", wrong)


def goes_on_behind_a_stop(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Drafts, request: Request, right: Sequence[int], sampled: Any, place: int) -> None:
        for at, token in enumerate(right):
            request.token_ids.append(token)
            sampled[place + at] = request
        request.num_computed_tokens += len(right) - 1
        self._batch.num_computed_tokens += len(right) - 1

    patch.setattr(Drafts, "_take", wrong)


def keeps_the_state_of_wrong_drafts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Drafts, "_go_back", lambda self, request, chunk: None)


def goes_back_to_the_wrong_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StateBackups, "restore", lambda self, request: [NewBlocks(0, 0, [])] * len(self._spans))


def tells_nobody_of_the_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Drafts, "take_restored", lambda self: [])


@pytest.mark.planted("test_wrong_drafts_change_no_bit_of_recurrent_states")
@needs_kernels
@pytest.mark.parametrize(
    "plant", [keeps_the_state_of_wrong_drafts, goes_back_to_the_wrong_state, tells_nobody_of_the_state]
)
def test_a_planted_bug_of_states_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    def search() -> None:
        for seed in range(6):
            check(models, supported_isas()[-1], ("float32",), seed, "scripted", WITH_STATES, batching="continuous")

    with pytest.raises((AssertionError, InvariantError)):
        search()


@pytest.mark.planted("test_drafts_change_no_bit_on_the_native_kernels")
@needs_kernels
@pytest.mark.parametrize("plant", [accepts_too_much, keeps_what_was_rejected, goes_on_behind_a_stop])
def test_a_planted_bug_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    def search() -> None:
        for seed in range(12):
            check(models, supported_isas()[-1], ("float32",), seed, "scripted")

    with pytest.raises((AssertionError, InvariantError)):
        search()
