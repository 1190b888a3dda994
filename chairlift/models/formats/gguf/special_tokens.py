"""Special tokens of a GGUF file: the ids that its metadata names, and llama.cpp's values for missing keys.

The values are those of ``src/llama-vocab.cpp``, with one exception: llama.cpp takes token 11 for the first and the last
token of a byte-level vocabulary without these keys. That token is an ordinary comma in most vocabularies, so it is not
used here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

__all__ = ["CONTROL", "adds_bos", "end_tokens", "special_ids", "token_texts"]

CONTROL: Final = 3
"""Value of ``tokenizer.ggml.token_type`` for control tokens, which texts do not contain."""
_SENTENCE_PIECE: Final = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
_WORD_PIECE: Final = {
    **{"cls_token_id": 101, "seperator_token_id": 102, "unknown_token_id": 100, "padding_token_id": 0},
    "mask_token_id": 103,
}
_UNIGRAM: Final = {"eos_token_id": 1, "unknown_token_id": 2, "padding_token_id": 0}
_DEFAULTS: Final = {"bert": _WORD_PIECE, "llama": _SENTENCE_PIECE, "t5": _UNIGRAM}
"""``tokenizer.ggml.model`` -> ids of special tokens that a file may leave out."""
_KEYS: Final = (
    *("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id", "unknown_token_id", "padding_token_id"),
    *("cls_token_id", "seperator_token_id", "mask_token_id"),
)
"""Names of special tokens in files, in the spelling of llama.cpp."""
_ENDS: Final = frozenset(
    [
        "<|eot_id|>",
        "<|im_end|>",
        "<|end|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|eom_id|>",
        "</s>",
        "<eos>",
        "<EOT>",
        "_<EOT>",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
    ]
)
"""Texts of control tokens that end an answer, also if no key names them. Gemma 2's files name ``<eos>`` only, but its
answers end with ``<end_of_turn>``."""
_ADDING: Final = frozenset(
    [
        *("chameleon", "falcon-h1", "falcon3", "jina-v5-nano", "lfm2", "llama-bpe", "llama-v3", "llama3", "midm-2.0"),
        *("pixtral", "tekken"),
    ]
)
"""Names of byte-level tokenizers that put the first token before every text, unless a key says otherwise."""


def special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """Name of a key without ``tokenizer.ggml.`` -> token id, for the special tokens of a file. An id outside of the
    vocabulary counts as missing."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list) else None
    default = _DEFAULTS.get(str(metadata.get("tokenizer.ggml.model")), {})
    found = {}
    for key in _KEYS:
        for number in (metadata.get(f"tokenizer.ggml.{key}"), default.get(key)):
            if type(number) is int and number >= 0 and (count is None or number < count):
                found[key] = number
                break
    return found


def end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    """Ids of the tokens that end an answer, without repetition: first those that a key names, then control tokens
    whose text says so."""
    named = special_ids(metadata)
    tokens = metadata.get("tokenizer.ggml.tokens")
    found = [named[key] for key in ("eos_token_id", "eot_token_id", "eom_token_id") if key in named]
    types = metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(types, np.ndarray) and len(types) >= len(tokens):
        control = np.flatnonzero(types[: len(tokens)] == CONTROL).tolist()
        found += [number for number in control if tokens[number] in _ENDS]
    return list(dict.fromkeys(found))


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether the first token is put before every text."""
    usual = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in _ADDING
    return metadata.get("tokenizer.ggml.add_bos_token", usual) is True


def token_texts(tokens: Sequence[str]) -> list[str]:
    """The texts of a vocabulary. An empty text gets a name, because texts must differ."""
    return [token or f"[EMPTY_{number}]" for number, token in enumerate(tokens)]
