"""Words that must not be generated, in the spellings that a tokenizer may use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["spellings", "word_ids"]

_BEFORE: Final = ("", "\n", "(")
"""Texts before a word. After some of them, tokenizers omit the space that begins a text."""


def spellings(words: Sequence[str]) -> list[str]:
    """The texts to encode for :func:`word_ids`: first the texts of _BEFORE; then each word, with and without a space,
    after each of these."""
    return [*_BEFORE[1:], *(before + text for word in words for text in _forms(word) for before in _BEFORE)]


def word_ids(words: Sequence[str], token_ids: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """All distinct tokenisations of the words, from the token ids of their :func:`spellings`. A spelling that changes
    the tokens before it is dropped."""
    befores, rest = [(), *token_ids[: len(_BEFORE) - 1]], iter(token_ids[len(_BEFORE) - 1 :])
    ways = [
        tuple(ids[len(before) :])
        for _ in range(2 * len(words))
        for before in befores
        if list((ids := next(rest))[: len(before)]) == list(before)
    ]
    return tuple(dict.fromkeys(way for way in ways if way))


def _forms(word: str) -> tuple[str, str]:
    bare = word.lstrip() or word
    return bare, " " + bare
