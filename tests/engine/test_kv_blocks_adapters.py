"""KV of adapters outlives the process: it is found by the adapter's content, whatever its name and number are."""

from __future__ import annotations

from pathlib import Path

import pytest

from chairlift import LLM, LoRARequest
from tests.engine.test_kv_blocks import GREEDY, PROMPT, make, opened
from tests.lora.adapters import random_adapter
from tests.models.tiny import tiny_hf_model


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_hf_model(tmp_path, "qwen2")


def start(model: Path, tmp_path: Path) -> LLM:
    return opened(make(model, tmp_path / "store", enable_lora=True))


def ask(llm: LLM, adapter: LoRARequest | None) -> tuple[list[int], object, int]:
    (output,) = llm.generate([PROMPT], GREEDY, lora_request=adapter)
    (text,) = output.outputs
    return text.token_ids, text.logprobs, output.num_cached_tokens


def test_the_next_engine_finds_the_blocks_of_an_adapter_by_its_content(model: Path, tmp_path: Path) -> None:
    path = random_adapter(model, tmp_path / "a", seed=1)
    other = random_adapter(model, tmp_path / "b", seed=2)
    first = start(model, tmp_path)
    cold = ask(first, LoRARequest("a", 1, path))
    warm = ask(first, LoRARequest("a", 1, path))
    first.engine.shutdown()
    second = start(model, tmp_path)
    assert ask(second, LoRARequest("b", 1, other))[2] == 0
    assert ask(second, None)[2] == 0
    loaded = ask(second, LoRARequest("renamed", 2, path))
    second.engine.shutdown()
    assert cold[2] == 0 and loaded[2] == warm[2] >= 64
    assert loaded[:2] == warm[:2]


def test_an_adapter_of_equal_name_and_other_content_finds_nothing(model: Path, tmp_path: Path) -> None:
    path = random_adapter(model, tmp_path / "a", seed=1)
    first = start(model, tmp_path)
    ask(first, LoRARequest("a", 1, path))
    first.engine.shutdown()
    random_adapter(model, path, seed=2)
    second = start(model, tmp_path)
    assert ask(second, LoRARequest("a", 1, path))[2] == 0
    second.engine.shutdown()


def test_an_adapter_that_is_being_trained_is_not_stored(model: Path, tmp_path: Path) -> None:
    path = random_adapter(model, tmp_path / "a", seed=1)
    llm = start(model, tmp_path)
    store = llm.engine.core.preparers.kv_blocks.store
    assert store is not None
    for seed in (1, 2):
        random_adapter(model, path, seed=seed)
        ask(llm, LoRARequest("a", seed, path))
        llm.engine.core.preparers.kv_blocks.store_blocks()
        assert store.num_written + store.queued_bytes > 0
        if seed == 1:
            written = store.num_written + store.queued_bytes
        llm.engine.remove_lora(seed)
    assert store.num_written + store.queued_bytes == written
    llm.engine.shutdown()


def test_two_loads_of_equal_content_share_blocks(model: Path, tmp_path: Path) -> None:
    path = random_adapter(model, tmp_path / "a", seed=1)
    copy = random_adapter(model, tmp_path / "copy", seed=1)
    llm = LLM(str(model), enable_lora=True, skip_tokenizer_init=True)
    first = ask(llm, LoRARequest("a", 1, path))
    again = ask(llm, LoRARequest("copy", 2, copy))
    assert (first[2], again[0]) == (0, first[0]) and again[2] >= 64
