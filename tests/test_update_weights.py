"""Other weights under a running engine: the answers a new engine gives and nothing old read again, or no change."""

from __future__ import annotations

import dataclasses
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from chairlift import LLM, ConfigError, SamplingParams
from chairlift.base.outputs import CompletionOutput, RequestOutput
from chairlift.base.sampling_row import SamplingRow
from chairlift.base.seeds import sample_seed
from chairlift.base.step_batch import StepBatch
from chairlift.config import CacheGroup, SchedulerConfig
from chairlift.engine.clock import VirtualClock
from chairlift.engine.engine import Engine
from chairlift.engine.input_processor import ModelLimits
from chairlift.errors import EngineDeadError, ModelLoadError
from chairlift.executor.local import LocalExecutor
from chairlift.models import loader
from chairlift.models.hashlm import HashLM, reference_tokens
from tests.engine.make import VOCAB, make_engine
from tests.models.tiny import tiny_hf_model
from tests.native import needs_kernels
from tests.sweep import sweep

KERNELS = ["torch", pytest.param("auto", marks=needs_kernels)]
PROMPTS = [[5, 9, 77, 3, 21, 64, 8, 100, 41, 2, 90, 13, 55, 6, 31, 70, 11, 12, 99, 4] * 3, [7, 8, 9], [100] * 17]
SHARED = PROMPTS[0]
"""Longer than three blocks."""


def make(model_dir: Path, **settings: Any) -> LLM:
    defaults = {"skip_tokenizer_init": True, "num_kv_blocks": 60, "max_num_seqs": 8, "dtype": "float32", "threads": 1}
    return LLM(model_dir, **{**defaults, **settings})


def params(max_tokens: int = 12, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 0, **more})


def answers(llm: LLM) -> list[tuple[list[int], Any]]:
    """Tokens and their log-probabilities, to the last bit."""
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(PROMPTS, params())]


def weights(model_dir: Path) -> dict[str, Tensor]:
    return load_file(model_dir / "model.safetensors")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models of one network: q, k and v have biases, the head is not tied."""
    where = tmp_path_factory.mktemp("models")
    old, new = (tiny_hf_model(where, "qwen2", seed=seed, tie_word_embeddings=False) for seed in (0, 1))
    return old, new


# -- the new weights are served ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("llama", True),
        ("qwen2", False),
        ("qwen3", True),
        ("mistral", False),
        ("gemma3_text", True),
        ("glm4", False),
        ("gpt_neox", False),
    ],
    ids=str,
)
def test_an_updated_engine_answers_as_a_new_one(
    tmp_path: Path, family: str, tied: bool, kernels: str, dtype: str
) -> None:
    old, new = (tiny_hf_model(tmp_path, family, seed=seed, tie_word_embeddings=tied) for seed in (0, 1))
    settings = {"kernels": kernels, "dtype": dtype}
    expected = answers(make(new, **settings))
    llm = make(old, **settings)
    before = answers(llm)
    assert before != expected
    llm.update_weights(new, 1)
    assert answers(llm) == expected
    llm.update_weights(weights(old), 2)  # from memory, and back
    assert answers(llm) == before
    llm.engine.check_invariants()


def test_tensors_may_have_another_dtype_and_strides(models: tuple[Path, Path]) -> None:
    old, new = models
    llm = make(old)
    given = weights(new)
    for name, value in given.items():
        if "q_proj.weight" in name:
            given[name] = value.double().t().contiguous().t()
        elif "mlp" in name:
            given[name] = value.double()
        else:
            given[name] = value.clone()  # memory of its own, in whole pages
    kept = {name: value.clone() for name, value in given.items()}
    llm.update_weights({name: torch.nn.Parameter(value) for name, value in given.items()}, 1)
    assert answers(llm) == answers(make(new))
    assert all(torch.equal(given[name], kept[name]) for name in kept), "the caller's tensors were touched"


def test_weights_are_read_from_a_sharded_directory(models: tuple[Path, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(models[1]).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    llm = make(models[0])
    llm.update_weights(str(tmp_path), 1)
    assert answers(llm) == answers(make(models[1]))


# -- or nothing is changed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_large_tensor_is_told_of_piece_by_piece(
    models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    """Silence for as long as a slow disk takes for one would look like an engine that is stuck."""
    old, new = models
    largest = max(value.nbytes for value in weights(new).values())
    monkeypatch.setattr(loader, "_PIECE_BYTES", largest // 7, raising=False)
    for source in (new, weights(new)):
        llm, told = make(old, kernels=kernels), list[float]()
        llm.engine.core.update_weights(source, 1, "continue", lambda label, share, told=told: told.append(share))
        assert told == sorted(told)
        assert max(map(told.count, told)) >= 7
        assert answers(llm) == answers(make(new, kernels=kernels))


def misshapen(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors["model.layers.2.mlp.up_proj.weight"][:-1].clone()


def quantized(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(64, dtype=torch.int8)


def missing(tensors: dict[str, Tensor]) -> None:
    del tensors["model.norm.weight"]


def surplus(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.more_proj.weight"] = torch.zeros(96, 64)


def not_a_number(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"][-1, -1] = float("nan")


def infinite(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.self_attn.q_proj.bias"][3] = -float("inf")


def too_large(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].double() * 1e300


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (not_a_number, r"lm_head\.weight has NaN or infinity, .* rows 0 to \d+; nothing of it is used"),
        (infinite, r"model\.layers\.1\.self_attn\.q_proj\.bias has NaN or infinity"),
        (too_large, r"model\.norm\.weight has NaN or infinity, or numbers too large for float32"),
        (
            misshapen,
            r"model\.layers\.2\.mlp\.up_proj\.weight has shape \[95, 64\], but config\.json asks for \[96, 64\]",
        ),
        (quantized, r"model\.layers\.1\.self_attn\.q_proj\.bias is stored as (I8|torch\.int8)"),
        (missing, r"1 missing \(model\.norm\.weight\)"),
        (surplus, r"1 unexpected \(model\.layers\.1\.mlp\.more_proj\.weight\)"),
    ],
)
@pytest.mark.parametrize("from_file", [False, True])
@pytest.mark.parametrize("kernels", KERNELS)
def test_weights_that_do_not_fit_change_nothing(
    models: tuple[Path, Path], tmp_path: Path, spoil: Any, words: str, from_file: bool, kernels: str
) -> None:
    llm = make(models[0], kernels=kernels)
    answers(llm)
    before = answers(llm)  # with what is cached by now: PyTorch rounds by the shape of the batch
    tensors = weights(models[1])
    spoil(tensors)
    source: Any = tensors
    if from_file:
        shutil.copy(models[1] / "config.json", tmp_path)
        save_file(tensors, tmp_path / "model.safetensors")
        source = tmp_path
    with pytest.raises(ModelLoadError, match=words):
        llm.update_weights(source, 1)
    outputs = llm.generate(SHARED, params())
    assert outputs[0].num_cached_tokens > 0, "what was cached is as good as before"
    assert outputs[0].outputs[0].weight_versions == [(0, 0)]
    assert answers(llm) == before


@pytest.mark.parametrize(
    ("source", "version", "in_flight", "words"),
    [
        ("nowhere/at/all", 1, "continue", "nowhere/at/all' is not a directory"),
        ("n" * 300, 1, "continue", r"cannot read 'n+' \(File name too long\)"),
        ({"model.norm.weight": [1.0]}, 1, "continue", "'model.norm.weight' must be a dense torch tensor, got list"),
        ({"lm_head.weight": torch.zeros(1, device="meta")}, 1, "continue", "without ordinary memory"),
        (None, 1, "continue", "a directory or a mapping of tensors, got NoneType"),
        (5, 1, "continue", "a directory or a mapping of tensors, got int"),
        ({}, 0.5, "continue", "version must be an integer of at least 0.*got 0.5"),
        ({}, -1, "continue", "version must be an integer of at least 0.*got -1"),
        ({}, 1, "later", "in_flight must be 'continue' or 'recompute', got 'later'"),
    ],
)
def test_bad_arguments_are_refused(
    models: tuple[Path, Path], source: Any, version: Any, in_flight: str, words: str
) -> None:
    llm = make(models[0])
    with pytest.raises((ConfigError, ModelLoadError), match=words):
        llm.update_weights(source, version, in_flight=in_flight)
    assert len(llm.generate([[1]], params(2))) == 1


def test_a_half_written_model_is_not_used(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    llm, read = make(models[0]), loader._read
    before = answers(llm)
    times = {"left": 0}

    def fails_in_the_middle(tensors: Any, part: Any) -> Tensor:
        if part.name == "model.layers.1.mlp.down_proj.weight":
            times["left"] -= 1
            if times["left"] < 0:
                raise ModelLoadError("the disk is gone")
        return read(tensors, part)

    monkeypatch.setattr(loader, "_read", fails_in_the_middle)
    with pytest.raises(ModelLoadError, match="the disk is gone"):  # while numbers are checked: nothing is written
        llm.update_weights(models[1], 1)
    assert answers(llm) == before
    times["left"] = 1
    with pytest.raises(EngineDeadError, match=r"in part only \(ModelLoadError: the disk is gone\)"):
        llm.update_weights(models[1], 1)
    with pytest.raises(EngineDeadError):
        llm.generate([[1]], params(2))


def test_a_model_without_weights_says_so() -> None:
    engine = make_engine()
    with pytest.raises(ConfigError, match="HashLM has no weights to replace"):
        engine.update_weights("somewhere", 1)
    assert isinstance(engine.core.executor, LocalExecutor)


# -- the prefix cache -----------------------------------------------------------------------------------------------


def run_until(llm: LLM, request_id: str, num_tokens: int) -> None:
    """Step until a streamed request has so many tokens."""
    for _ in range(200):
        for output in llm.engine.step():
            if output.request_id == request_id and len(output.outputs[0].token_ids) >= num_tokens:
                return
    raise AssertionError(f"{request_id} does not get as far as {num_tokens} tokens")


def finish(llm: LLM) -> dict[str, RequestOutput]:
    done = {}
    while llm.engine.has_unfinished:
        done.update({output.request_id: output for output in llm.engine.step() if output.finished})
        llm.engine.check_invariants()
    assert not llm.engine.kv.counts().used
    return done


def test_blocks_of_the_old_weights_are_never_hit(models: tuple[Path, Path]) -> None:
    llm = make(models[0])
    llm.generate(SHARED, params())
    assert llm.generate(SHARED, params())[0].num_cached_tokens > 0
    llm.update_weights(models[1], 1)
    assert llm.engine.kv.counts().cached == 0
    first, second = (llm.generate(SHARED, params())[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens > 0, "what the new weights computed is cached as ever"
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


@pytest.mark.parametrize("in_flight", ["continue", "recompute"])
@pytest.mark.parametrize("preempt", [False, True])
def test_blocks_that_a_running_request_holds_do_not_become_hits(
    models: tuple[Path, Path], in_flight: str, preempt: bool
) -> None:
    """Also not those it fills afterwards, on top of what the old weights computed."""
    expected = make(models[1]).generate(SHARED, params(40))[0].outputs[0].token_ids
    llm = make(models[0], num_lookahead_steps=2)
    llm.engine.add_request(SHARED, params(40), request_id="old")
    run_until(llm, "old", 4)
    llm.update_weights(models[1], 1, in_flight=in_flight)
    llm.engine.check_invariants()
    run_until(llm, "old", 30)
    if preempt:  # it is computed again, with the new weights: then its blocks may be shared
        (name,) = llm.engine.scheduler.running
        assert llm.engine.scheduler.preempt(name)
    llm.engine.add_request(SHARED, params(40), request_id="new")
    done = finish(llm)
    assert done["new"].outputs[0].token_ids == expected
    if in_flight == "continue" and not preempt:
        assert done["new"].num_cached_tokens == 0
    assert llm.generate(SHARED, params(40))[0].outputs[0].token_ids == expected


def test_answers_forked_from_an_old_prompt_are_not_shared_either(models: tuple[Path, Path]) -> None:
    """The first of n answers holds the prompt's old KV when the others fork from it."""
    llm = make(models[0], max_num_batched_tokens=32, num_lookahead_steps=0)
    llm.engine.add_request(SHARED, params(6, n=2, temperature=1.0, seed=3), request_id="two")
    llm.engine.step()
    assert len(llm.engine.scheduler.running) == 1, "the second waits for the prompt, half of which is computed"
    llm.update_weights(models[1], 1)
    finish(llm)
    output = llm.generate(SHARED, params())[0]
    assert output.outputs[0].token_ids == make(models[1]).generate(SHARED, params())[0].outputs[0].token_ids


# -- requests that span an update ------------------------------------------------------------------------------------


def by_version(answer: CompletionOutput) -> dict[int, list[int]]:
    starts = [first for first, _ in answer.weight_versions]
    ends = [*starts[1:], len(answer.token_ids)]
    runs = zip(answer.weight_versions, starts, ends, strict=True)
    return {version: answer.token_ids[start:end] for (_, version), start, end in runs}


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_recomputed_requests_go_on_exactly_as_the_new_weights_would(
    models: tuple[Path, Path], depth: int, kernels: str, preemption: str
) -> None:
    old, new = models
    llm = make(old, kernels=kernels, num_lookahead_steps=depth, preemption_mode=preemption)
    fresh = make(new, kernels=kernels)
    for index, prompt in enumerate(PROMPTS):
        llm.engine.add_request(prompt, params(20 + index), request_id=f"r{index}")
    run_until(llm, "r1", 5)
    llm.engine.add_request([42, 43], params(6), request_id="waiting")
    llm.update_weights(new, 7, in_flight="recompute")
    done = finish(llm)
    assert by_version(done["waiting"].outputs[0]).keys() == {7}
    for index, prompt in enumerate(PROMPTS):
        answer = done[f"r{index}"].outputs[0]
        parts = by_version(answer)
        assert list(parts) == [0, 7]
        assert (
            parts[0]
            == make(old, kernels=kernels).generate([prompt], params(50))[0].outputs[0].token_ids[: len(parts[0])]
        )
        assert len(parts[0]) + len(parts[7]) == 20 + index
        assert parts[7] == fresh.generate([prompt + parts[0]], params(len(parts[7])))[0].outputs[0].token_ids
        assert done[f"r{index}"].metrics is not None
        assert done[f"r{index}"].metrics.num_preemptions == 0  # type: ignore[union-attr]


def test_computing_again_is_no_second_admission(models: tuple[Path, Path]) -> None:
    """A request may then read more from the cache than its prompt, and the look-up was before the update."""
    llm = make(models[0])
    for name in "ab":
        llm.engine.add_request(SHARED, params(60), request_id=name)
    run_until(llm, "b", 40)
    before, done = llm.engine.core.stats(), len(llm.engine.step_log)
    cached = {request.request_id: request.num_cached_tokens for request in llm.engine.scheduler.running.values()}
    llm.update_weights(models[1], 1, in_flight="recompute")
    run_until(llm, "b", 45)
    after = llm.engine.core.stats()
    assert (after.prefix_cache_queries, after.prefix_cache_hits) == (
        before.prefix_cache_queries,
        before.prefix_cache_hits,
    )
    now = {request.request_id: request.num_cached_tokens for request in llm.engine.scheduler.running.values()}
    assert now == cached
    assert {chunk.why for step in list(llm.engine.step_log)[done:] for _, chunk in step.chunks} == {"recompute"}


def test_continued_requests_keep_their_kv(models: tuple[Path, Path]) -> None:
    """Their next token is of the new weights on the old keys and values: neither model's own."""
    llm = make(models[0])
    llm.engine.add_request(SHARED, params(30), request_id="r")
    run_until(llm, "r", 5)
    llm.update_weights(models[1], 1)
    answer = finish(llm)["r"].outputs[0]
    assert list(by_version(answer)) == [0, 1]
    assert llm.engine.core.stats().num_recomputed_tokens == 0
    assert len(answer.token_ids) == 30


def test_each_token_has_the_version_of_the_weights_that_made_it(models: tuple[Path, Path]) -> None:
    llm = make(models[0])
    llm.update_weights(models[1], 3)
    llm.engine.add_request([1, 2, 3], params(12), request_id="r")
    llm.update_weights(models[0], 4)  # before its first token
    run_until(llm, "r", 3)
    llm.update_weights(models[1], 5)
    llm.update_weights(models[0], 6)  # nothing came of version 5
    run_until(llm, "r", 6)
    llm.update_weights(models[0], 6)  # the same version again is no news, but allowed
    answer = finish(llm)["r"].outputs[0]
    assert answer.weight_versions[0] == (0, 4)
    assert [version for _, version in answer.weight_versions] == [4, 6]
    with pytest.raises(ConfigError, match="at least 6"):
        llm.update_weights(models[1], 5)


def test_swapped_requests_are_computed_again(models: tuple[Path, Path]) -> None:
    """Blocks in host memory were computed by the old weights."""
    llm = make(models[0], preemption_mode="swap", swap_space_bytes=1 << 20, num_lookahead_steps=0)
    llm.engine.add_request(SHARED, params(20), request_id="r")
    run_until(llm, "r", 5)
    (name,) = llm.engine.scheduler.running
    assert llm.engine.scheduler.preempt(name)
    assert llm.engine.kv.swapped
    llm.update_weights(models[1], 1)
    assert not llm.engine.kv.swapped
    answer = finish(llm)["r"].outputs[0]
    parts = by_version(answer)
    assert parts[1] == make(models[1]).generate([SHARED + parts[0]], params(len(parts[1])))[0].outputs[0].token_ids


def test_kv_of_the_old_weights_does_not_come_back_from_host_memory(models: tuple[Path, Path]) -> None:
    """There it would lose the mark that it may not be shared."""
    llm = make(models[0], preemption_mode="swap", swap_space_bytes=1 << 20)
    llm.engine.add_request(SHARED, params(20), request_id="r")
    run_until(llm, "r", 5)
    llm.update_weights(models[1], 1)
    run_until(llm, "r", 8)
    (name,) = llm.engine.scheduler.running
    assert llm.engine.scheduler.preempt(name)
    assert not llm.engine.kv.swapped
    finish(llm)
    fresh = make(models[1]).generate(SHARED, params())[0].outputs[0].token_ids
    assert llm.generate(SHARED, params())[0].outputs[0].token_ids == fresh


def test_a_static_batch_cannot_begin_again(models: tuple[Path, Path]) -> None:
    llm = make(models[0], batching="static")
    with pytest.raises(ConfigError, match="a static batch stays together"):
        llm.update_weights(models[1], 1, in_flight="recompute")
    llm.update_weights(models[1], 1)
    assert answers(llm) == answers(make(models[1]))


def test_steps_in_flight_are_reported_by_the_next_step(models: tuple[Path, Path]) -> None:
    llm = make(models[0], num_lookahead_steps=2)
    llm.engine.add_request([1, 2, 3], params(2), request_id="r", stream=False)
    assert not llm.engine.step()
    assert not llm.engine.step()
    assert llm.engine.num_in_flight == 2
    llm.update_weights(models[1], 1)
    assert llm.engine.num_in_flight == 0
    (output,) = llm.engine.step()
    assert output.finished
    assert output.outputs[0].weight_versions == [(0, 0)], "all of it was sampled before"


# -- random traffic ---------------------------------------------------------------------------------------------------


class WeightedHashLM(HashLM):
    """KV of a token depends on the weights that computed it, and so does every later token."""

    weights = 0

    def forward(self, batch: StepBatch) -> list[int]:
        return super().forward(dataclasses.replace(batch, token_ids=batch.token_ids + 1000 * self.weights))

    def update_weights(self, source: Any, progress: Any = None) -> None:
        self.weights = source["weights"]


def check_tokens(prompt: list[int], answer: CompletionOutput, asked: SamplingParams, window: int | None) -> None:
    """Every token is the one that weights of its version give, when they have computed all that it sees."""
    row = SamplingRow(asked, sample_seed(asked.seed or 0, answer.index), len(prompt))
    place = 0
    for version, tokens in by_version(answer).items():
        for token in tokens:
            seen = [known + 1000 * version for known in [*prompt, *answer.token_ids[:place]]]
            assert token == reference_tokens(seen, row, [window], VOCAB, 1)[0], f"token {place} of {answer}"
            place += 1


def random_traffic(seed: int) -> None:
    rng = random.Random(seed)
    window = rng.choice([None, None, 6])
    config = SchedulerConfig(
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.choice([5, 8, 16]),
        num_lookahead_steps=rng.randint(0, 2),
        preemption_mode=rng.choice(["auto", "recompute", "swap", "none"]),
        batching=rng.choice(["continuous", "continuous", "dynamic"]),
    )
    group = CacheGroup(rng.choice([12, 20, 40]), window, 20)
    model = WeightedHashLM([group], 4, VOCAB, 40)
    executor = LocalExecutor(model, num_slots=config.max_num_seqs, max_model_len=40, block_size=4)
    engine = Engine(executor, ModelLimits(VOCAB, 40, ()), config, clock=VirtualClock())
    in_flight = rng.choice(["continue", "recompute"])
    stems = [[rng.randrange(VOCAB) for _ in range(14)] for _ in range(2)]
    asked: dict[str, tuple[list[int], SamplingParams]] = {}
    done: dict[str, RequestOutput] = {}
    under_way: set[str] = set()  # when weights were replaced
    version = 0
    while len(asked) < 14 or engine.has_unfinished:
        if len(asked) < 14 and rng.random() < 0.3:
            prompt = rng.choice(stems)[: rng.randint(1, 14)] + [rng.randrange(VOCAB) for _ in range(rng.randint(0, 3))]
            name, wants = f"r{len(asked)}", params(rng.randint(1, 14), n=rng.choice([1, 1, 2]), seed=1, logprobs=None)
            asked[name] = prompt, wants
            engine.add_request(prompt, wants, request_id=name, stream=rng.random() < 0.5)
        if rng.random() < 0.06:
            version += 1
            engine.update_weights({"weights": version}, version, in_flight=in_flight)
            under_way |= asked.keys() - done.keys()
        if rng.random() < 0.1 and engine.scheduler.running:
            engine.scheduler.preempt(rng.choice(sorted(engine.scheduler.running)))
        done.update({output.request_id: output for output in engine.step() if output.finished})
        engine.check_invariants()
    assert done.keys() == asked.keys()
    for name, (prompt, wants) in asked.items():
        for answer in done[name].outputs:
            assert len(answer.token_ids) == wants.max_tokens
            if in_flight == "recompute" or name not in under_way:
                check_tokens(prompt, answer, wants, window)
    assert not engine.kv.counts().used


@pytest.mark.full
def test_random_traffic_reads_nothing_computed_by_other_weights(request: pytest.FixtureRequest) -> None:
    """Nothing computed by other weights is read: by nobody who begins to run again, or who began after the update."""
    sweep(request, 60, random_traffic)


@pytest.mark.nightly
def test_long_random_traffic_reads_nothing_computed_by_other_weights(request: pytest.FixtureRequest) -> None:
    sweep(request, 5_000, random_traffic)
