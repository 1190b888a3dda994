"""Vocabularies of encoders in GGUF files as entries of ``tokenizer.json``: WordPiece (BERT) and unigrams (XLM-RoBERTa,
T5)."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from chairlift.errors import ModelLoadError
from chairlift.models.formats.gguf.reader import GGUFModel

__all__ = ["unigram", "word_piece", "word_piece_texts"]

_SPACE: Final = "\u2581"
_CONTINUED: Final = "##"
_LONGEST_WORD: Final = 100
"""Maximum number of characters of a word; longer words are unknown, as in BERT."""


def word_piece_texts(tokens: Sequence[str], control: npt.NDArray[np.bool_]) -> list[str]:
    """Texts of a WordPiece vocabulary as BERT's own file has them. llama.cpp marks the beginning of a word in place of
    its continuation. ``control`` says which tokens are special; these are unchanged."""
    return [
        token
        if special
        else token.removeprefix(_SPACE)
        if token.startswith(_SPACE) and token != _SPACE
        else f"{_CONTINUED}{token}"
        for token, special in zip(tokens, control.tolist(), strict=True)
    ]


def word_piece(vocab: Mapping[str, int], names: Mapping[str, str], control: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """Entries for WordPiece. The file does not say whether texts become lower case: they do unless the vocabulary has
    capital letters."""
    cased = any("A" <= token[:1] <= "Z" for token, number in vocab.items() if not control[number])
    return {
        "normalizer": {
            **{"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None},
            "lowercase": not cased,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": None,
        "decoder": {"type": "WordPiece", "prefix": _CONTINUED, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": names.get("unk_token", "[UNK]"),
            "continuing_subword_prefix": _CONTINUED,
            "max_input_chars_per_word": _LONGEST_WORD,
            "vocab": dict(vocab),
        },
    }


def unigram(model: GGUFModel, tokens: Sequence[str], scores: npt.NDArray[Any]) -> dict[str, Any]:
    """Entries for SentencePiece's unigrams. Raises ModelLoadError for a damaged table of characters."""
    metadata = model.metadata
    steps: list[dict[str, Any]] = []
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap")
    if charsmap is not None:
        if not isinstance(charsmap, np.ndarray) or charsmap.dtype.itemsize != 1:
            raise ModelLoadError(f"{model.path}: precompiled_charsmap must hold bytes; convert the model again")
        encoded = base64.b64encode(charsmap.tobytes()).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": encoded})
    if metadata.get("tokenizer.ggml.remove_extra_whitespaces", True) is True:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True) is True
    space = {
        "type": "Metaspace",
        "replacement": _SPACE,
        "prepend_scheme": "always" if prefix else "never",
        "split": True,
    }
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 2)
    if type(unknown) is not int or not 0 <= unknown < len(tokens):
        raise ModelLoadError(f"{model.path}: unknown_token_id {unknown!r:.40} is no token; convert the model again")
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps} if steps else None,
        "pre_tokenizer": space,
        "post_processor": None,
        "decoder": space,
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [[token, float(score)] for token, score in zip(tokens, scores.tolist(), strict=True)],
            "byte_fallback": False,
        },
    }
