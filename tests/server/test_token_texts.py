"""Token texts, offsets and echoes of every kind of tokenizer, against the library that decodes step by step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tokenizers
from starlette.testclient import TestClient
from tokenizers import decoders, normalizers, pre_tokenizers, processors

from chairlift.server.http.app import make_app
from chairlift.text.tokenizer import Tokenizer
from tests.server.fake_engine import INFO, FakeEngine, make_state
from tests.text.tokenizer import tiny


def _trimmed() -> tokenizers.Tokenizer:
    """As Qwen: composes characters, and its offsets leave the space before a word out."""
    backend = tiny.byte_level_backend(tiny.LLAMA3_PATTERN)
    backend.normalizer = normalizers.NFC()
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    return backend


def _metaspace(scheme: Any) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(tiny.library("metaspace").to_str())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return backend


def _lower() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(tiny.library("word_piece").to_str())
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    return backend


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    **tiny.FAMILIES,
    "llama3": lambda: tiny.byte_level_backend(tiny.LLAMA3_PATTERN),
    "qwen": _trimmed,
    "metaspace_never": lambda: _metaspace("never"),
    "metaspace_first": lambda: _metaspace("first"),
    "bert": _lower,
}
TEXTS = [
    "the chairlift never stops: riders",
    " the lift",
    "two  spaces\n\nand the batch ",
    "a</s> the </s>lift",
    "<s>the chairlift",
    "nai\u0308ve cafe\u0301 the lift",
    "é😀 the",
]


@functools.cache
def make(kind: str) -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(KINDS[kind]().to_str()))


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def http(engine: FakeEngine) -> Iterator[TestClient]:
    with TestClient(make_app(make_state(engine)), base_url="http://localhost") as client:
        yield client


def _whole(text: str) -> bool:
    return "\ufffd" not in text


def ask(http: TestClient, engine: FakeEngine, tokenizer: Tokenizer, script: list[int], **fields: Any) -> Any:
    engine.prompts.tokenizer, engine.script = tokenizer, script
    engine.info = dataclasses.replace(INFO, vocab_size=tokenizer.vocab_size)
    asked = {"logprobs": 0, "ignore_eos": True, "max_tokens": len(script), **fields}
    reply = http.post("/v1/completions", json=asked)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_answers_are_what_the_library_decodes_token_by_token(
    http: TestClient, engine: FakeEngine, kind: str, skip: bool
) -> None:
    tokenizer = make(kind)
    library = tokenizer.backend
    prompt = tokenizer.encode("the lift")
    read = library.decode(prompt, skip_special_tokens=skip)
    for text in TEXTS:
        script = tokenizer.encode(text, add_special_tokens=False)
        choice = ask(http, engine, tokenizer, script, prompt=prompt, skip_special_tokens=skip)
        steps = [library.decode(prompt + script[:count], skip_special_tokens=skip) for count in range(len(script) + 1)]
        assert read + choice["text"] == steps[-1]
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        for token_id, token, at, before, after in zip(script, tokens, offsets, steps, steps[1:], strict=False):
            if skip and token_id in tokenizer.special_ids:
                assert at == len(before) - len(read)
            elif _whole(before) and _whole(after) and _whole(token) and token.strip():
                end = len(after) - len(read) + (kind == "suffix" and token.endswith(" "))
                assert at == end - len(token), (text, token)
                shown = choice["text"][at:]
                assert shown.startswith(token) or shown == token.rstrip(), (text, token)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_are_echoed_as_they_came_and_their_tokens_lie_in_them(
    http: TestClient, engine: FakeEngine, kind: str
) -> None:
    tokenizer = make(kind)
    for text in TEXTS:
        script = tokenizer.encode("the lift", add_special_tokens=False)
        choice = ask(http, engine, tokenizer, script, prompt=text, echo=True)
        assert choice["text"].startswith(text)
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        ids = tokenizer.encode(text)
        assert offsets == sorted(offsets) and not text[: offsets[0]].strip()
        seen = 0
        rewritten = "\u0301" in text or kind == "bert"
        for token_id, token, at in list(zip(ids, tokens, offsets, strict=False))[1:]:
            known = library_knows(tokenizer, token_id) and not token.startswith("bytes:")
            if known and not rewritten and at < len(text):
                shown = text[at:] + " "
                assert shown.lstrip().startswith(token.strip()), (text, token, at)
                seen += shown.startswith(token)
        assert seen or len(ids) < 3 or rewritten
        behind = list(zip(tokens[len(ids) :], offsets[len(ids) :], strict=True))
        assert len(behind) == len(script) and behind[0][1] >= len(text)
        for token, at in behind:
            assert (choice["text"] + " ")[at:].startswith(token), (text, token)


def library_knows(tokenizer: Tokenizer, token_id: int) -> bool:
    return tokenizer.backend.id_to_token(token_id) not in ("<unk>", "[UNK]")


@pytest.mark.parametrize("kind", KINDS)
def test_echoed_ids_read_as_their_tokens_in_a_row(http: TestClient, engine: FakeEngine, kind: str) -> None:
    tokenizer = make(kind)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if not all(_whole(tokenizer.token_text(i)) for i in ids):
            continue
        choice = ask(http, engine, tokenizer, [ids[0]], prompt=ids, echo=True, max_tokens=0, skip_special_tokens=False)
        assert choice["text"] == tokenizer.backend.decode(ids, skip_special_tokens=False)
        assert "".join(choice["logprobs"]["tokens"]).strip() == choice["text"].strip()


@pytest.mark.parametrize("kind", KINDS)
def test_chats_tokens_have_their_own_space(http: TestClient, engine: FakeEngine, kind: str) -> None:
    tokenizer = make(kind)
    words = tokenizer.encode("the the the", add_special_tokens=False)
    texts = [tokenizer.token_text(i) for i in words]
    assert "".join(texts).strip() == "the the the"
    assert [tokenizer.token_text(tokenizer.vocab_size), tokenizer.token_text(-1)] == ["", ""]


@pytest.mark.parametrize("kind", KINDS)
def test_places_are_those_of_the_library(kind: str) -> None:
    """A token begins where the library says, or with the space before."""
    tokenizer = make(kind)
    for text in TEXTS:
        encoding = tokenizer.backend.encode(text)
        places = tokenizer.offsets(text)
        assert len(places) == len(encoding.ids)
        for place, (start, end), added in zip(places, encoding.offsets, encoding.special_tokens_mask, strict=True):
            assert added or place == start or text[place:start].isspace(), (text, place, start, end)
