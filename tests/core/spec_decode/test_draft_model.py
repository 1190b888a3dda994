"""Drafts by a small model: answers are those without, and its KV is right wherever the model's is.

Where the small model is the model itself, it draws the very tokens that the model draws, whatever the temperature. So
each of its drafts must be right, over chunks, shared prefixes, forks, preemption and swapping. Some of them are spoiled
where they are drawn: then those before it are right, and the next ones are again.
"""

from __future__ import annotations

import collections
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from chairlift import LLM, SamplingParams
from chairlift.base.step_batch import StepBatch
from chairlift.core.request import Request
from chairlift.core.scheduler.output import NewRow, SchedulerOutput
from chairlift.core.spec_decode.adaptive import AdaptiveSpeculator
from chairlift.errors import ConfigError
from chairlift.executor.backends.native.native_kv import NativeKV
from chairlift.executor.drafters import draft_model
from chairlift.executor.drafters.draft_model import DraftModel
from chairlift.kernels.cpu.library import supported_isas
from tests.core.spec_decode.test_equivalence import Models, compare, draw_jobs, draw_settings
from tests.equivalence.cases import longest, run
from tests.equivalence.test_determinism import WITHOUT_STATES
from tests.kernels.cpu.models import VOCAB, tiny_model
from tests.native import needs_kernels
from tests.sweep import sweep

pytestmark = needs_kernels


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def drafting(model: Path, most: int = 8) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(model), "num_speculative_tokens": most}


def drafts_are_free(llm: LLM) -> DraftModel:
    """Let every draft pay, so that all that may be are made."""
    drafts = llm.engine.scheduler.drafts
    assert drafts is not None and isinstance(drafts.speculator, AdaptiveSpeculator)
    drafter = drafts.speculator._proposer
    assert isinstance(drafter, DraftModel)
    drafts.speculator._seconds, drafts.speculator.reach = lambda step: 1.0, drafts.speculator.most
    drafter._times.note = lambda *given: None  # type: ignore[method-assign]
    return drafter


def spoil(llm: LLM, drafter: DraftModel, rng: random.Random) -> None:
    """Spoil some drafts of the same model, and check that those before them were right, and these were not."""
    drafts = llm.engine.scheduler.drafts
    assert drafts is not None
    propose, run_pass, verified = drafter.propose, drafter._pass, drafts.speculator.verified
    spoiled: dict[str, int] = {}

    def all_rows(rows: Sequence[tuple[Request, int]]) -> Sequence[Sequence[int]]:
        spoiled.clear()
        assert not llm.engine.scheduler.preemptor.swap_out, "drafts are written before blocks are saved"
        return propose(rows)

    def one_pass(parts: Sequence[Any]) -> dict[int, int]:
        drawn = run_pass(parts)
        for part in parts:
            if part.row in drawn and rng.random() < 0.1:
                drawn[part.row] = (drawn[part.row] + 1) % VOCAB
                spoiled.setdefault(part.request.request_id, part.end - len(part.request.token_ids))
        return drawn

    def count(request: Request, tokens: Sequence[int], num_accepted: int) -> None:
        right = min(spoiled.get(request.request_id, len(tokens)), len(tokens))
        assert num_accepted == right, f"{num_accepted} of {len(tokens)} drafts were right, and {right} must be"
        verified(request, tokens, num_accepted)

    drafter.propose, drafter._pass = all_rows, one_pass  # type: ignore[method-assign]
    drafts.speculator.verified = count  # type: ignore[method-assign]


def check(models: Models, seed: int, twin: bool, isas: Sequence[str] = ()) -> collections.Counter[str]:
    rng = random.Random(seed)
    model, dtype, settings = rng.choice(WITHOUT_STATES), rng.choice(("bfloat16", "float32")), draw_settings(rng)
    settings |= {"num_lookahead_steps": None, "max_num_batched_tokens": rng.choice((33, 2048))}
    other = model if twin else rng.choice([each for each in WITHOUT_STATES if each != model])
    isa = rng.choice(isas or supported_isas())
    jobs = draw_jobs(rng, repetitive=False)
    expected = [run(models.alone(model, isa, dtype), [job])[0] for job in jobs]
    most = -(-longest(jobs) // settings["block_size"]) * max(job.params.n for job in jobs)
    blocks = most + 2 if rng.random() < 0.5 else len(jobs) * most + 2
    asked = drafting(models.model_dir(other), rng.randint(1, 8))
    llm = models.llm(model, isa, dtype, num_kv_blocks=blocks, speculative_config=asked, **settings)
    drafter = drafts_are_free(llm)
    if twin:
        spoil(llm, drafter, random.Random(seed))
    arrival, preempting = rng.choice(("together", "reversed", "staggered")), rng.random() < 0.4
    outputs = run(llm, jobs, arrival, preempting=preempting, seed=seed)
    compare(expected, outputs, jobs, (model, f"drafted by {other}", dtype, isa, settings, arrival))
    scheduler = llm.engine.scheduler
    drafts = scheduler.drafts
    assert drafts is not None
    rejected = drafts.num_drafts - drafts.num_accepted
    return collections.Counter(
        accepted=drafts.num_accepted,
        rejected=rejected,
        preempted=scheduler.num_preemptions,
        swapped=scheduler.preemptor.num_swaps,
        cached=sum(output.num_cached_tokens for output in outputs),
    )


@pytest.mark.parametrize("count", [10, pytest.param(300, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("twin", [True, False], ids=["the same model", "another model"])
def test_a_draft_model_changes_no_bit(twin: bool, count: int, models: Models, request: pytest.FixtureRequest) -> None:
    seen: collections.Counter[str] = collections.Counter()
    sweep(request, count, lambda seed: seen.update(check(models, seed, twin)))
    if request.config.getoption("--seeds") is None:
        assert seen["accepted" if twin else "rejected"] > 20 * count and seen["preempted"], seen
        assert count < 50 or (seen["cached"] and seen["swapped"]), seen


@pytest.mark.nightly
def test_no_draft_is_written_into_a_block_that_is_still_to_be_saved(models: Models) -> None:
    """In this world a row with drafts gets the block of a request that is swapped out in the same step."""
    isas = [supported_isas()[0]] * 3  # the rest of the world must not depend on the processor
    assert check(models, 136, twin=True, isas=isas)["swapped"]


def test_rejected_drafts_are_computed_again_after_a_swap(models: Models) -> None:
    """The request decodes without drafts between its rejected drafts and its swap, so nothing has compared them with
    the tokens that took their places."""
    llm = models.llm(
        "llama", "auto", "float32", num_kv_blocks=60, speculative_config=drafting(models.model_dir("llama"))
    )
    drafter, batch = (
        drafts_are_free(llm),
        StepBatch(
            **{
                name: np.zeros(0, dtype=np.int32)
                for name in ("token_ids", "positions", "cu_seqlens", "seq_lens", "slots")
            },
            block_tables=np.zeros((1, 0, 0), dtype=np.int32),
            slot_mapping=np.zeros((1, 0), dtype=np.int64),
            tokens=np.zeros((1, 1), dtype=np.int32),
            sampling=[],
        ),
    )
    tokens = list(range(10))
    drafter.follow(SchedulerOutput(0, joined=[NewRow(0, "a", tokens, 10, 0, [[1]], None)]), batch)
    drafter._counts[0] = 12  # the drafts at positions 10 and 11 were computed
    drafter.follow(
        SchedulerOutput(9, left=[0], joined=[NewRow(1, "a", [*tokens, 1, 2, 3, 4, 5], 10, 14, [[1]], None)]), batch
    )
    assert drafter._counts[1] == 10


def test_how_many_drafts_follows_from_what_they_cost(models: Models) -> None:
    where = models.model_dir("llama")
    llm = models.llm("llama", "auto", "float32", num_kv_blocks=60, speculative_config=drafting(where), threads=1)
    drafter = drafts_are_free(llm)
    asked = SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True)
    drafts = llm.engine.scheduler.drafts
    assert drafts is not None
    drafter._times.known = {1: 0.01}
    llm.generate([[5] * 9], asked)
    cheap, drafts.num_drafts = drafts.num_drafts, 0
    drafter._times.known = {1: 3.0}
    llm.generate([[5] * 9], asked)
    assert cheap > 40 and drafts.num_drafts <= 4  # a probe now and then


def test_a_drafter_that_was_idle_catches_up(models: Models) -> None:
    where = models.model_dir("llama")
    llm = models.llm("llama", "auto", "float32", num_kv_blocks=60, speculative_config=drafting(where), threads=1)
    drafter = drafts_are_free(llm)
    drafts = llm.engine.scheduler.drafts
    assert drafts is not None and isinstance(drafts.speculator, AdaptiveSpeculator)
    llm.engine.add_request([5] * 9, SamplingParams(temperature=1.0, max_tokens=200, ignore_eos=True), request_id="a")
    drafter._times.known = {1: 1e9}
    drafts.speculator._idle_steps = -1000
    for _ in range(60):
        llm.engine.step()
    assert not drafts.num_drafts
    drafter._times.known = {}
    while llm.engine.has_unfinished:
        llm.engine.step()
    assert drafts.num_drafts == drafts.num_accepted > 100


@pytest.mark.parametrize("padding", [-5, 37])
def test_vocabularies_of_unequal_padding_are_one(padding: int, models: Models, tmp_path: Path) -> None:
    """The embedding of the small model has fewer or more rows than the served model's, and its tokenizer has the same
    tokens. Prompts have ids that only one of the two models knows."""
    served = padded_model(tmp_path / "served", VOCAB)
    small = padded_model(tmp_path / "small", VOCAB + padding)
    prompts = [[5] * 9, [VOCAB - 1, 3, VOCAB - 2, 4], [7, 8] * 6]
    biased = {VOCAB - 1: 8.0, 4: 7.0}
    asked = [
        SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=0),
        SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True, logit_bias=biased, logprobs=0),
        SamplingParams(temperature=1.0, seed=4, max_tokens=30, ignore_eos=True, frequency_penalty=0.5, logprobs=0),
    ]
    kept: dict[str, Any] = {"num_kv_blocks": 60, "threads": 1, "dtype": "float32", "skip_tokenizer_init": True}
    plain = LLM(served, **kept).generate(prompts, asked)
    llm = LLM(served, speculative_config=drafting(small), **kept)
    drafter = drafts_are_free(llm)
    read, made = watched(drafter)
    drafted = llm.generate(prompts, asked)
    assert max(read) < VOCAB + padding, "the small model read a token that it does not have"
    assert max(made) < VOCAB, "a draft is a token that the served model does not have"
    assert [each.outputs[0].token_ids for each in drafted] == [each.outputs[0].token_ids for each in plain]
    assert [each.outputs[0].logprobs for each in drafted] == [each.outputs[0].logprobs for each in plain]
    drafts = llm.engine.scheduler.drafts
    assert drafts is not None and drafts.num_accepted > 20


def watched(drafter: DraftModel) -> tuple[list[int], list[int]]:
    """(tokens that the small model reads, drafts that it makes) from now on."""
    read: list[int] = []
    made: list[int] = []
    forward, propose = drafter._runner.forward, drafter.propose

    def reading(batch: StepBatch) -> Any:
        read.extend(batch.token_ids.tolist())
        return forward(batch)

    def making(rows: Sequence[tuple[Request, int]]) -> Sequence[Sequence[int]]:
        drafts = propose(rows)
        made.extend(token for row in drafts for token in row)
        return drafts

    drafter._runner.forward, drafter.propose = reading, making  # type: ignore[method-assign]
    return read, made


def padded_model(folder: Path, vocab_size: int) -> Path:
    """The same tiny model with a vocabulary of ``vocab_size`` rows, and a tokenizer with fewer tokens."""
    where = tiny_model(folder, "llama")
    file = next(where.glob("*.safetensors"))
    tensors = load_file(file)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = torch.zeros(vocab_size, tensors[name].shape[1])
        rows[:VOCAB] = tensors[name][:vocab_size]
        rows[VOCAB:] = 3 * tensors[name][3] if len(rows) > VOCAB else 0  # padding that the small model likes to draw
        tensors[name] = rows
    save_file(tensors, file)
    config = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps({**config, "vocab_size": vocab_size}))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(VOCAB - 5)}, unk_token="w0"))
    words.save(str(where / "tokenizer.json"))
    return where


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_model_that_cannot_draft_is_refused(models: Models, tmp_path: Path) -> None:
    where = models.model_dir("llama")
    asked = {"num_kv_blocks": 40, "threads": 1}

    def make(kernels: str, model: Path) -> LLM:
        return models.llm("llama", kernels, "float32", speculative_config=drafting(model), **asked)

    with pytest.raises(ConfigError, match="draft_model runs on the native CPU kernels, and torch runs this model"):
        make("torch", where)
    small = tiny_model(tmp_path / "vocabulary", "llama", vocab_size=64)
    with pytest.raises(ConfigError, match=r"64 tokens instead of 131, and one of the two has no tokenizer\.json"):
        make("auto", small)
    shutil.copy(where / "tokenizer.json", small / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"64 tokens instead of 131, and both tokenizers have the token 130"):
        make("auto", small)
    other = shutil.copytree(where, tmp_path / "tokenizer")
    words = json.loads((other / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["w7"], vocabulary["w8"] = vocabulary["w8"], vocabulary["w7"]
    (other / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(ConfigError, match=r"has another tokenizer \('w7' is another id there\)"):
        make("auto", other)


# -- the test can fail -------------------------------------------------------------------------------------------------

MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {}


def mutant(plant: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    MUTANTS[plant.__name__] = plant
    return plant


@mutant
def prompts_are_not_followed(patch: pytest.MonkeyPatch) -> None:
    follow = DraftModel.follow

    def wrong(self: DraftModel, out: Any, batch: Any) -> None:
        runner, self._runner = self._runner, _Nothing()  # type: ignore[assignment]
        follow(self, out, batch)
        self._runner = runner

    patch.setattr(DraftModel, "follow", wrong)


class _Nothing:
    def forward(self, batch: Any) -> None: ...


@mutant
def rejected_drafts_count_as_computed(patch: pytest.MonkeyPatch) -> None:
    begin = DraftModel._begin

    def wrong(self: DraftModel, request: Any) -> int:
        before = self._counts[request.slot]
        begin(self, request)
        self._counts[request.slot] = max(self._counts[request.slot], min(before, len(request.token_ids) - 1))
        return self._counts[request.slot]

    patch.setattr(DraftModel, "_begin", wrong)


@mutant
def what_a_preempted_request_lacks_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: DraftModel, slot: int) -> None:
        self._owners[slot] = None

    patch.setattr(DraftModel, "_leave", wrong)


@mutant
def copies_leave_out_its_layers(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: NativeKV, copies: Any) -> None:
        for group in {group for group, _, _ in copies}:
            sources, targets = zip(*((source, target) for g, source, target in copies if g == group), strict=True)
            for cache in self._caches[group][: len(self._caches[group]) // 2]:
                cache[list(targets)] = cache[list(sources)]

    patch.setattr(NativeKV, "copy_blocks", wrong)


@mutant
def drafts_are_drawn_without_the_noise_of_their_place(patch: pytest.MonkeyPatch) -> None:
    run_pass = DraftModel._pass

    def wrong(self: DraftModel, parts: Any) -> dict[int, int]:
        runner, drawn = self._runner, None

        class Shifted:
            def forward(self, batch: Any) -> Any:
                return runner.forward(batch)

            def sample(self, hidden: Any, batch: Any, masks: Any) -> Any:
                batch.positions = np.maximum(batch.positions - 1, 0)
                return runner.sample(hidden, batch, masks)

        self._runner = Shifted()  # type: ignore[assignment]
        try:
            drawn = run_pass(self, parts)
        finally:
            self._runner = runner
        return drawn

    patch.setattr(DraftModel, "_pass", wrong)


@mutant
def tables_are_those_of_the_first_row(patch: pytest.MonkeyPatch) -> None:
    tables = draft_model.block_tables

    def wrong(given: Any, width: int) -> Any:
        found = tables(given, width)
        found[:, :] = found[:, :1]
        return found

    patch.setattr(draft_model, "block_tables", wrong)


@pytest.mark.full
@pytest.mark.planted("test_a_draft_model_changes_no_bit")
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_planted_bug_is_noticed(name: str, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)

    def search() -> None:
        for seed in range(30):
            check(models, seed, twin=True)

    with pytest.raises(AssertionError):
        search()
