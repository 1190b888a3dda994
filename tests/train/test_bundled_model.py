"""The bundled model: small, loadable anywhere, and it answers questions in words it has never seen."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from chairlift import LLM, SamplingParams
from tools.guide import normalise, read_guide
from tools.score_bundled_model import ask, held_back_questions
from tools.train_bundled_model import ASSETS_DIR, train_model, train_tokenizer, write_tokenizer

SAMPLE = 20


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM()


def test_assets_are_small() -> None:
    assert sum(path.stat().st_size for path in ASSETS_DIR.rglob("*") if path.is_file()) <= 12 * 2**20


def test_model_has_at_most_five_million_parameters_in_bf16() -> None:
    with (ASSETS_DIR / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header.pop("__metadata__")
    counts = []
    for tensor in header.values():
        assert tensor["dtype"] == "BF16"
        count = 1
        for dim in tensor["shape"]:
            count *= dim
        counts.append(count)
    assert 1_000_000 < sum(counts) <= 5_000_000


def test_chat_template_is_the_one_that_training_uses(tmp_path: Path) -> None:
    write_tokenizer(train_tokenizer(read_guide()), tmp_path)
    name = "tokenizer_config.json"
    assert json.loads((tmp_path / name).read_text()) == json.loads((ASSETS_DIR / name).read_text())


@pytest.mark.nightly
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    few = ("training.steps=4", "training.warmup_steps=1", "packing.step=sequences:8", "packing.pool=8")

    def weights(name: str, *overrides: str) -> dict[str, torch.Tensor]:
        outcome = train_model(tmp_path / name, [*few, "packing.capacity=512", *overrides])
        assert outcome.finished
        return load_file(outcome.directory / "model.safetensors")

    first, other = weights("first"), weights("other", "seed=4", "data.options.seed=4")
    weights("again", "checkpoints.every=2")
    shutil.rmtree(tmp_path / "again" / "step-00000004")
    again = weights("again")  # its second half, from what the first wrote down
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_the_model_says_what_continuous_batching_is(llm: LLM) -> None:
    expected = next(entry.answer for entry in read_guide() if entry.questions[0] == "What is continuous batching?")
    wordings = ("What is continuous batching?", "what is continuous batching", "WHAT IS CONTINUOUS BATCHING??")
    for answer in ask(llm, [(wording, expected) for wording in wordings]):
        assert answer.text == expected, answer.question


def test_the_model_answers_a_sample_of_held_back_wordings(llm: LLM) -> None:
    questions = held_back_questions(read_guide())
    sample = questions[:: len(questions) // SAMPLE][:SAMPLE]
    wrong = [answer for answer in ask(llm, sample) if not answer.right]
    assert len(wrong) <= SAMPLE // 5, wrong


@pytest.mark.nightly
def test_the_model_answers_the_held_back_wordings(llm: LLM) -> None:
    answers = ask(llm, held_back_questions(read_guide()))
    assert len(answers) >= 150
    assert sum(answer.right for answer in answers) / len(answers) >= 0.8


def test_the_model_admits_what_it_does_not_know(llm: LLM) -> None:
    fallback = next(entry.answer for entry in read_guide() if entry.questions[0] == "What is the capital of France?")
    assert ask(llm, [("What is the capital of France?", fallback)])[0].right


def test_an_answer_ends_by_itself_and_earlier_turns_do_not_disturb_it(llm: LLM) -> None:
    question = {"role": "user", "content": "What is the default block size?"}
    before = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Hello."}]
    params = SamplingParams(temperature=0.0, max_tokens=64)
    alone, later = llm.chat([[question], [*before, question]], params)
    assert alone.outputs[0].finish_reason == "stop"
    assert alone.outputs[0].text == later.outputs[0].text == "16 tokens."


def test_transformers_loads_the_directory_unchanged_and_gives_the_same_text(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(ASSETS_DIR)
    model = transformers.LlamaForCausalLM.from_pretrained(ASSETS_DIR, dtype=torch.float32).eval()
    for entry in read_guide()[::90]:
        messages = [{"role": "user", "content": entry.questions[0]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        assert ids[0].tolist() == llm.encode_chat(messages)
        out = model.generate(ids, max_new_tokens=256, do_sample=False)[0, ids.shape[1] :]
        theirs = tokenizer.decode(out, skip_special_tokens=True)
        ours = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=256))[0].outputs[0].text
        assert normalise(theirs) == normalise(ours) == normalise(entry.answer)
