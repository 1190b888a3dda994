"""The native runner against PyTorch's, step by step over the same flat batches."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift.base.sampling_params import SamplingParams
from chairlift.base.sampling_row import SamplingRow
from chairlift.base.step_batch import Masks, SampledTokens, mask_bits
from chairlift.core.scheduler.output import Chunk, NewRow, SchedulerOutput
from chairlift.executor.backends.native import native_runner
from chairlift.executor.backends.native.native_runner import NativeModelRunner
from chairlift.executor.backends.native.sampling_rows import RowTemplates
from chairlift.executor.backends.torch.model_runner import TorchModelRunner
from chairlift.executor.input_batch import InputBatch
from chairlift.executor.kv_tensors import KVPlan, plan_kv_cache
from chairlift.executor.sampling.logprobs import TokenLogprobs
from chairlift.kernels.cpu.library import ThreadPool, supported_isas
from chairlift.kernels.weights import NATIVE, ONEDNN, WeightFormat
from chairlift.models.causal_lm import CausalLM
from chairlift.models.loader import load_model
from chairlift.models.model_files import read_config
from tests.kernels.cpu.models import FAMILIES, VOCAB, tiny_model
from tests.native import needs_kernels

pytestmark = needs_kernels

BLOCK, BLOCKS, SLOTS, LENGTH, BUDGET = 16, 100, 8, 160, 96
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Pair:
    """Two runners of one model, fed by one InputBatch; PyTorch's tokens decide how the texts go on."""

    def __init__(self, model_dir: Path, dtype: str = "float32", isa: str | None = None) -> None:
        torch_dtype = DTYPES[dtype]
        plain, native = (self._load(model_dir, dtype, each) for each in (ONEDNN, NATIVE))
        plan = self._plan(plain, torch_dtype)
        self.truth = TorchModelRunner(plain, plan, torch_dtype, torch.device("cpu"))
        self.native = NativeModelRunner(
            native, plan, torch_dtype, ThreadPool(2, pin=False), isa=isa or supported_isas()[-1], max_tokens=BUDGET
        )
        self.input = InputBatch(SLOTS, LENGTH, BLOCK, len(plan.groups))
        self.windows = [group.window for group in plan.groups]
        self.free = [random.Random(group).sample(range(1, BLOCKS), BLOCKS - 1) for group in range(len(plan.groups))]
        self.blocks: dict[int, list[list[int]]] = {}

    @staticmethod
    def _load(model_dir: Path, dtype: str, weight_format: WeightFormat) -> CausalLM:
        return load_model(model_dir, read_config(model_dir), dtype, weight_format=weight_format)

    @staticmethod
    def _plan(model: CausalLM, dtype: torch.dtype) -> KVPlan:
        return plan_kv_cache(
            model.kv_cache_spec(), dtype=dtype, block_size=BLOCK, memory_bytes=0, num_blocks=BLOCKS, most_tokens=0
        )

    def join(self, slot: int, prompt: Sequence[int], sampling: SamplingRow, computed: int = 0) -> NewRow:
        """A row with blocks for everything it may ever hold."""
        blocks = [[free.pop() for _ in range(LENGTH // BLOCK)] for free in self.free]
        self.blocks[slot] = blocks
        return NewRow(slot, str(slot), list(prompt), len(prompt), computed, blocks, sampling)

    def step(self, out: SchedulerOutput, masks: Masks | None = None) -> tuple[SampledTokens, SampledTokens]:
        batch = self.input.apply(out)
        for runner in (self.truth, self.native):
            runner.move_blocks(batch)
        truth = self.truth.sample(self.truth.forward(batch), batch, masks)
        found = self.native.sample(self.native.forward(batch), batch, masks)
        self.input.store(batch, truth.token_ids)
        return truth, found


def row(prompt: Sequence[int], seed: int = 0, more: dict[str, Any] | None = None, **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(**params), seed=seed, num_prompt_tokens=len(prompt), **(more or {}))


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(2, VOCAB) for _ in range(count)]


def same_logprobs(truth: Sequence[TokenLogprobs | None], found: Sequence[TokenLogprobs | None], within: float) -> None:
    for one, other in zip(truth, found, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert abs(one.rank - other.rank) <= 1  # of two ids that differ by rounding, either may come first
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=within)


def same(pair: tuple[SampledTokens, SampledTokens], within: float = 1e-4) -> SampledTokens:
    truth, found = pair
    assert found.token_ids == truth.token_ids
    assert found.errors == truth.errors
    assert (found.logprobs is None) == (truth.logprobs is None)
    same_logprobs(truth.logprobs or [], found.logprobs or [], within)
    assert len(truth.prompt_logprobs) == len(found.prompt_logprobs)
    for one, other in zip(truth.prompt_logprobs, found.prompt_logprobs, strict=True):
        assert (one.slot, one.first) == (other.slot, other.first)
        same_logprobs(one.entries, other.entries, within)
    return truth


def chunks_of(slot: int, length: int, sizes: Sequence[int]) -> list[Chunk]:
    """The prompt of a row in pieces; the last one samples."""
    pieces, start = [], 0
    for size in [*sizes, length]:
        size = min(size, length - start)
        if size:
            pieces.append(Chunk(slot, start, size, start + size == length, "prefill"))
        start += size
    return pieces


ASKED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.0}, {}),
    ({"temperature": 0.9, "top_k": 5, "presence_penalty": 0.3}, {}),
    ({"temperature": 0.7, "logprobs": 2}, {}),
    ({"temperature": 0.8, "min_tokens": 3}, {"stop_token_ids": (4, 5)}),
]


@pytest.mark.parametrize("asked", [(0, 1), (0, 1, 2), (0, 3), (1, 2, 3)])
@pytest.mark.parametrize("masked", [False, True])
def test_records_of_the_same_decodes_are_as_if_filled_in_anew(
    asked: Sequence[int], masked: bool, tmp_path: Path
) -> None:
    pair, rng = Pair(tiny_model(tmp_path, "llama")), random.Random(str(asked))
    prompts = [tokens(rng, 3) for _ in asked]
    sampling = [row(prompt, i, ASKED[i][1], **ASKED[i][0]) for i, prompt in zip(asked, prompts, strict=True)]
    joined = [pair.join(slot, prompt, sampling[slot]) for slot, prompt in enumerate(prompts)]
    chunks = [Chunk(slot, 0, 3, True, "prefill") for slot in range(len(prompts))]
    same(pair.step(SchedulerOutput(0, joined=joined, chunks=chunks)))
    slots: tuple[int, ...] | None = tuple(range(len(prompts)))
    templates, again = RowTemplates(VOCAB), []
    for number in range(6):
        batch = pair.input.apply(SchedulerOutput(1 + number, decode_slots=slots))
        allowed = {slot: mask_bits(rng.sample(range(VOCAB), 9 * VOCAB // 10), VOCAB) for slot in range(len(prompts))}
        masks = allowed if masked and number == 3 else None
        rows, anew = templates.fill(batch, masks), RowTemplates(VOCAB).fill(batch, masks)
        for name in (
            "seed",
            "history",
            "history_len",
            "position",
            "temperature",
            "top_k",
            "num_logprobs",
            "num_masked",
        ):
            assert rows.records[name].tolist() == anew.records[name].tolist()
        assert rows.storing.tolist() == anew.storing.tolist()
        again.append(rows)
        hidden = pair.native.forward(batch)
        for each in (rows, anew):
            pair.native._head(hidden, batch.sample_rows, each)
        assert rows.sampled().token_ids == anew.sampled().token_ids
        pair.input.store(batch, rows.sampled().token_ids)
        slots = None
    reused = [one is other for one, other in itertools.pairwise(again)]
    fixed = set(asked) <= {0, 1}
    assert reused == ([True, True, not masked, not masked, True] if fixed else [False] * 5)


# -- the body ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("family", FAMILIES)
def test_leaving_out_tokens_that_nobody_asks_for_changes_no_bit(
    family: str, isa: str, dtype: str, tmp_path: Path
) -> None:
    pair, rng = Pair(tiny_model(tmp_path, family, dtype=dtype), dtype, isa), random.Random(family)
    prompts = [tokens(rng, count) for count in (30, 1, 33, 16, 40)]
    asked = [2 if slot == 2 else None for slot in range(5)]
    sampling = [row(prompt, temperature=0, prompt_logprobs=n) for prompt, n in zip(prompts, asked, strict=True)]
    joined = [pair.join(slot, prompt, sampling[slot]) for slot, prompt in enumerate(prompts)]
    chunks = [chunks_of(slot, len(prompt), [2 * slot + 3, 12]) for slot, prompt in enumerate(prompts)]
    left_out = 0
    for number in range(4):
        new = [each[number] for each in chunks if number < len(each)]
        done = tuple(slot for slot, each in enumerate(chunks) if number >= len(each))
        batch = pair.input.apply(SchedulerOutput(number, joined=joined, decode_slots=done, chunks=new))
        few, found = pair.native.forward(batch).clone(), native_runner._needed(batch)
        kept = np.arange(len(batch.token_ids)) if found is None else found
        whole = pair.native.program.run(batch)
        assert torch.equal(few, whole[kept])
        sampled = len(done) + sum(chunk.samples for chunk in new if chunk.slot != 2)
        assert len(kept) == sampled + sum(chunk.num_tokens for chunk in new if chunk.slot == 2)
        left_out, joined = left_out + len(whole) - len(kept), []
        pair.input.store(batch, [3] * len(batch.sample_rows))
    assert left_out > 50


@pytest.mark.parametrize("isa", supported_isas())
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_decodes_give_the_same_tokens_and_logprobs(family: str, isa: str, tmp_path: Path) -> None:
    pair, rng = Pair(tiny_model(tmp_path, family), isa=isa), random.Random(family)
    prompts = [tokens(rng, count) for count in (1, 16, 33, 70)]
    cuts = ([1], [3, 13], [16, 17], [31, 38])
    sampling = [row(prompt, temperature=0, logprobs=5, prompt_logprobs=3) for prompt in prompts]
    joined = [pair.join(slot, prompt, sampling[slot]) for slot, prompt in enumerate(prompts)]
    pieces = [chunks_of(slot, len(prompt), cut) for slot, (prompt, cut) in enumerate(zip(prompts, cuts, strict=True))]
    same(pair.step(SchedulerOutput(1, joined=joined, chunks=[piece[0] for piece in pieces])))
    second = [piece[1] for piece in pieces if len(piece) > 1]
    same(pair.step(SchedulerOutput(2, decode_slots=(0,), chunks=second)))
    third = [piece[2] for piece in pieces if len(piece) > 2]
    same(pair.step(SchedulerOutput(3, decode_slots=(0, 2, 1), chunks=third)))
    for step in range(40):  # past the window of those that have one, and over block borders
        same(pair.step(SchedulerOutput(4 + step, decode_slots=(3, 0, 2, 1) if step == 0 else None)))


def test_layers_with_and_without_windows_have_groups_of_their_own(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    model_dir = tiny_model(
        tmp_path, "qwen3", use_sliding_window=True, sliding_window=19, layer_types=types, max_window_layers=0
    )
    pair, prompt = Pair(model_dir), tokens(random.Random(1), 60)
    assert pair.windows == [19, None]
    out = SchedulerOutput(1, joined=[pair.join(0, prompt, row(prompt, temperature=0, logprobs=3))])
    out.chunks = chunks_of(0, 60, [])
    same(pair.step(out))
    for step in range(30):
        same(pair.step(SchedulerOutput(2 + step, decode_slots=(0,) if step == 0 else None)))


def test_copied_blocks_hold_what_their_sources_held(tmp_path: Path) -> None:
    pair, prompt = Pair(tiny_model(tmp_path, "llama")), tokens(random.Random(2), 30)
    sampling = row(prompt, temperature=0, logprobs=3)
    same(pair.step(SchedulerOutput(1, joined=[pair.join(0, prompt, sampling)], chunks=chunks_of(0, 30, []))))
    fork = pair.join(1, prompt, sampling, computed=29)
    first, second = pair.blocks[0][0][:2]
    mine = fork.block_ids[0]
    copies = [(0, first, mine[0]), (0, second, mine[1])]
    last = [Chunk(1, 29, 1, True, "prefill")]
    truth = same(pair.step(SchedulerOutput(2, joined=[fork], copies=copies, decode_slots=(), chunks=last)))
    assert truth.token_ids[0] == pair.input.tokens[0, 30], "the fork parts from what it was forked from"
    # Each reads what the other one writes.
    swap = [(0, mine[0], mine[1]), (0, mine[1], mine[0])]
    same(pair.step(SchedulerOutput(3, copies=swap, decode_slots=(1,))))


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_pytorch_is(family: str, tmp_path: Path) -> None:
    model_dir = tiny_model(tmp_path, family, dtype="bfloat16")
    prompt = tokens(random.Random(3), 90)
    exact, rounded = Pair(model_dir, "float32"), Pair(model_dir, "bfloat16")

    def logprobs(pair: Pair) -> list[np.ndarray[Any, Any]]:
        sampling = row(prompt, temperature=0, prompt_logprobs=0)
        out = SchedulerOutput(1, joined=[pair.join(0, prompt, sampling)], chunks=chunks_of(0, 90, []))
        return [np.array([entry.logprobs[0] for entry in found.prompt_logprobs[0].entries]) for found in pair.step(out)]

    expected = logprobs(exact)[0]
    theirs, ours = (np.sqrt(np.mean((found - expected) ** 2)) for found in logprobs(rounded))
    assert ours <= 1.25 * theirs
    assert ours > 0


# -- sampling ----------------------------------------------------------------------------------------------------------

SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.0}, {}),
    ({}, {}),
    ({"temperature": 1.7, "logprobs": 0}, {}),
    ({"temperature": 2.0, "top_k": 5}, {}),
    ({"temperature": 1.5, "top_p": 0.7, "logprobs": 20}, {}),
    ({"temperature": 3.0, "min_p": 0.05}, {}),
    ({"temperature": 1.5, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}, {}),
    ({"temperature": 0.0, "repetition_penalty": 5.0}, {}),
    ({"temperature": 2.0, "logit_bias": {5: 40.0, 6: 40.5, 7: -4.0}}, {}),
    ({"temperature": 0.0, "allowed_token_ids": [9, 4, 100, 9]}, {}),
    ({"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logprobs": 2}, {}),
    ({"temperature": 2.0, "allowed_token_ids": [3, 4, 5, 6], "min_tokens": 4}, {"stop_token_ids": (4, 5, 10**6)}),
    ({"temperature": 1.0, "allowed_token_ids": [3, 4, 5, 6]}, {"bad_word_ids": ((3, 4), (5,), (6, 6, 3))}),
    ({"temperature": 1e-6, "top_k": 3, "top_p": 0.1, "min_p": 1.0}, {}),
    ({"temperature": 1.0, "top_k": 10**6, "logprobs": 20}, {}),
    ({"temperature": 100.0, "min_p": 1.0}, {}),
]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def pair(model_dir: Path) -> Pair:
    return Pair(model_dir)


@pytest.mark.parametrize("first", [0, 8])
@pytest.mark.parametrize("scratch_rows", [1, 3, 100])
def test_every_sampling_setting_gives_the_tokens_of_pytorch(
    pair: Pair, first: int, scratch_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them in one batch; also when the logits that must be stored don't fit at once."""
    monkeypatch.setattr(native_runner, "_SCRATCH_BYTES", scratch_rows * 160 * 4)
    rng = random.Random(first)
    joined, chunks = [], []
    for slot, (params, more) in enumerate(SETTINGS[first : first + 8]):
        prompt = tokens(rng, 1 + slot)
        joined.append(pair.join(slot, prompt, row(prompt, 1234567890123 * slot, more, **params)))
        chunks.append(Chunk(slot, 0, 1 + slot, True, "prefill"))
    seen = [same(pair.step(SchedulerOutput(1, joined=joined, chunks=chunks))).token_ids]
    for step in range(30):
        decodes = (7, 1, 2, 3, 4, 5, 6, 0) if step == 0 else None
        seen.append(same(pair.step(SchedulerOutput(2 + step, decode_slots=decodes))).token_ids)
    assert len({token for step in seen for token in step}) > 20


def test_a_slot_keeps_nothing_of_its_last_owner(pair: Pair) -> None:
    prompt = [5, 6, 7]
    for step, params in enumerate([{"allowed_token_ids": [9], "logprobs": 3}, {"temperature": 0.0}, {"top_k": 1}]):
        joined = [pair.join(0, prompt, row(prompt, **params))]
        out = SchedulerOutput(step, left=[0] if step else [], joined=joined, chunks=[Chunk(0, 0, 3, True, "prefill")])
        same(pair.step(out))


def test_the_smallest_top_p_leaves_one_token_of_many_alike(tmp_path: Path) -> None:
    path, prompt = tiny_model(tmp_path, "llama", vocab_size=3000) / "model.safetensors", [5, 6, 7]
    weights = load_file(path)
    weights["lm_head.weight"].zero_()
    save_file(weights, path, metadata={"format": "pt"})
    pair = Pair(path.parent)
    joined = [pair.join(0, prompt, row(prompt, top_p=5e-324))]
    same(pair.step(SchedulerOutput(1, joined=joined, chunks=[Chunk(0, 0, 3, True, "prefill")])))


def test_the_first_and_the_last_token_are_tokens_like_others(pair: Pair) -> None:
    both, high = [0, VOCAB - 1], {0: 50.0, VOCAB - 1: 50.0}
    settings: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"allowed_token_ids": both}, {}),
        ({"logit_bias": high}, {}),
        ({"logit_bias": {**high, 7: 40.0}}, {"bad_word_ids": ((0,), (VOCAB - 1,))}),
    ]
    joined = [pair.join(i, [4, 8], row([4, 8], i, more, **params)) for i, (params, more) in enumerate(settings)]
    chunks = [Chunk(slot, 0, 2, True, "prefill") for slot in range(3)]
    seen = [same(pair.step(SchedulerOutput(1, joined=joined, chunks=chunks))).token_ids]
    seen += [same(pair.step(SchedulerOutput(2 + i, decode_slots=(0, 1, 2)))).token_ids for i in range(12)]
    assert [set(column) for column in zip(*seen, strict=True)] == [set(both), set(both), {7}]


@pytest.mark.parametrize("masked", [(0, 1, 2), (2,), (0, 1)])
def test_each_grammar_mask_holds_for_its_own_row(pair: Pair, masked: Sequence[int]) -> None:
    """Each holds for its own row; others are drawn as if there were none."""
    rng = random.Random(4)
    settings: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_k": 3, "logprobs": 2}]
    joined = []
    for slot, params in enumerate(settings):
        joined.append(pair.join(slot, [7, 8], row([7, 8], slot, **params)))
    allowed = {slot: [*rng.sample(range(VOCAB), 4), VOCAB - 1] for slot in masked}
    masks = {slot: mask_bits(ids, VOCAB) for slot, ids in allowed.items()}
    chunks = [Chunk(slot, 0, 2, True, "prefill") for slot in range(3)]
    free = same(pair.step(SchedulerOutput(1, joined=joined, chunks=chunks))).token_ids
    again = SchedulerOutput(2, left=[0, 1, 2], joined=joined, chunks=chunks)
    truth = same(pair.step(again, masks)).token_ids
    assert all(truth[slot] in allowed[slot] if slot in allowed else truth[slot] == free[slot] for slot in range(3))


def test_a_row_with_several_sample_positions_draws_what_each_prefix_would(pair: Pair) -> None:
    """Each draws what its prefix would alone, with its own mask; the last token is what the row goes on with."""
    prompt = tokens(random.Random(7), 30)
    params = {"temperature": 0.7, "presence_penalty": 0.5}
    sampling = row(prompt, 3, **params)
    joined = [pair.join(slot, prompt[: 28 + slot], sampling) for slot in range(3)]
    alone = [Chunk(slot, 0, 28 + slot, 1, "prefill") for slot in range(3)]
    masks = {1: mask_bits(range(5, 9), VOCAB)}
    expected = same(pair.step(SchedulerOutput(1, joined=joined, chunks=alone), masks)).token_ids
    after = same(pair.step(SchedulerOutput(2, decode_slots=(0, 1, 2)))).token_ids
    joined = [pair.join(0, prompt, sampling), pair.join(1, prompt[:29], sampling)]
    several = [Chunk(0, 0, 30, 3, "prefill"), Chunk(1, 0, 29, 1, "prefill")]
    out = SchedulerOutput(3, left=[0, 1, 2], joined=joined, decode_slots=(), chunks=several)
    masks[3] = masks[1]
    assert same(pair.step(out, masks)).token_ids == [*expected, expected[1]]
    assert same(pair.step(SchedulerOutput(4, decode_slots=(0, 1)))).token_ids == [after[2], after[1]]


def test_rows_without_a_token_say_why_and_others_go_on(pair: Pair) -> None:
    settings: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"allowed_token_ids": [3], "logprobs": 2}, {"bad_word_ids": ((3,),)}),
        ({"temperature": 0.0, "logprobs": 1}, {}),
        ({"temperature": 0.0, "logit_bias": {4: 100.0}, "repetition_penalty": 1e-38}, {}),
    ]
    joined = [pair.join(i, [4, 8], row([4, 8], i, more, **params)) for i, (params, more) in enumerate(settings)]
    chunks = [Chunk(slot, 0, 2, True, "prefill") for slot in range(3)]
    truth = same(pair.step(SchedulerOutput(1, joined=joined, chunks=chunks)))
    assert sorted(truth.errors) == [0, 2]
    assert truth.token_ids[1] >= 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_weights_fail_the_rows_with_the_same_words(tmp_path: Path, bad: float) -> None:
    model_dir = tiny_model(tmp_path, "llama")
    weights = load_file(model_dir / "model.safetensors")
    weights["lm_head.weight"][100] = bad
    weights["lm_head.weight"][100, 1:] = 0.0
    weights["lm_head.weight"][101] = -weights["lm_head.weight"][100]  # one of the two is +inf
    save_file(weights, model_dir / "model.safetensors", metadata={"format": "pt"})
    pair = Pair(model_dir)
    settings: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"top_k": 3, "logprobs": 2}]
    joined = [pair.join(slot, [7, 8], row([7, 8], slot, **params)) for slot, params in enumerate(settings)]
    chunks = [Chunk(slot, 0, 2, True, "prefill") for slot in range(3)]
    truth = same(pair.step(SchedulerOutput(1, joined=joined, chunks=chunks)))
    assert sorted(truth.errors) == [0, 1, 2]
    assert set(truth.token_ids) == {-1}


def test_a_step_that_samples_nothing_gives_no_tokens(pair: Pair) -> None:
    joined = [pair.join(0, [4, 8, 9], row([4, 8, 9]))]
    truth = same(pair.step(SchedulerOutput(1, joined=joined, chunks=[Chunk(0, 0, 2, False, "prefill")])))
    assert truth.token_ids == []


def test_prompt_logprobs_of_a_long_chunk_equal_those_of_pytorch(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind another row, and in pieces."""
    monkeypatch.setattr(native_runner, "_SCRATCH_BYTES", 10 * 160 * 4)
    monkeypatch.setattr(TorchModelRunner, "_prompt_rows", 40)
    prompt = tokens(random.Random(5), 90)
    joined = [pair.join(0, prompt, row(prompt, prompt_logprobs=20, temperature=0)), pair.join(1, [4, 8], row([4, 8]))]
    chunks = [Chunk(1, 0, 2, True, "prefill"), Chunk(0, 0, 90, True, "prefill")]
    truth = same(pair.step(SchedulerOutput(1, joined=joined, chunks=chunks)))
    assert [len(report.entries) for report in truth.prompt_logprobs] == [89]


def test_a_row_does_not_depend_on_its_batch(model_dir: Path) -> None:
    """Bit for bit, which PyTorch does not promise."""

    def serve(others: int) -> list[tuple[int, list[float]]]:
        pair, rng = Pair(model_dir), random.Random(6)
        prompt = tokens(rng, 37)
        joined = [pair.join(0, prompt, row(prompt, temperature=1.0, logprobs=5))]
        chunks = [Chunk(0, 0, 37, True, "prefill")]
        for slot in range(1, 1 + others):
            other = tokens(rng, 5 + slot)
            joined.insert(0, pair.join(slot, other, row(other)))
            chunks.insert(0, Chunk(slot, 0, 5 + slot, True, "prefill"))
        found = []
        for step in range(20):
            out = SchedulerOutput(1 + step, joined=joined, chunks=chunks)
            out.decode_slots = (*range(1, 1 + others), 0) if step else ()
            if step:
                out.joined, out.chunks = [], []
            batch = pair.input.apply(out)
            drawn = pair.native.sample(pair.native.forward(batch), batch, None)
            pair.input.store(batch, drawn.token_ids)
            assert drawn.logprobs is not None
            found.append((drawn.token_ids[-1], drawn.logprobs[-1].logprobs.tolist()))
        return found

    assert serve(0) == serve(3)
