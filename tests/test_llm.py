"""The offline facade over a tiny model: what it takes, what it gives, and that its numbers are transformers'."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from chairlift import LLM, ConfigError, RequestError, SamplingParams
from chairlift.base.outputs import Logprob, RequestOutput
from chairlift.base.step_batch import StepBatch
from chairlift.core.scheduler.output import SchedulerOutput
from chairlift.engine.input_processor import PreparedRequest, Prompt
from chairlift.errors import TemplateError
from chairlift.executor.local import LocalExecutor
from chairlift.kernels.cpu.library import default_threads
from tests.models.tiny import hf_logits, hf_model, tiny_hf_model

PROMPT = [5, 9, 77, 3, 21, 64, 8, 100, 41, 2, 90, 13, 55, 6, 31, 70, 11, 12, 99, 4]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_hf_model(tmp_path_factory.mktemp("model"), "llama")


def make(model_dir: Path, **settings: Any) -> LLM:
    defaults = {"skip_tokenizer_init": True, "num_kv_blocks": 200, "max_num_seqs": 8, "dtype": "float32"}
    return LLM(model_dir, **{**defaults, **settings})


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> LLM:
    return make(model_dir)


def greedy(max_tokens: int = 6, **params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **params})


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def drained(llm: LLM) -> bool:
    engine = llm.engine
    engine.check_invariants()
    while engine.num_in_flight:  # steps that were in flight when the last answer came
        engine.step()
    return not engine.has_unfinished and not engine.scheduler.has_unfinished and not engine.kv.counts().used


_FORK = """
import os, sys
from chairlift import EngineDeadError, LLM, SamplingParams
llm = LLM(sys.argv[1], skip_tokenizer_init=True, num_kv_blocks=200, threads=2)
asked = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
first = llm.generate([[5, 9]], asked)
if os.fork() == 0:
    try:
        llm.generate([[5, 9]], asked)
    except EngineDeadError as error:
        print(error, flush=True)
    del llm  # which must not wait for threads either
    os._exit(0)
os.wait()
assert llm.generate([[5, 9]], asked)[0].outputs[0].token_ids == first[0].outputs[0].token_ids
"""


@pytest.mark.full
def test_a_forked_child_is_told_that_the_engine_is_not_its_own(model_dir: Path) -> None:
    command = [sys.executable, "-c", _FORK, str(model_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "make an LLM in each process" in done.stdout


def test_threads_take_turns(model_dir: Path) -> None:
    """One would find the engine inside the other's step."""
    llm, alone = make(model_dir), make(model_dir).generate([PROMPT, PROMPT[:3]], greedy(20))
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            done = [pool.submit(llm.generate, [PROMPT, PROMPT[:3]], greedy(20)) for _ in range(12)]
            assert [tokens(each.result()) for each in done] == [tokens(alone)] * 12
    finally:
        sys.setswitchinterval(switching)
    assert drained(llm)


# -- settings ----------------------------------------------------------------------------------------------------


def test_unknown_settings_are_refused_by_name(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="unknown setting 'max_num_sequences'; did you mean 'max_num_seqs'"):
        LLM(model_dir, max_num_sequences=4)


def test_a_length_that_no_memory_holds_is_refused(model_dir: Path, tmp_path: Path) -> None:
    """A model may say what it likes."""
    folder = shutil.copytree(model_dir, tmp_path / "endless")
    config = json.loads((folder / "config.json").read_text())
    stretched = {"max_position_embeddings": 2**27, "rope_parameters": {"rope_type": "linear", "factor": 1e6}}
    (folder / "config.json").write_text(json.dumps(config | stretched))
    with pytest.raises(ConfigError, match=r"no memory for 4 rows .* of 134,217,728,000,000 tokens \(max_model_len\)"):
        make(folder, max_num_seqs=4)
    make(folder, max_num_seqs=4, max_model_len=512)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_cache_that_no_memory_holds_is_refused(model_dir: Path, kernels: str) -> None:
    with pytest.raises(
        ConfigError, match=r"the KV cache would have .* bytes \(kv_cache_memory_bytes, num_kv_blocks\) .*; lower it"
    ):
        make(model_dir, num_kv_blocks=2**31, block_size=256, kernels=kernels)


def test_more_memory_than_the_machine_has_is_refused_though_the_cache_would_need_less(model_dir: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"kv_cache_memory_bytes is 900,000,000,000,000, but this machine, .* has .*;"
    ):
        make(model_dir, kv_cache_memory_bytes=9 * 10**14)


def test_max_model_len_is_at_most_the_models(model_dir: Path) -> None:
    assert make(model_dir, max_model_len=512).max_model_len == 512
    with pytest.raises(ConfigError, match="max_model_len is 513, but the model was made for 512"):
        make(model_dir, max_model_len=513)


# -- what generate takes -----------------------------------------------------------------------------------------


def test_prompts_are_answered_in_their_order(llm: LLM) -> None:
    alone = tokens(llm.generate([1, 2, 3], greedy()))
    assert len(alone) == 1
    prompts: list[Prompt] = [[7], [1, 2, 3], (4, 5)]
    several = llm.generate(prompts, greedy())
    assert [output.prompt_token_ids for output in several] == [[7], [1, 2, 3], [4, 5]]
    assert tokens(several)[1] == alone[0]
    assert llm.generate([], greedy()) == []
    assert drained(llm)


def test_sampling_params_are_one_for_all_or_one_each(llm: LLM) -> None:
    outputs = llm.generate([[1], [2]], [greedy(2), greedy(5)])
    assert [len(answers[0]) for answers in tokens(outputs)] == [2, 5]
    assert [len(answers[0]) for answers in tokens(llm.generate([[1], [2]], greedy(3)))] == [3, 3]
    with pytest.raises(RequestError, match="2 prompts but 1 sampling parameters"):
        llm.generate([[1], [2]], [greedy()])


@pytest.mark.parametrize("prompts", [5, None, 1.5, {1, 2}, b"abc"])
def test_a_wrong_prompt_is_refused_by_its_type(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match=f"got {type(prompts).__name__}"):
        llm.generate(prompts, greedy())


@pytest.mark.parametrize("params", [5, {"n": 1}, 1.5])
def test_wrong_sampling_params_are_refused_by_their_type(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match=f"got {type(params).__name__}"):
        llm.generate([[1]], params)


@pytest.mark.parametrize("missing", [None, {}, 0])
def test_a_list_of_sampling_params_has_one_for_each(llm: LLM, missing: Any) -> None:
    words = f"prompt 1: sampling parameters must be a SamplingParams, got {type(missing).__name__}"
    with pytest.raises(RequestError, match=words):
        llm.generate([[1], [2]], [greedy(), missing])
    assert drained(llm)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([[1], [2, 999]], "prompt 1: .*token id 999"),
        ([[1], []], "prompt 1: the prompt is empty"),
        ([[1], "text"], "prompt 1: .*tokenizer was not loaded"),
        ([1, 2.5], "prompt 0: a prompt must be text or a list of token ids, got int"),
        ([[1]] * 3 + [[1] * 600], "prompt 3: the prompt has 600 tokens"),
        ([[2, 999]], "^the prompt has token id 999"),
    ],
)
def test_a_bad_prompt_is_named_and_nothing_is_left_behind(llm: LLM, prompts: Any, words: str) -> None:
    steps = llm.engine.scheduler.step
    with pytest.raises(RequestError, match=words):
        llm.generate(prompts, greedy())
    assert llm.engine.scheduler.step == steps
    assert drained(llm)


@pytest.mark.parametrize("messages", [{"role": "user", "content": "Hi"}, "Hi", None, 5])
def test_a_wrong_conversation_is_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="list of messages"):
        llm.chat(messages, greedy())


def test_chat_without_a_tokenizer_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="chat needs the tokenizer"):
        llm.chat([{"role": "user", "content": "Hi"}], greedy())


def test_chat_without_a_template_is_refused(model_dir: Path, tmp_path: Path) -> None:
    from tests.text.tokenizer.tiny import byte_level_backend

    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    llm = make(model_dir, skip_tokenizer_init=False, tokenizer=str(tmp_path))
    with pytest.raises(TemplateError):
        llm.chat([{"role": "user", "content": "Hi"}], greedy())
    assert drained(llm)


def test_a_broken_chat_template_is_told_at_load(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.text.tokenizer.tiny import byte_level_backend

    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("\n{% for %}")
    with caplog.at_level("WARNING", "chairlift"):
        llm = make(model_dir, skip_tokenizer_init=False, tokenizer=str(tmp_path))
    assert [record.getMessage() for record in caplog.records if "invalid at line 2" in record.getMessage()]
    assert llm.generate([[5, 9]], greedy(2))[0].outputs
    with pytest.raises(TemplateError, match="invalid at line 2"):
        llm.chat([{"role": "user", "content": "Hi"}], greedy())


def test_text_and_token_ids_may_be_mixed(tmp_path: Path) -> None:
    from tests.text.tokenizer.tiny import byte_level_backend

    model_dir = tiny_hf_model(tmp_path, "llama", vocab_size=512)
    byte_level_backend().save(str(model_dir / "tokenizer.json"))
    llm = make(model_dir, skip_tokenizer_init=False)
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("chairlift")
    prompts: list[Prompt] = ["chairlift", ids]
    one, two = llm.generate(prompts, greedy())
    assert (one.prompt, two.prompt) == ("chairlift", None)
    assert one.prompt_token_ids == two.prompt_token_ids
    assert one.outputs[0].token_ids == two.outputs[0].token_ids
    assert one.outputs[0].text == two.outputs[0].text != ""


# -- several answers ---------------------------------------------------------------------------------------------


def test_several_answers_are_distinct_and_reproducible(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=11, temperature=1.0, max_tokens=12, ignore_eos=True)
    first = tokens(llm.generate([PROMPT], params))[0]
    assert len({tuple(answer) for answer in first}) == 3
    among = llm.generate([[1, 2], PROMPT, [3]], [greedy(), params, greedy(20)])
    assert tokens(among)[1] == first
    assert [answer.index for answer in among[1].outputs] == [0, 1, 2]
    other = SamplingParams(n=3, seed=12, temperature=1.0, max_tokens=12, ignore_eos=True)
    assert tokens(llm.generate([PROMPT], other))[0] != first


def test_a_prefix_read_from_the_cache_is_reported_and_changes_nothing(model_dir: Path) -> None:
    llm = make(model_dir, block_size=8)
    first = llm.generate([PROMPT], greedy())
    second = llm.generate([PROMPT], greedy())
    assert [first[0].num_cached_tokens, second[0].num_cached_tokens] == [0, 16]
    assert tokens(first) == tokens(second)


# -- log-probabilities -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def truth(model_dir: Path) -> Any:
    """Log-probabilities after each token of a sequence, by transformers."""
    model = hf_model(model_dir)
    return lambda token_ids: torch.log_softmax(hf_logits(model, token_ids), dim=-1)


def check_entry(entry: dict[int, Logprob] | None, expected: torch.Tensor, chosen: int, count: int) -> None:
    assert entry is not None
    assert next(iter(entry)) == chosen
    best = torch.topk(expected, count).indices.tolist() if count else []
    assert set(entry) == {chosen, *best}
    for token_id, found in entry.items():
        assert found.logprob == pytest.approx(float(expected[token_id]), abs=TOLERANCE)
        assert found.rank == 1 + int((expected > expected[token_id]).sum())


@pytest.mark.parametrize("count", [0, 1, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_logprobs_are_transformers_log_softmax(llm: LLM, truth: Any, count: int, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=8, ignore_eos=True, logprobs=count)
    answer = llm.generate([PROMPT], params)[0].outputs[0]
    expected = truth(PROMPT + answer.token_ids)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 8
    total = 0.0
    for place, (token_id, entry) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        check_entry(entry, expected[len(PROMPT) - 1 + place], token_id, count)
        total += entry[token_id].logprob
    assert answer.cumulative_logprob == pytest.approx(total, abs=1e-5)


@pytest.mark.parametrize("budget", [1, 7, 64])
@pytest.mark.parametrize("depth", [0, 1])
def test_prompt_logprobs_are_transformers_log_softmax(model_dir: Path, truth: Any, budget: int, depth: int) -> None:
    llm = make(model_dir, max_num_batched_tokens=budget, num_lookahead_steps=depth, block_size=4)
    llm.generate([PROMPT], greedy(1))  # what is cached has no logits, so it must be computed again
    outputs = llm.generate([PROMPT, PROMPT[:1]], greedy(3, prompt_logprobs=2, n=2))
    entries = outputs[0].prompt_logprobs
    expected = truth(PROMPT)
    assert entries is not None
    assert entries[0] is None
    assert len(entries) == len(PROMPT)
    for place in range(1, len(PROMPT)):
        check_entry(entries[place], expected[place - 1], PROMPT[place], 2)
    assert outputs[0].num_cached_tokens == 0
    assert outputs[1].prompt_logprobs == [None]
    assert outputs[0].outputs[0].logprobs is None


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("settings", [{}, {"num_lookahead_steps": 1}, {"batching": "static"}], ids=str)
def test_a_prompt_as_long_as_the_model_is_scored(
    model_dir: Path, truth: Any, block_size: int, settings: dict[str, Any]
) -> None:
    length = len(PROMPT)
    asked = {"block_size": block_size, "max_model_len": length, "max_num_batched_tokens": 7, **settings}
    llm = make(model_dir, **asked)
    scores = greedy(0, prompt_logprobs=1, n=2, logprobs=0)
    whole, near = llm.generate([PROMPT, PROMPT[:-1]], scores)
    expected = truth(PROMPT)
    for output in (whole, near):
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(output.prompt_token_ids)
        for place, entry in enumerate(output.prompt_logprobs[1:], 1):
            check_entry(entry, expected[place - 1], PROMPT[place], 1)
        found = [(each.text, each.token_ids, each.logprobs, each.finish_reason) for each in output.outputs]
        assert found == [("", [], [], "length")] * 2
    one_left = llm.generate([PROMPT[:-1]], greedy(1))[0].outputs[0]
    assert llm.generate([PROMPT[:-1]], SamplingParams(temperature=0.0, max_tokens=None))[0].outputs[0] == one_left
    assert drained(llm)
    for prompt, params, message in (
        (PROMPT, greedy(1, prompt_logprobs=1), f"has {length} tokens, .* at least one"),
        ([*PROMPT, 1], scores, f"has {length + 1} tokens, but the model takes {length}; shorten"),
        (PROMPT[:-1], greedy(2), "lower max_tokens to 1"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate([prompt], params)


def test_prompt_logprobs_of_a_long_chunk_do_not_depend_on_its_length(model_dir: Path, truth: Any) -> None:
    prompt = [2 + i * i % 120 for i in range(300)]
    whole = make(model_dir).generate([prompt], greedy(1, prompt_logprobs=0))[0].prompt_logprobs
    assert whole is not None
    expected = truth(prompt)
    for place in range(1, 300):
        check_entry(whole[place], expected[place - 1], prompt[place], 0)


def test_prompt_logprobs_stay_whole_while_one_answer_is_computed_again(model_dir: Path) -> None:
    """A recompute brings them once more, chunk by chunk; the other answer's outputs must not show half of them."""
    llm = make(model_dir, max_num_batched_tokens=4, block_size=4)
    name = llm.engine.add_request(PROMPT, greedy(12, prompt_logprobs=0, n=2))
    preempted = False
    lengths = []
    while llm.engine.has_unfinished:
        outputs = llm.engine.step()
        lengths += [len(output.prompt_logprobs or ()) for output in outputs]
        if outputs and not preempted and len(outputs[0].outputs[1].token_ids) == 2:
            preempted = llm.engine.scheduler.preempt(f"{name}#0")
    assert preempted
    assert set(lengths) == {len(PROMPT)}


def test_late_prompt_logprobs_do_not_reach_the_next_request_of_that_name(model_dir: Path) -> None:
    llm = make(model_dir, num_lookahead_steps=1)
    llm.engine.add_request(PROMPT, greedy(4, prompt_logprobs=0), request_id="a")
    llm.engine.step()
    assert llm.engine.num_in_flight == 1
    llm.engine.abort("a")
    llm.engine.add_request([7], greedy(4, prompt_logprobs=0), request_id="a")
    outputs = []
    while llm.engine.has_unfinished:
        outputs += llm.engine.step()
    assert [output.prompt_logprobs for output in outputs] == [[None]] * 4


def test_a_model_with_broken_weights_fails_its_requests_and_says_why(tmp_path: Path) -> None:
    model_dir = tiny_hf_model(tmp_path, "llama")
    path = model_dir / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"].fill_(float("nan"))
    save_file(tensors, path, metadata={"format": "pt"})
    llm = make(model_dir)
    output = llm.generate([PROMPT], greedy())[0]
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("error", [])
    assert "NaN" in (output.error or "")
    assert drained(llm)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("window", [None, 20])
def test_a_request_that_shares_the_beginning_of_a_broken_prompt_is_answered(
    tmp_path: Path, kernels: Literal["auto", "torch"], window: int | None
) -> None:
    """The token that breaks is computed in one chunk with the end of what the prefix cache keeps."""
    model_dir = tiny_hf_model(tmp_path, "mistral", sliding_window=window)
    weights = load_file(model_dir / "model.safetensors")
    weights["model.embed_tokens.weight"][99] = float("nan")
    save_file(weights, model_dir / "model.safetensors", metadata={"format": "pt"})
    prompts = [[*PROMPT[:16], 5, 99, *PROMPT], [*PROMPT[:16], 7, 8, 9]]
    expected = make(model_dir, kernels=kernels).generate(prompts[1:], greedy())
    # In policy order, so that the second begins when the first has something to share.
    llm = make(model_dir, kernels=kernels, max_num_batched_tokens=12, policy_share=1.0)
    broken, sound = llm.generate(prompts, greedy())
    assert broken.error is not None and sound.num_cached_tokens == 16
    assert tokens([sound]) == tokens(expected)


def test_an_interrupted_generate_leaves_an_llm_that_goes_on(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives in the middle of a forward pass; it is held until the step has ended."""
    llm = make(model_dir)
    expected = llm.generate([[5, 6, 7]], greedy(6))[0].outputs[0].token_ids
    execute = LocalExecutor.execute
    steps = 0

    def pressed(self: LocalExecutor, out: SchedulerOutput) -> tuple[Any, StepBatch]:
        nonlocal steps
        steps += 1
        if steps == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return execute(self, out)

    with monkeypatch.context() as patch:
        patch.setattr(LocalExecutor, "execute", pressed)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[5, 6, 7], [8, 9]], greedy(6))
    assert steps == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not llm.engine.scheduler.requests
    assert llm.generate([[5, 6, 7]], greedy(6))[0].outputs[0].token_ids == expected


def test_prompts_may_have_the_names_that_vllm_gives_them(llm: LLM) -> None:
    plain = tokens(llm.generate([[5, 6, 7], [8, 9]], greedy()))
    assert tokens(llm.generate([{"prompt_token_ids": [5, 6, 7]}, [8, 9]], greedy())) == plain
    assert tokens(llm.generate({"prompt_token_ids": [8, 9]}, greedy())) == plain[1:]
    with pytest.raises(RequestError, match="no other key; got 'ids'"):
        llm.generate({"ids": [1]})


# -- promises ----------------------------------------------------------------------------------------------------


def watched(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """The priority and tenant of what reaches the core of an LLM, from now on."""
    seen: list[tuple[int, str]] = []
    add = llm.engine.core.add

    def noted(request: PreparedRequest) -> None:
        seen.append((request.priority, request.service.tenant))
        add(request)

    monkeypatch.setattr(llm.engine.core, "add", noted)
    return seen


@pytest.fixture
def served(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LLM, list[tuple[int, str]]]:
    """An LLM with the policy priority, and the priority and tenant of what reaches its core."""
    llm = make(model_dir, scheduling_policy="priority")
    return llm, watched(llm, monkeypatch)


def test_priority_and_tenant_are_given_once_or_for_each_prompt(served: tuple[LLM, list[tuple[int, str]]]) -> None:
    llm, seen = served
    prompts = [PROMPT, PROMPT[:5]]
    llm.generate(prompts, greedy(priority=4))
    llm.generate(prompts, greedy(priority=4), priority=-1, tenant="alice")
    llm.generate(prompts, [greedy(), greedy(priority=2)], priority=[3, 0], tenant=["alice", "bob"])
    assert seen == [(4, ""), (4, ""), (-1, "alice"), (-1, "alice"), (3, "alice"), (0, "bob")]
    assert drained(llm)


def test_chat_passes_priority_and_tenant_on(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("hashlm", scheduling_policy="priority", max_num_seqs=4)
    seen, talk = watched(llm, monkeypatch), [{"role": "user", "content": "Hi"}]
    llm.chat(talk, greedy(), priority=4, tenant="alice")
    llm.chat([talk, talk], greedy(), priority=[3, 0], tenant=["alice", "bob"])
    assert seen == [(4, "alice"), (3, "alice"), (0, "bob")]


def test_lists_of_settings_must_have_the_length_of_the_prompts(served: tuple[LLM, list[tuple[int, str]]]) -> None:
    llm, seen = served
    for wrong, words in (
        ({"priority": [1]}, "2 prompts but 1 priorities"),
        ({"tenant": ["a", "b", "c"]}, "2 prompts but 3 tenants"),
        ({"sampling_params": []}, "2 prompts but 0 sampling parameters"),
        ({"priority": [0, "high"]}, "prompt 1: priority must be a whole number"),
        ({"tenant": ["a", "b\n"]}, "prompt 1: tenant must be a text of at most 256 printable"),
    ):
        with pytest.raises(RequestError, match=words):
            llm.generate([PROMPT, PROMPT], **wrong)  # type: ignore[arg-type]
    assert drained(llm) and len(seen) == 2


def test_without_the_policy_a_priority_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="priority is 1, but the scheduling policy does not look at it"):
        llm.generate(PROMPT, greedy(), priority=1)
    assert tokens(llm.generate(PROMPT, greedy(), priority=0, tenant="alice")) == tokens(llm.generate(PROMPT, greedy()))


@pytest.mark.parametrize(("min_blocks", "warned"), [(49, False), (100, True)])
def test_reservations_that_cannot_hold_are_told(
    model_dir: Path, caplog: pytest.LogCaptureFixture, min_blocks: int, warned: bool
) -> None:
    classes = {"chat": {"min_blocks": min_blocks}, "batch": {"min_blocks": 100}}
    settings = {"governor_ttft_ms": 9.0} if warned else {}
    make(model_dir, num_kv_blocks=201, scheduling_policy="priority", service_classes=classes, **settings)
    assert ("governor_ttft_ms has no effect: the governor is off" in caplog.text) == warned
    assert ("reserve 200 KV blocks (chat 100, batch 100), but there are 200" in caplog.text) == warned


# -- how the model itself says that it is to be sampled -----------------------------------------------------------


def sampled_model(model_dir: Path, target: Path, **sampling: Any) -> Path:
    shutil.copytree(model_dir, target)
    path = target / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **sampling}))
    return target


def test_where_nobody_says_how_to_sample_the_model_does(model_dir: Path, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"temperature": 0.4, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.3}
    model = sampled_model(model_dir, tmp_path / "model", **asked, do_sample=True, max_new_tokens=3)
    llm = make(model, seed=1)
    assert llm.get_default_sampling_params() == SamplingParams(**asked)
    plain = make(model, seed=1, generation_config="vllm")
    assert plain.get_default_sampling_params() == SamplingParams()
    own, said, without = (
        tokens(which.generate([PROMPT] * 4, params))
        for which, params in ((llm, None), (make(model, seed=1), SamplingParams(**asked)), (plain, None))
    )
    assert own == said != without
    assert without == tokens(make(model, seed=1).generate([PROMPT] * 4, SamplingParams()))


def test_more_threads_than_processors_are_warned_of(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    processors = default_threads()
    assert make(model_dir, threads=processors).notes == make(model_dir).notes == ()
    (note,) = make(model_dir, threads=processors + 1).notes
    assert f"threads is {processors + 1}, but this process may use {processors} processors" in note
    assert note in caplog.text


def test_a_model_that_does_not_sample_is_greedy_and_says_what_is_not_applied(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = sampled_model(model_dir, tmp_path / "model", do_sample=False, temperature=2.0, stop_strings=["x"])
    llm = make(model)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0)
    assert tokens(llm.generate([PROMPT])) == tokens(llm.generate([PROMPT], SamplingParams(temperature=0)))
    (note,) = llm.notes
    assert "not applied: stop_strings ['x']; requests can set these parameters instead: stop" in note
    assert caplog.text.count(note) == 1
    assert make(model, generation_config="vllm").notes == ()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_settings_that_keep_one_token_are_greedy(model_dir: Path, kernels: str) -> None:
    llm = make(model_dir, kernels=kernels)
    bias = {"repetition_penalty": 1.3, "logit_bias": {7: 1.5}, "max_tokens": 9, "ignore_eos": True}
    expected = tokens(llm.generate([PROMPT], SamplingParams(temperature=0, **bias)))
    for one in (
        {"top_p": 0},
        {"top_p": 1e-9},
        {"top_k": 1},
        {"min_p": 1},
        {"temperature": 1e-6},
        {"temperature": 1e-4},
    ):
        asked = SamplingParams(**{"temperature": 1.7, **bias, **one})
        assert tokens(llm.generate([PROMPT], asked)) == expected, one


@pytest.mark.parametrize(("name", "value"), [("temperature", -1), ("top_p", "0.9"), ("top_k", 2.5)])
def test_an_impossible_generation_config_is_refused_with_the_way_out(
    model_dir: Path, tmp_path: Path, name: str, value: Any
) -> None:
    model = sampled_model(model_dir, tmp_path / "model", **{name: value})
    with pytest.raises(ConfigError, match=rf"generation_config.json: {name} must .*set generation_config to vllm"):
        make(model)
    assert make(model, generation_config="vllm").generate(PROMPT, greedy())


_CALLING = (
    '{# <tool_call> "arguments" <think> #}{% for t in tools or [] %}{{ t.function.name }} {% endfor %}'
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)


def test_chat_takes_tools_and_answers_are_read(tmp_path: Path) -> None:
    from tests.text.tokenizer.tiny import byte_level_backend

    model_dir = tiny_hf_model(tmp_path, "llama", vocab_size=512)
    byte_level_backend().save(str(model_dir / "tokenizer.json"))
    (model_dir / "chat_template.jinja").write_text(_CALLING)
    llm = make(model_dir, skip_tokenizer_init=False)
    assert llm.tokenizer is not None
    tools = [{"type": "function", "function": {"name": "look"}}]
    (output,) = llm.chat([{"role": "user", "content": "Hi"}], greedy(), tools=tools)
    assert llm.tokenizer.decode(output.prompt_token_ids) == "look Hi"
    said = '<think>a</think>b<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    output.outputs[0].token_ids = llm.tokenizer.encode(said, False)
    (answer,) = llm.read_answers(output, tools)
    assert (answer.content, answer.reasoning, [call.name for call in answer.calls]) == ("b", "a", ["look"])
    assert llm.read_answers(output)[0].calls == []
    with pytest.raises(RequestError, match=r"tools\[0\].function.name"):
        llm.chat([{"role": "user", "content": "Hi"}], greedy(), tools=[{"function": {}}])


def test_calls_that_must_come_are_valid(tmp_path: Path) -> None:
    """Random weights know no format: only the grammar makes calls of their answers."""
    import jsonschema_rs

    from tests.text.tokenizer.tiny import byte_level_backend

    model_dir, backend = tiny_hf_model(tmp_path, "llama", vocab_size=512), byte_level_backend()
    backend.save(str(model_dir / "tokenizer.json"))
    (model_dir / "chat_template.jinja").write_text(_CALLING.replace("<think>", ""))
    for path in model_dir.glob("*config.json"):  # an end that is no byte of a text
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": backend.get_vocab_size() - 1}))
    llm = make(model_dir, skip_tokenizer_init=False)
    schema: dict[str, Any] = {
        "properties": {"days": {"type": "integer", "minimum": 0, "maximum": 99}, "exact": {"type": "boolean"}},
        "required": ["days"],
    }
    look = {"type": "function", "function": {"name": "look", "parameters": schema}}
    tools = [look, {"type": "function", "function": {"name": "now"}}]
    ask, check = [{"role": "user", "content": "Hi"}], jsonschema_rs.validator_for(schema)
    params = [SamplingParams(seed=seed, max_tokens=200, temperature=1.0) for seed in range(100)]
    seen: Counter[str] = Counter()
    outputs = llm.chat([ask] * 100, params, tools=tools, tool_choice="required", parallel_tool_calls=False)
    for output in outputs:
        assert output.error is None and output.outputs[0].finish_reason == "stop"
        (answer,) = llm.read_answers(output, tools)
        assert len(answer.calls) == 1 and not answer.content and not answer.broken, output.outputs[0].text
        call = answer.calls[0]
        assert check.is_valid(json.loads(call.arguments)) if call.name == "look" else call.arguments == "{}"
        seen[call.name] += 1
    assert set(seen) == {"look", "now"}
    named = {"type": "function", "function": {"name": "now"}}
    (output,) = llm.chat(ask, params[0], tools=tools, tool_choice=named)
    assert [call.name for call in llm.read_answers(output, tools)[0].calls] == ["now"]
    form = SamplingParams(structured_outputs={"regex": "a"})
    with pytest.raises(RequestError, match="leave one out"):
        llm.chat(ask, form, tools=tools, tool_choice="required")
    cut = dataclasses.replace(params[0], max_tokens=len('<tool_call>\n{"name": "now", "arguments": {'))
    (output,) = llm.chat(ask, cut, tools=tools, tool_choice=named)
    (answer,) = llm.read_answers(output, tools, named)
    assert [(call.arguments, call.is_cut) for call in answer.calls] == [("{", True)]
    assert not llm.read_answers(output, tools)[0].calls


def test_strict_functions_hold_their_calls_where_the_model_decides(tmp_path: Path) -> None:
    """A bias makes random weights write the mark of a call. Then only the grammar makes a call of it."""
    from tests.text.tokenizer.tiny import byte_level_backend

    model_dir, backend = tiny_hf_model(tmp_path, "llama", vocab_size=512), byte_level_backend()
    backend.add_tokens(["<tool_call>", "</tool_call>", "<end>"])
    backend.save(str(model_dir / "tokenizer.json"))
    (model_dir / "chat_template.jinja").write_text(_CALLING.replace("<think>", ""))
    for path in model_dir.glob("*config.json"):  # an end that is no byte of a text
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": backend.get_vocab_size() - 1}))
    llm = make(model_dir, skip_tokenizer_init=False)
    schema = {"type": "object", "properties": {"exact": {"type": "boolean"}}, "required": ["exact"]}
    tools = [{"type": "function", "function": {"name": "look", "parameters": schema, "strict": True}}]
    ask = [{"role": "user", "content": "Hi"}]
    mark = backend.token_to_id("<tool_call>")
    params = SamplingParams(seed=1, max_tokens=120, temperature=1.0, logit_bias={mark: 100.0})
    (output,) = llm.chat(ask, params, tools=tools)
    (answer,) = llm.read_answers(output, tools)
    assert output.error is None and answer.calls, output.outputs[0].text
    assert json.loads(answer.calls[0].arguments)["exact"] in (True, False)
    with pytest.raises(RequestError, match="strict and structured_outputs"):
        llm.chat(ask, SamplingParams(structured_outputs={"regex": "a"}), tools=tools)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": "1m"}, "max_model_len is 1000000, but the model was made for"),
        ({"kv_cache_memory_bytes": 1000}, "the KV cache has 1,000 bytes, but two blocks of 16 tokens need"),
        ({"kv_cache_memory_bytes": "900TB"}, "kv_cache_memory_bytes is 900,000,000,000,000, but this machine"),
        ({"num_kv_blocks": 2_000_000_000}, "the KV cache would have"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be"),
    ],
)
def test_sizes_are_checked_before_weights_are_read(
    model_dir: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    """The weights cannot be read at all: their error would come first if they were read first."""
    for file in model_dir.iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=re.escape(message)):
        LLM(tmp_path, **settings)


@pytest.mark.parametrize(
    ("kernels", "logits"), [("auto", ""), ("torch", ", and the logits of 256 rows (max_num_seqs)")]
)
def test_steps_that_no_memory_holds_are_refused_before_weights_are_read(
    model_dir: Path, tmp_path: Path, kernels: str, logits: str
) -> None:
    config = json.loads((model_dir / "config.json").read_text()) | {"intermediate_size": 2**20}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"a step of 16,777,216 tokens \(max_num_batched_tokens\) would") as refused:
        LLM(tmp_path, max_num_batched_tokens=2**24, kernels=kernels, skip_tokenizer_init=True)
    assert logits in str(refused.value) and "bytes of memory; even without weights" in str(refused.value)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_the_bundled_model_needs_no_settings_on_a_small_machine(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("chairlift.executor.kv_tensors", "chairlift.kernels.control_group"):
        monkeypatch.setattr(f"{module}.total_memory", lambda: 1 << 30)
    (output,) = LLM(kernels=kernels, threads=1).generate("Hello", SamplingParams(max_tokens=2))
    assert output.error is None
