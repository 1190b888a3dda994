"""KV that outlives an engine: the same answers, fewer computed tokens, and never blocks of another model."""

from __future__ import annotations

import dataclasses
import hashlib
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from chairlift import LLM, SamplingParams
from chairlift.config import EngineConfig
from chairlift.engine.forecaster import Forecaster
from chairlift.engine.kv_store.disk import OsDisk
from chairlift.engine.kv_store.store import BlockLoad
from chairlift.errors import ConfigError
from chairlift.loading.kv_store import _library_digest, digests_of, model_files
from tests.models.tiny import tiny_hf_model
from tests.test_setup import compile_kernels

PROMPT = list(range(3, 90))
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)


def opened(llm: LLM) -> LLM:
    """The engine, when its store is open."""
    source = llm.engine.core.preparers.kv_blocks
    source._compute_seconds = lambda num_tokens: 10.0  # loading is always faster
    end = time.monotonic() + 60
    while source.store is None and time.monotonic() < end:
        time.sleep(0.01)
    assert source.store is not None
    return llm


def make(model: Path, directory: Path, **settings: Any) -> LLM:
    return LLM(str(model), kv_store=str(directory), kv_store_bytes="64MB", skip_tokenizer_init=True, **settings)


def answer(llm: LLM) -> tuple[list[int], Any, int]:
    """Tokens, log-probabilities, and number of prompt tokens whose KV was not computed."""
    (output,) = llm.generate([PROMPT], GREEDY)
    (text,) = output.outputs
    return text.token_ids, text.logprobs, output.num_cached_tokens


@pytest.mark.parametrize(
    ("family", "fields", "settings"),
    [
        ("qwen2", {}, {}),
        ("qwen2", {}, {"kv_cache_dtype": "int8", "dtype": "bfloat16"}),
        ("qwen2", {}, {"kernels": "torch"}),
        ("mistral", {"sliding_window": 24}, {}),
        ("mamba2", {}, {"state_snapshot_interval": 16}),
    ],
)
def test_the_next_engine_goes_on_with_the_same_bits(
    family: str, fields: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_hf_model(tmp_path, family, **fields)
    first = opened(make(model, tmp_path / "store", **settings))
    cold = answer(first)
    warm = answer(first)
    first.engine.shutdown()
    second = opened(make(model, tmp_path / "store", **settings))
    loaded = answer(second)
    sources = [(each.num_cached_tokens, each.num_disk_tokens) for each in second.engine.core.step_log if each.chunks]
    second.engine.shutdown()
    assert cold[2] == 0
    assert loaded[2] == warm[2] >= 64
    assert sources[0] == (loaded[2], loaded[2]), "the record of the step tells where the tokens came from"
    assert loaded[:2] == warm[:2]


def changed_weights(model: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    return tiny_hf_model(tmp_path / "other", "qwen2", seed=1), {}


def changed_rope(model: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    other = tmp_path / "rope"
    shutil.copytree(model, other)
    config = other / "config.json"
    text = config.read_text()
    assert "10000.0" in text
    config.write_text(text.replace("10000.0", "20000.0"))
    return other, {}


@pytest.mark.parametrize(
    "change",
    [
        changed_weights,
        changed_rope,
        lambda model, _: (model, {"dtype": "bfloat16"}),
        lambda model, _: (model, {"block_size": 8}),
        lambda model, _: (model, {"kernels": "torch"}),
        lambda model, _: (model, {"quantization": "int8"}),
    ],
    ids=["weights", "rope", "dtype", "block_size", "kernels", "quantization"],
)
def test_blocks_of_another_model_or_setting_are_never_found(change: Any, tmp_path: Path) -> None:
    model = tiny_hf_model(tmp_path, "qwen2")
    first = opened(make(model, tmp_path / "store", dtype="float32"))
    answer(first)
    first.engine.shutdown()
    other, settings = change(model, tmp_path)
    second = opened(make(other, tmp_path / "store", **{"dtype": "float32", **settings}))
    assert answer(second)[2] == 0
    second.engine.shutdown()


def test_other_salts_find_nothing(tmp_path: Path) -> None:
    model = tiny_hf_model(tmp_path, "qwen2")
    first = opened(make(model, tmp_path / "store"))
    answer(first)
    first.engine.shutdown()
    second = opened(make(model, tmp_path / "store"))
    second.engine.add_request(PROMPT, GREEDY, request_id="other", stream=False, cache_salt="other")
    outputs = [output for _ in range(40) for output in second.engine.step()]
    assert [output.num_cached_tokens for output in outputs] == [0]
    second.engine.shutdown()


def test_new_weights_end_the_store(tmp_path: Path) -> None:
    model = tiny_hf_model(tmp_path, "qwen2")
    llm = opened(make(model, tmp_path / "store"))
    answer(llm)
    blocks = llm.engine.core.preparers.kv_blocks
    assert blocks.store is not None and blocks.store.num_blocks > 0
    llm.update_weights(str(tiny_hf_model(tmp_path / "new", "qwen2", seed=1)), 1)
    assert answer(llm)[2] == 0
    assert blocks.store.num_blocks == 0 and blocks.store.stopped == "the weights were replaced"
    llm.engine.shutdown()


def test_a_load_that_would_take_longer_than_computing_is_not_begun(tmp_path: Path) -> None:
    model = tiny_hf_model(tmp_path, "qwen2")
    first = opened(make(model, tmp_path / "store"))
    answer(first)
    first.engine.shutdown()
    second = opened(make(model, tmp_path / "store"))
    second.engine.core.preparers.kv_blocks._compute_seconds = lambda num_tokens: 1e-9
    assert answer(second)[2] == 0
    second.engine.shutdown()


def test_a_request_that_waits_for_its_blocks_is_forecast(tmp_path: Path) -> None:
    model = tiny_hf_model(tmp_path, "qwen2")
    first = opened(make(model, tmp_path / "store"))
    expected = answer(first)
    first.engine.shutdown()
    second = opened(make(model, tmp_path / "store"))
    core, blocks = second.engine.core, second.engine.core.preparers.kv_blocks
    held: list[BlockLoad] = []
    blocks.store.load = lambda wanted: held.append(BlockLoad(wanted)) or held[-1]  # a disk that has not answered yet
    forecaster = Forecaster(core.scheduler, core.costs, core.answer_lengths, {"default": 0}, loads=blocks.expected)
    second.engine.add_request(PROMPT, GREEDY, stream=False)
    second.engine.step()
    now = core.clock.now()
    made = forecaster.advance(now)
    assert made is not None and list(made.loading) == list(made.starts) == [*core.scheduler.requests]
    (seconds,) = (when - now for when in made.loading.values())
    nbytes = sum(blocks.block_bytes) * len(held[0].wanted)
    assert seconds == pytest.approx(nbytes / blocks.store.bytes_per_second)
    assert made.newcomers == {"default": now}, "others pass it"
    del blocks.store.load
    held[0].is_done = True  # it failed, so the request computes
    while second.engine.has_unfinished:
        outputs = second.engine.step()
    assert outputs[-1].outputs[0].token_ids == expected[0]
    made = forecaster.advance(core.clock.now())
    assert made is not None and not made.loading and not made.starts
    second.engine.shutdown()


@pytest.mark.parametrize("num", [1, 3])
def test_forks_of_one_prompt_share_what_was_loaded(num: int, tmp_path: Path) -> None:
    model = tiny_hf_model(tmp_path, "qwen2")
    params = dataclasses.replace(GREEDY, n=num, temperature=1.0, seed=5)
    first = opened(make(model, tmp_path / "store"))
    expected = [each.token_ids for each in first.generate([PROMPT], params)[0].outputs]
    first.engine.shutdown()
    second = opened(make(model, tmp_path / "store"))
    (output,) = second.generate([PROMPT], params)
    assert [each.token_ids for each in output.outputs] == expected
    assert output.num_cached_tokens >= 64
    second.engine.shutdown()


def test_a_changed_byte_of_a_large_file_changes_its_digest(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    weights = model / "model.safetensors"
    weights.write_bytes(bytes(3_000_000))
    disk = OsDisk(str(tmp_path / "store"))
    before = digests_of(disk, model_files(str(model), "auto"))
    assert digests_of(disk, model_files(str(model), "auto")) == before
    with weights.open("r+b") as file:
        file.seek(1_234_567)
        file.write(b"\1")
    assert digests_of(disk, model_files(str(model), "auto")) != before


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"enable_prefix_caching": False}, "kv_store cannot be used without enable_prefix_caching"),
        ({"prefix_offload": True}, "together with prefix_offload"),
        ({"kv_store_mode": "rx"}, "kv_store_mode must be one of rw, ro"),
        ({"kv_store_bytes": 100}, "kv_store_bytes"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig.from_flat({"model": "hashlm", "kv_store": "somewhere", **settings})


def test_the_write_rate_is_given_like_a_size() -> None:
    config = EngineConfig.from_flat({"model": "hashlm", "kv_store": "somewhere", "kv_store_write_rate": "64MB"})
    assert config.cache.kv_store_write_rate == 64_000_000


_KILLED = """
import sys, time
from chairlift import LLM, SamplingParams
llm = LLM(sys.argv[1], kv_store=sys.argv[2], kv_store_bytes="64MB", skip_tokenizer_init=True)
blocks = llm.engine.core.preparers.kv_blocks
while blocks.store is None:
    time.sleep(0.01)
llm.generate([list(range(3, 90))], SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
while blocks.store.queued_bytes or not blocks.store.num_blocks:
    blocks.store.poll()
    time.sleep(0.01)
print("stored", flush=True)
time.sleep(600)
"""


def test_a_killed_process_loses_nothing_that_was_written(tmp_path: Path) -> None:
    model = tiny_hf_model(tmp_path, "qwen2")
    command = [sys.executable, "-c", _KILLED, str(model), str(tmp_path / "store")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while (line := process.stdout.readline()) and line != "stored\n":
            pass
        process.kill()
    llm = opened(make(model, tmp_path / "store"))
    assert answer(llm)[2] >= 64
    llm.engine.shutdown()


_WRITING = """
import random, sys, time
from chairlift import LLM, SamplingParams
llm = LLM(sys.argv[1], kv_store=sys.argv[2], kv_store_bytes="64MB", skip_tokenizer_init=True)
blocks = llm.engine.core.preparers.kv_blocks
while blocks.store is None:
    time.sleep(0.01)
print("open", flush=True)
rng = random.Random(int(sys.argv[3]))
while True:
    start = rng.randrange(20)
    llm.generate([list(range(3 + start, 90 + start))], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
"""


@pytest.mark.nightly
def test_thirty_killed_engines_leave_no_wrong_block(tmp_path: Path) -> None:
    """Each is killed at a random time while it computes, writes and loads blocks of one directory."""
    model = tiny_hf_model(tmp_path, "qwen2")
    rng = random.Random(1)
    for number in range(30):
        command = [sys.executable, "-c", _WRITING, str(model), str(tmp_path / "store"), str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            while (line := process.stdout.readline()) and line != "open\n":
                pass
            time.sleep(rng.random() * 0.3)
            process.kill()
    llm, plain = opened(make(model, tmp_path / "store")), LLM(str(model), skip_tokenizer_init=True)
    cached = 0
    for start in range(20):
        prompt = list(range(3 + start, 90 + start))
        (found,), (wanted,) = (each.generate([prompt], GREEDY) for each in (llm, plain))
        assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert found.outputs[0].logprobs == wanted.outputs[0].logprobs
        cached += found.num_cached_tokens
    llm.engine.shutdown()
    assert cached >= 10 * 64


def test_engines_of_two_processes_share_a_directory_while_they_run(tmp_path: Path) -> None:
    model = tiny_hf_model(tmp_path, "qwen2")
    llm = opened(make(model, tmp_path / "store"))
    store = llm.engine.core.preparers.kv_blocks.store
    assert store is not None
    assert store.num_blocks == 0
    command = [sys.executable, "-c", _KILLED, str(model), str(tmp_path / "store")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while (line := process.stdout.readline()) and line != "stored\n":
            pass
        end = time.monotonic() + 60
        while not store.num_blocks and time.monotonic() < end:
            store.poll()
            time.sleep(0.01)
        found = answer(llm)[2]
        process.kill()
    llm.engine.shutdown()
    assert found >= 64


def test_all_files_of_a_gguf_model_count(tmp_path: Path) -> None:
    """Parts of the model, image encoders beside it, and the one that the setting names."""
    (tmp_path / "elsewhere").mkdir()
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-F16.gguf", "other.gguf", "elsewhere/e.gguf"):
        (tmp_path / name).write_bytes(name.encode())
    names = model_files(str(tmp_path / "m-00001-of-00002.gguf"), str(tmp_path / "elsewhere" / "e.gguf"))
    assert sorted(names) == ["elsewhere/e.gguf", "m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-F16.gguf"]


def test_two_builds_of_one_source_share_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libkernels.so"
    monkeypatch.setattr("chairlift.kernels.cpu.library.LIBRARY_PATH", library)
    objects = [Path("amx/matmul-1234.o"), Path("paths-5678.o")]
    found = []
    for content, made_from in ((b"one", objects), (b"other", objects[::-1]), (b"one", objects[:1])):
        library.write_bytes(content)
        compile_kernels.note_origin(library, made_from)
        found.append(_library_digest("amx"))
    assert found[0] == found[1] != found[2]
    library.write_bytes(b"replaced")  # the note is of another file
    assert _library_digest("amx") == hashlib.sha256(b"replaced").hexdigest()
