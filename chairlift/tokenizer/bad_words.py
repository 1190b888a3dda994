"""Words that must not be generated, as the texts that a tokenizer may have them in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["distinct", "spellings"]


def spellings(words: Sequence[str]) -> list[str]:
    """Each word as it is written at the start of a text and after a space."""
    bare = [word.lstrip() or word for word in words]
    return [text for word in bare for text in (word, " " + word)]


def distinct(token_ids: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Each sequence of token ids once, in order, without empty ones."""
    return tuple(dict.fromkeys(tuple(ids) for ids in token_ids if ids))
