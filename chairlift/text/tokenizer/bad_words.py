"""Finds the token ids of words that must not be generated, in all spellings that a tokenizer may use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["spellings", "word_ids"]

_BEFORE: Final = ("", "\n", "(")
"""Texts that may come before a word. After some of them, a tokenizer does not add its usual space at the beginning of
a text."""


def spellings(words: Sequence[str]) -> list[str]:
    """Texts to encode for :func:`word_ids`. First come the texts in _BEFORE alone. Then each word follows, with and
    without a space before it, after each text in _BEFORE."""
    return [*_BEFORE[1:], *(before + text for word in words for text in _forms(word) for before in _BEFORE)]


def word_ids(words: Sequence[str], token_ids: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """All distinct token sequences of the words, computed from the token ids of their :func:`spellings`.

    A spelling is dropped if it changes the tokens of the text before the word.
    """
    befores = [(), *token_ids[: len(_BEFORE) - 1]]
    rest = iter(token_ids[len(_BEFORE) - 1 :])
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
