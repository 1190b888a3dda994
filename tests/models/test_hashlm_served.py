"""HashLM as a server has it: its name, its limits, its steps, and answers that the oracle foretells."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.base.outputs import RequestOutput
from chairlift.base.sampling_params import SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine.engine import Engine
from chairlift.engine.input_processor import ModelLimits
from chairlift.errors import ConfigError
from chairlift.loading.model import load_executor, read_tokenizer
from chairlift.models.hashlm_served import (
    HASHLM_EOS,
    HASHLM_TEMPLATE,
    HASHLM_TOKENS,
    HASHLM_VOCAB_SIZE,
    hashlm_runner,
    logprobs_of,
    parse_hashlm,
)
from chairlift.text.tokenizer import ChatTemplate, Tokenizer
from tests.e2e.oracle import chat_ids, expected_hashlm


def make(model: str = "hashlm", **settings: Any) -> tuple[Engine, Tokenizer]:
    config = EngineConfig.from_flat({"model": model, "max_num_batched_tokens": 32, "max_num_seqs": 4, **settings})
    loaded = load_executor(config)
    tokenizer = read_tokenizer(config, loaded.info.model_dir)
    limits = ModelLimits(loaded.info.vocab_size, loaded.info.max_model_len, loaded.info.eos_token_ids)
    return Engine(loaded.executor, limits, config.scheduler, tokenizer=tokenizer), tokenizer


def answers(engine: Engine) -> dict[str, RequestOutput]:
    done = {}
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
    return done


@pytest.mark.parametrize(
    ("name", "delay"),
    [
        ("hashlm", 0.0),
        ("hashlm:5ms", 0.005),
        ("hashlm:0ms", 0.0),
        ("hashlm:0.25ms", 0.00025),
        ("bundled", None),
        ("hashlm2", None),
        ("/models/hashlm", None),
        ("org/hashlm:5ms", None),
    ],
)
def test_the_name_says_the_time_per_step(name: str, delay: float | None) -> None:
    assert parse_hashlm(name) == delay


@pytest.mark.parametrize("name", ["hashlm:", "hashlm:5", "hashlm:ms", "hashlm:-5ms", "hashlm:5s", "hashlm:1e9ms"])
def test_another_time_is_refused_with_an_example(name: str) -> None:
    with pytest.raises(ConfigError, match="hashlm:5ms"):
        parse_hashlm(name)


def test_limits_are_4096_unless_the_settings_say_otherwise() -> None:
    served = hashlm_runner(EngineConfig(), 0.0)
    (group,) = served.runner.cache_groups
    assert (served.max_model_len, group.num_blocks, group.window) == (4096, 4096, None)
    small = hashlm_runner(EngineConfig.from_flat({"max_model_len": 64, "num_kv_blocks": 9, "block_size": 8}), 0.0)
    assert (small.max_model_len, small.runner.cache_groups[0].num_blocks) == (64, 9)
    assert (group.num_host_blocks, small.runner.cache_groups[0].num_host_blocks) == (410, 1)
    assert "swap space for 8 tokens of preempted requests" in small.memory_plan
    none = hashlm_runner(EngineConfig.from_flat({"swap_space_bytes": 0}), 0.0)
    assert none.runner.cache_groups[0].num_host_blocks == 0 and "no swap space" in none.memory_plan
    some = hashlm_runner(EngineConfig.from_flat({"swap_space_bytes": 10_000}), 0.0)
    assert some.runner.cache_groups[0].num_host_blocks == 10_000 // (16 * 16)
    assert "64 tokens in blocks of 8" in small.memory_plan and "about 1 chats of 64 tokens" in small.memory_plan


def test_a_swap_directory_must_be_there(tmp_path: Path) -> None:
    load_executor(EngineConfig.from_flat({"model": "hashlm", "swap_directory": tmp_path}))
    with pytest.raises(ConfigError, match="swap_directory"):
        load_executor(EngineConfig.from_flat({"model": "hashlm", "swap_directory": tmp_path / "none"}))


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_each_byte_is_a_token(text: str) -> None:
    _, tokenizer = make()
    ids = tokenizer.encode(text)
    if not any(special in text for special in HASHLM_TOKENS):
        assert ids == list(text.encode())
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_follow_the_bytes() -> None:
    _, tokenizer = make()
    assert [tokenizer.token_to_id(token) for token in HASHLM_TOKENS] == [256, HASHLM_EOS, 258]
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (HASHLM_VOCAB_SIZE, (HASHLM_EOS,))
    assert tokenizer.chat_template == HASHLM_TEMPLATE


def test_a_chat_is_rendered_as_chatml() -> None:
    _, tokenizer = make()
    chat = [{"role": "system", "content": "Be é."}, {"role": "user", "content": "Sie?"}]
    text = ChatTemplate(HASHLM_TEMPLATE).render(chat)
    assert text == "<|im_start|>system\nBe é.<|im_end|>\n<|im_start|>user\nSie?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(text, add_special_tokens=False) == chat_ids(("system", "Be é."), ("user", "Sie?"))


@settings(max_examples=40, deadline=None)
@given(
    requests=st.lists(
        st.fixed_dictionaries(
            {
                "prompt": st.lists(st.integers(0, HASHLM_VOCAB_SIZE - 1), min_size=1, max_size=50),
                "n": st.integers(1, 3),
                "seed": st.integers(0, 2**40),
                "temperature": st.sampled_from([0.0, 1.0]),
                "max_tokens": st.sampled_from([1, 2, 30, 300]),
                "ignore_eos": st.booleans(),
                "stop": st.sampled_from([None, ["a"], ["é", "zz"], ["\ufffd"]]),
                "stop_token_ids": st.sampled_from([None, [65, 66, 200]]),
                "logprobs": st.sampled_from([None, None, 0, 3]),
                "salt": st.sampled_from(["", "a"]),
            }
        ),
        min_size=1,
        max_size=5,
    ),
    blocks=st.sampled_from([60, 4096]),
)
def test_a_batch_answers_what_the_oracle_foretells(requests: list[dict[str, Any]], blocks: int) -> None:
    engine, _ = make(num_kv_blocks=blocks, block_size=8, max_model_len=400)
    sent: dict[str, tuple[list[int], SamplingParams, str]] = {}
    for number, request in enumerate(requests):
        prompt, salt = request["prompt"], request["salt"]
        params = SamplingParams(**{name: v for name, v in request.items() if name not in ("prompt", "salt")})
        engine.add_request(prompt, params, request_id=str(number), cache_salt=salt)
        sent[str(number)] = prompt, params, salt
    done = answers(engine)
    assert set(done) == set(sent)
    for name, (prompt, params, salt) in sent.items():
        for answer in done[name].outputs:
            expected = expected_hashlm(prompt, params, answer.index, salt)
            assert (answer.token_ids, answer.text, answer.finish_reason) == (
                expected.token_ids,
                expected.text,
                expected.finish_reason,
            )
            if params.logprobs is not None:
                assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
                for entry, token in zip(answer.logprobs, answer.token_ids, strict=True):
                    assert next(iter(entry)) == token and len(entry) == max(1, params.logprobs)


def test_prompt_logprobs_cover_the_prompt_in_chunks() -> None:
    engine, _ = make()
    prompt = list(b"a prompt of more than thirty-two bytes, so it takes two steps")
    engine.add_request(prompt, SamplingParams(prompt_logprobs=2, max_tokens=1, seed=1), request_id="one")
    found = answers(engine)["one"].prompt_logprobs
    assert found is not None and found[0] is None and len(found) == len(prompt)
    for entry, token in zip(found[1:], prompt[1:], strict=True):
        assert entry is not None
        expected = logprobs_of(token, 2)
        assert list(entry) == list(dict.fromkeys(expected.token_ids.tolist()))


def test_log_probabilities_begin_with_the_token_and_are_as_many_as_asked() -> None:
    for token in (0, 255, HASHLM_VOCAB_SIZE - 1):
        for count in (0, 1, 5, 10_000):
            entry = logprobs_of(token, count)
            ids, values = entry.token_ids.tolist(), entry.logprobs.tolist()
            assert ids[0] == token and entry.rank == 1 and len(ids) == len(values) == 1 + min(count, HASHLM_VOCAB_SIZE)
            assert all(0 <= i < HASHLM_VOCAB_SIZE for i in ids) and len(set(ids[1:])) == len(ids) - 1
            assert values[1:] == sorted(values[1:], reverse=True) and all(value < 0 for value in values)


def test_a_step_takes_its_time() -> None:
    engine, _ = make("hashlm:20ms")
    for number in range(4):
        engine.add_request([1, 2], SamplingParams(max_tokens=5, seed=1, ignore_eos=True), request_id=str(number))
    began = time.monotonic()
    assert len(answers(engine)) == 4
    assert time.monotonic() - began >= 5 * 0.02


def test_hashlm_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from chairlift.config import EngineConfig\n"
        "from chairlift.loading.model import load_executor, read_tokenizer\n"
        "config = EngineConfig.from_flat({'model': 'hashlm'})\n"
        "read_tokenizer(config, load_executor(config).info.model_dir).encode('x')\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
