"""A tokenizer.json that makes of a few letters a terabyte, or tries a pattern for years: known at load, or stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, pre_tokenizers

from chairlift.base.sampling_params import SamplingParams
from chairlift.engine.info import EngineInfo
from chairlift.engine.input_processor import InputProcessor, ModelLimits
from chairlift.errors import ModelLoadError, RequestError, WorkerLostError
from chairlift.text.tokenizer import Tokenizer
from chairlift.text.tokenizer.bad_words import spellings, word_ids
from chairlift.text.tokenizer.encoder import PromptEncoder
from chairlift.text.tokenizer.growth import MAX_GROWTH, check_growth, doubt_about
from chairlift.text.tokenizer.patterns import is_steady, shortest
from chairlift.text.tokenizer.text_worker import TextWorker
from tests.server.fake_engine import INFO
from tests.text.tokenizer.published_patterns import SLOW, STEADY
from tests.text.tokenizer.tiny import FAMILIES, byte_fallback_backend, byte_level_backend

PATIENCE = 60.0


def replace(old: str, new: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: old}, "content": new}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def sequence(*steps: dict[str, Any], of: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", of: list(steps)}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
REPEAT = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
REPEAT["single"] = [{"Sequence": {"id": "A", "type_id": 0}}] * 4
REPEAT["pair"] = [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"]
MANY = {"type": "TemplateProcessing", "pair": REPEAT["pair"]}
MANY["single"] = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
MANY["special_tokens"] = {"<s>": {"id": "<s>", "ids": [1] * 9999, "tokens": ["<s>"] * 9999}}

REFUSED: dict[str, dict[str, Any]] = {
    "nested replacements": {"normalizer": sequence(*[replace("a", "aaaa")] * 8)},
    "one large replacement": {"normalizer": replace("é", "x" * 999)},
    "sequences in sequences": {
        "normalizer": sequence(sequence(replace("a", "b" * 20)), sequence(replace("b", "c" * 20)))
    },
    "replacements in the decoder": {"decoder": sequence(*[replace("a", "aaaa")] * 8, of="decoders")},
    "a pattern in the decoder": {"decoder": replace("(a|aa)+$", " ", "Regex")},
    "a text repeated": {"post_processor": sequence(REPEAT, REPEAT, of="processors")},
    "many tokens for one": {"post_processor": MANY},
}
"""Contents of ``tokenizer.json`` that only a malicious file has."""
DOUBTED: dict[str, dict[str, Any]] = {
    "replacements that need each other": {
        "normalizer": sequence(
            replace("a", "-"), replace("ж", "a"), replace("щ", "b"), replace("ab", "c" * 250), replace("c", "d" * 30)
        )
    },
    "a pattern that is tried twice as often per letter": {"pre_tokenizer": split("(a|aa)+$")},
    "a pattern that is tried from every letter": {"pre_tokenizer": split(r"\w*[!?]|\s+")},
    "a pattern in the normalizer": {"normalizer": replace(r"\w*[!?]|\s+", "!", "Regex")},
}
"""Contents that cannot be judged by reading them. Harmless files have most of them, too."""
FAILS_AT_ONCE: dict[str, dict[str, Any]] = {
    "replacements of patterns": {"normalizer": sequence(*[replace("[a-f]", "aaaaaaaa", "Regex")] * 10)},
    "byte levels of byte levels": {"pre_tokenizer": sequence(*[BYTES] * 34, of="pretokenizers")},
}
"""Tokenizers of this kind that fail on a few characters."""
BOMBS = {
    "replacements that need each other": "жщ" * 4000,
    "a pattern that is tried twice as often per letter": "a" * 200 + "b",
    "a pattern that is tried from every letter": "a" * 60_000,
    "a pattern in the normalizer": "a" * 60_000,
}


def folder_with(tmp_path: Path, parts: dict[str, Any]) -> Path:
    described = json.loads(byte_level_backend().to_str()) | parts
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    return tmp_path


@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_that_makes_texts_far_too_long_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"in tokenizer\.json .*(another release|again)"):
        Tokenizer.from_dir(folder_with(tmp_path, REFUSED[name]))


def test_a_growing_tokenizer_is_refused_before_added_tokens_are_normalized(tmp_path: Path) -> None:
    added = {"id": 900, "content": "aaaa", "normalized": True, "special": False}
    parts = REFUSED["nested replacements"] | {
        "added_tokens": [added | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)]
    }
    with pytest.raises(ModelLoadError, match="'a'"):
        Tokenizer.from_dir(folder_with(tmp_path, parts))


@pytest.mark.parametrize("family", FAMILIES)
def test_ordinary_tokenizers_stay_in_the_server_s_process(family: str) -> None:
    said = json.loads(FAMILIES[family]().to_str())
    check_growth(said)
    assert doubt_about(said) == ""


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": sequence({"type": "NFKC"}, replace(" ", "▁"), {"type": "Prepend", "prepend": "▁"})},
        {"normalizer": sequence(replace("``", '"'), replace("''", '"'), {"type": "NFKD"}, {"type": "StripAccents"})},
        {"normalizer": sequence({"type": "Nmt"}, {"type": "NFKC"}, replace(" {2,}", " ", "Regex"))},
        {"normalizer": sequence({"type": "NFC"}, replace(r"\s+", " ", "Regex"), {"type": "Lowercase"})},
        {"normalizer": sequence(*[replace(" {2,}", "▁", "Regex"), replace(r"\s+", " ", "Regex")] * 4)},
        {
            "pre_tokenizer": sequence(
                split(r"\d"), split(r"[0-9]{1,3}"), split(r" ?\p{L}+|[^\r\n]+"), of="pretokenizers"
            )
        },
        {"decoder": sequence(replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}, of="decoders")},
        {"normalizer": None, "pre_tokenizer": "nonsense", "post_processor": [1], "decoder": {"decoders": [None, 3]}},
        {},
    ],
)
def test_the_parts_of_published_tokenizers_are_not_doubted(parts: dict[str, Any]) -> None:
    check_growth(parts)
    assert doubt_about(parts) == ""


@pytest.mark.parametrize("name", STEADY)
def test_patterns_of_published_models_are_no_reason_to_doubt(name: str) -> None:
    Regex(STEADY[name])  # it is one
    assert doubt_about({"pre_tokenizer": sequence(split(STEADY[name]), BYTES, of="pretokenizers")}) == ""


@pytest.mark.parametrize("name", SLOW)
def test_patterns_that_may_take_for_ever_are_doubted_whoever_has_them(name: str) -> None:
    assert "may take for ever" in doubt_about({"pre_tokenizer": split(SLOW[name])})


@pytest.mark.parametrize(
    "pattern", ["", "(", ")", "a)", "[a", "[]a]", "a{2,1}", "a**", "{2}", "\\", "(?>a)", "a+?", "(?i)a"]
)
def test_a_pattern_that_is_not_understood_is_not_called_steady(pattern: str) -> None:
    assert is_steady(pattern) == (pattern == "")
    assert not is_steady("(" * 5000 + pattern)
    assert shortest(pattern) == 0


RUNS = ("a", " ", "\n ", "Aa", "中")


@pytest.mark.parametrize("name", STEADY)
def test_patterns_called_steady_split_long_runs_fast(name: str) -> None:
    """The square of 20,000 characters takes seconds."""
    splitter = pre_tokenizers.Split(Regex(STEADY[name]), "isolated")
    for run in RUNS:
        begin = time.process_time()
        splitter.pre_tokenize_str((run * 20_000)[:20_000] + "x")
        assert time.process_time() - begin < 1.0


@pytest.mark.parametrize(
    ("pattern", "characters"),
    [(" {2,}", 2), (r"\s+", 1), ("ab?c|def", 2), ("(?i:ss)", 1), ("(?:ab){2}", 2), (r"(?<=a)^", 0), ("a*", 0)],
)
def test_a_replacement_grows_by_what_it_puts_for_the_shortest_match(pattern: str, characters: int) -> None:
    assert shortest(pattern) == characters
    several = [replace(pattern, "x" * 8 * max(1, characters), "Regex")] * 2
    doubt = doubt_about({"normalizer": sequence(*several)})
    assert bool(doubt) == (characters == 0)  # 8 times twice is what is allowed, and 9 times twice is not
    assert doubt_about({"normalizer": sequence(*several, replace("x", "yy"))})


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="limits on a process need Linux")
@pytest.mark.parametrize("name", FAILS_AT_ONCE)
def test_a_tokenizer_that_fails_with_a_few_characters_is_refused(name: str, tmp_path: Path) -> None:
    """The library normalizes added tokens while it reads, so a process with limits reads first."""
    with pytest.raises(ModelLoadError, match=r"too much time or memory .* skip_tokenizer_init"):
        Tokenizer.from_dir(folder_with(tmp_path, FAILS_AT_ONCE[name]))


linux = pytest.mark.skipif(sys.platform != "linux", reason="limits on a process need Linux")


def run(work: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(work(), PATIENCE))


@pytest.mark.full
@linux
@pytest.mark.parametrize("name", DOUBTED)
def test_a_text_that_takes_too_long_is_an_error_and_the_next_is_encoded(name: str, tmp_path: Path) -> None:
    async def work() -> None:
        tokenizer = Tokenizer.from_dir(folder_with(tmp_path, DOUBTED[name]))
        assert tokenizer.doubt
        encoder = PromptEncoder(tokenizer, 2048, 8)
        assert encoder._texts is not None
        encoder._texts.seconds = 0.3
        encoder._texts._setup["memory_bytes"] = 64 << 20
        await encoder.start()
        bomb = asyncio.create_task(encoder.encode(BOMBS[name]))
        turns = 0
        while not bomb.done():  # the loop goes on
            turns += 1
            await asyncio.sleep(0.001)
        with pytest.raises(RequestError, match=r"text|token ids"):
            await bomb
        assert turns > 1
        encoder._texts.seconds = PATIENCE
        assert len(await encoder.encode("Hi!")) > 0
        await encoder.close()

    run(work)


@linux
def test_a_process_encodes_as_the_tokenizer_does(tmp_path: Path) -> None:
    async def work() -> None:
        tokenizer = Tokenizer.from_dir(
            folder_with(tmp_path, {"pre_tokenizer": sequence(split(r"\w*[!?]|\s+"), BYTES, of="pretokenizers")})
        )
        encoder = PromptEncoder(tokenizer, 2048, 8)
        for text in ("Hi! How?", "", "é😀\x00\u2028", "<s>Hi</s>", "x y " * 5000):
            for special in (False, True):
                assert await encoder.encode(text, special) == tokenizer.encode(text, special)
        with pytest.raises(RequestError, match="half a surrogate pair at character 3"):
            await encoder.encode("abc\ud83d")
        nothing: Any = 3
        with pytest.raises(RequestError, match="must be a string, got int"):
            await encoder.encode(nothing)
        await encoder.close()

    run(work)


@linux
def test_a_text_whose_process_is_killed_from_outside_is_tried_once_more_and_is_not_to_blame(tmp_path: Path) -> None:
    async def work() -> None:
        name = "a pattern that is tried from every letter"
        worker = TextWorker(str(folder_with(tmp_path, DOUBTED[name])), 16_384)
        worker.seconds = PATIENCE
        await worker.start()
        text = asyncio.create_task(worker.encode("a" * 200_000))
        for _ in range(2):
            while not worker.busy_pids:
                await asyncio.sleep(0.001)
            (pid,) = worker.busy_pids
            os.kill(pid, signal.SIGKILL)
            while pid in worker.pids:
                await asyncio.sleep(0.001)
        with pytest.raises(WorkerLostError, match="from outside"):
            await text
        assert await worker.encode("Hi!")
        await worker.close()

    run(work)


def test_words_that_a_caller_of_python_forbids_are_encoded_as_its_prompts_are(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(folder_with(tmp_path, DOUBTED["a pattern that is tried from every letter"]))
    info: EngineInfo = INFO
    inputs = InputProcessor(ModelLimits(tokenizer.vocab_size, 64, (0,)), tokenizer, info, None)
    params = SamplingParams(bad_words=["ab"], max_tokens=4)
    assert tokenizer.doubt
    found = inputs.prepare("r", "Hi", params, 0.0)
    assert found.bad_word_ids == word_ids(["ab"], [tokenizer.encode(text, False) for text in spellings(["ab"])])
    assert found.bad_word_ids and found.prompt_token_ids == tokenizer.encode("Hi")


def test_a_short_text_grows_no_further_than_the_limit_says() -> None:
    """The limit is far above what is honest, and a million of characters times it is still memory that there is."""
    assert 11 < MAX_GROWTH <= 64
    assert doubt_about(json.loads(byte_fallback_backend().to_str())) == ""
