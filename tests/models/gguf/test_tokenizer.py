"""A tokenizer in a GGUF file is the ``tokenizer.json`` that it was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers

from chairlift.errors import ModelLoadError
from chairlift.text.tokenizer.tokenizer import Tokenizer
from tests.models.gguf.make import real_gguf, write_gguf
from tests.text.tokenizer.tiny import LLAMA3_PATTERN, byte_fallback_backend, byte_level_backend

TEXTS = (
    "The chairlift never stops: riders step on, and 12345 of them step off.",
    " leading and  double   spaces \n\n\t and a tab ",
    "Wer früh fährt, hat 你好 Привет 😀👍🏽 naïve café's",
    "<|im_start|>user\nhi<|im_end|>",
    "",
    "x",
)


def as_metadata(backend: tokenizers.Tokenizer, kind: str) -> dict[str, Any]:
    """The metadata that llama.cpp's converter writes for a tokenizer."""
    content = json.loads(backend.to_str())
    added = {token["id"]: token for token in content["added_tokens"]}
    tokens = {number: text for text, number in backend.get_vocab(with_added_tokens=True).items()}
    types = [1] * len(tokens)
    for number, token in added.items():
        types[number] = 3 if token["special"] else 4
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in content["model"]["merges"]]
    found: dict[str, Any] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": [tokens[number] for number in range(len(tokens))],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_bos_token": kind == "gpt2",
    }
    if kind == "gpt2":
        return found | {"tokenizer.ggml.merges": [" ".join(merge) for merge in merges]}
    rank = {left + right: -float(number) for number, (left, right) in reversed(list(enumerate(merges)))}
    scores = [rank.get(tokens[number], -1e6) for number in range(len(tokens))]
    return found | {"tokenizer.ggml.scores": scores, "tokenizer.ggml.unknown_token_id": tokens_id(backend, "<unk>")}


def tokens_id(backend: tokenizers.Tokenizer, token: str) -> int:
    found: int | None = backend.token_to_id(token)
    assert found is not None
    return found


def written(tmp_path: Path, metadata: dict[str, Any]) -> Tokenizer:
    tensors = {"x": (np.zeros((1, 32), dtype=np.float32), gguf.GGMLQuantizationType.F32)}
    return Tokenizer.from_dir(write_gguf(tmp_path / "model.gguf", metadata, tensors))


@pytest.mark.parametrize(("pre", "pattern"), [("llama-bpe", LLAMA3_PATTERN), ("gpt-2", None)])
def test_byte_level_ids_and_texts(tmp_path: Path, pre: str, pattern: str | None) -> None:
    backend = byte_level_backend(pattern)
    names = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.bos_token_id": tokens_id(backend, "<s>")}
    found = written(tmp_path, as_metadata(backend, "gpt2") | names | {"tokenizer.chat_template": "{{ messages }}"})
    assert found.chat_template == "{{ messages }}" and found.doubt == ""
    assert found.named_tokens == {"bos_token": "<s>"}
    for text in TEXTS:
        ids = backend.encode(text).ids
        assert found.encode(text) == ids, text
        assert found.decode(ids) == backend.decode(ids)


@pytest.mark.parametrize("strip", [True, False])
def test_sentence_piece_ids_and_texts(tmp_path: Path, strip: bool) -> None:
    backend = byte_fallback_backend()
    found = written(tmp_path, as_metadata(backend, "llama") | {"tokenizer.ggml.add_space_prefix": strip})
    for text in TEXTS:
        ids = backend.encode(text).ids
        if strip:
            assert found.encode(text) == ids, text
            assert found.decode(ids) == backend.decode(ids)
        else:  # the space that would be put before the text stands in it
            assert found.encode(f" {text}") == (ids or found.encode(" ")), text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer model 'bert' is not supported; gpt2 and llama are"),
        ({"tokenizer.ggml.pre": "chameleon"}, "pre-tokenizer 'chameleon' is not known; known are codeshell"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "token_type must have"),
        ({"tokenizer.ggml.merges": ["no such"]}, "merge 'no such' has no tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "token 'a' is there twice"),
    ],
)
def test_what_is_not_known_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    metadata = as_metadata(byte_level_backend(), "gpt2") | changes
    if "tokenizer.ggml.tokens" in changes:
        metadata["tokenizer.ggml.token_type"] = [1, 1]
    with pytest.raises(ModelLoadError, match=message):
        written(tmp_path, metadata)


@pytest.mark.nightly
def test_a_real_tokenizer_equals_transformers() -> None:
    from transformers import AutoTokenizer

    path = real_gguf()
    ours, theirs = Tokenizer.from_dir(path), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
