"""A tokenizer in a GGUF file is the ``tokenizer.json`` that it was made from."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers

from chairlift.errors import ModelLoadError
from chairlift.text.tokenizer.gguf_splits import SPLITS
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
def test_byte_level_ids_and_texts_equal_the_original_tokenizer(tmp_path: Path, pre: str, pattern: str | None) -> None:
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
def test_sentence_piece_ids_and_texts_equal_the_original_tokenizer(tmp_path: Path, strip: bool) -> None:
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
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer model 'rwkv' is not supported; bert, gpt2, llama and t5 are"),
        ({"tokenizer.ggml.pre": "gemma4"}, "pre-tokenizer 'gemma4' is not known; give the directory of the original"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "token_type must have"),
        ({"tokenizer.ggml.merges": ["no such"]}, "merge 'no such' has no tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "token 'a' is there twice"),
    ],
)
def test_unknown_tokenizers_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    metadata = as_metadata(byte_level_backend(), "gpt2") | changes
    if "tokenizer.ggml.tokens" in changes:
        metadata["tokenizer.ggml.token_type"] = [1, 1]
    with pytest.raises(ModelLoadError, match=message):
        written(tmp_path, metadata)


PIECES: dict[str, str] = {
    "default": "It|'|ll| cost| |123|456|7| café's".replace("| café's", "| café|'|s"),
    "gpt-2": "It|'ll| cost| 1234567| café|'s",
    "smollm": "It|'ll| cost| |1|2|3|4|5|6|7| café|'s",
    "llama-bpe": "It|'ll| cost| |123|456|7| café|'s",
    "qwen2": "It|'ll| cost| |1|2|3|4|5|6|7| café|'s",
    "qwen35": "It|'ll| cost| |1|2|3|4|5|6|7| café|'s",
    "tekken": "It|'ll| cost| |1|2|3|4|5|6|7| café|'s",
    "gpt-4o": "It'll| cost| |123|456|7| café's",
    "tiny_aya": "It'll| cost| |1|234|567| café's",
    "deepseek-v3": "It|'ll| cost| |123|456|7| café|'s",
    "deepseek-llm": "It|'|ll| cost| |1234567| caf|é|'|s",
    "deepseek-coder": "It|'|ll| cost| |1|2|3|4|5|6|7| café|'|s",
    "falcon": "It|'|ll| cost| |123|456|7| café|'|s",
    "bloom": "It'll| cost| 1234567| café's",
    "kimi-k2": "It'll| cost| |123|456|7| café's",
    "minicpm5": "It|'ll| cost| |123|456|7| café|'s",
    "superbpe": "It'll cost |1|234|567| café's",
    "ufakzeka": "It|'ll| cost| |1|2|3|4|5|6|7| café|'s",
}
"""Name of a pre-tokenizer -> pieces of one text, as the pattern in the model's own ``tokenizer.json`` makes them."""


@pytest.mark.parametrize("name", PIECES)
def test_a_text_is_split_as_the_name_says(name: str) -> None:
    parts = [tokenizers.pre_tokenizers.Split(tokenizers.Regex(each), "isolated") for each in SPLITS[name].patterns]
    pieces = tokenizers.pre_tokenizers.Sequence(parts).pre_tokenize_str("It'll cost 1234567 café's")
    assert "|".join(piece for piece, _ in pieces) == PIECES[name]


@pytest.mark.parametrize("name", SPLITS)
def test_every_known_pre_tokenizer_keeps_all_of_a_text(tmp_path: Path, name: str) -> None:
    backend = byte_level_backend()
    names = {"tokenizer.ggml.pre": name, "tokenizer.ggml.add_bos_token": False}
    found = written(tmp_path, as_metadata(backend, "gpt2") | names)
    for text in TEXTS:
        assert found.decode(found.encode(text), skip_special_tokens=False) == unicodedata.normalize("NFC", text)


@pytest.mark.nightly
def test_a_real_tokenizer_equals_transformers() -> None:
    from transformers import AutoTokenizer

    path = real_gguf()
    ours, theirs = Tokenizer.from_dir(path), AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
