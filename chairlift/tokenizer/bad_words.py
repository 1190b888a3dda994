"""Words that must not be generated, as the texts that a tokenizer may have them in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["spellings", "word_ids"]

_BEFORE: Final = ("", "\n", "(")
"""What a word may stand behind: some tokenizers write it there without the space that begins a text."""


def spellings(words: Sequence[str]) -> list[str]:
    """The texts to encode for :func:`word_ids`: first what words stand behind; then each word, with and without a
    space, behind each of these."""
    return [*_BEFORE[1:], *(before + text for word in words for text in _forms(word) for before in _BEFORE)]


def word_ids(words: Sequence[str], token_ids: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Each way to write the words once, in order, from the token ids of their :func:`spellings`. One that changes how
    the text before it is written is left out."""
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
