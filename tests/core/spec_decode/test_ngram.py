"""Drafts by n-grams: what they are against a slow search, and how much a call indexes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from chairlift.core.spec_decode import ngram
from chairlift.core.spec_decode.ngram import NgramIndex


def slow(tokens: Sequence[int], size: int, most: int) -> list[int]:
    """The tokens after the latest earlier place of the last ``size`` tokens. If they are too few, they repeat."""
    for end in range(len(tokens) - 1, size - 1, -1):
        if list(tokens[end - size : end]) == list(tokens[-size:]):
            text = list(tokens)
            while len(text) < end + most:
                text.append(text[end + len(text) - len(tokens)])
            return text[end : end + most]
    return []


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_drafts_are_what_followed_the_same_tokens_last(size: int) -> None:
    rng = random.Random(size)
    found = 0
    for _ in range(200):
        alphabet = rng.randint(1, 5)
        tokens = [rng.randrange(alphabet) for _ in range(rng.randint(1, 30))]
        index = NgramIndex(size)
        for _ in range(rng.randint(1, 12)):
            most = rng.randint(1, 9)
            drafts = list(index.propose(tokens, most))
            assert drafts == slow(tokens, size, most), f"{tokens}, runs of {size}, at most {most}"
            found += bool(drafts)
            tokens += [rng.randrange(alphabet) for _ in range(rng.randint(1, 4))]
    assert found > 300


def test_a_text_that_repeats_itself_goes_on() -> None:
    assert list(NgramIndex(2).propose([9, 1, 2, 1, 2], 5)) == [1, 2, 1, 2, 1]
    assert list(NgramIndex(3).propose([7, 7, 7, 7], 4)) == [7, 7, 7, 7]


def test_new_tokens_have_no_drafts() -> None:
    index = NgramIndex(2)
    assert not index.propose([1], 4)
    assert not index.propose([1, 2], 4)
    assert not index.propose([1, 2, 3, 4], 4)


def test_a_long_prompt_is_indexed_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "_MAX_PER_CALL", 10)
    index, tokens = NgramIndex(2), [*range(25), 3, 4]
    assert [len(index.propose(tokens, 3)) for _ in range(4)] == [0, 0, 3, 3]
    assert list(index.propose(tokens, 3)) == [5, 6, 7]
