"""Drafts by n-grams: what they are against a slow search, with a text that is expected, and how much a call indexes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from chairlift.spec_decode import ngram
from chairlift.spec_decode.ngram import NgramIndex


def slow(tokens: Sequence[int], size: int, most: int) -> list[int]:
    """What followed the last ``size`` tokens where they stood last before; continued in itself where that is short."""
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
        index, num_prompt_tokens = NgramIndex(size), rng.randint(1, len(tokens))
        for _ in range(rng.randint(1, 12)):
            most = rng.randint(1, 9)
            drafts = list(index.propose(tokens, num_prompt_tokens, most))
            assert drafts == slow(tokens, size, most), f"{tokens}, runs of {size}, at most {most}"
            found += bool(drafts)
            tokens += [rng.randrange(alphabet) for _ in range(rng.randint(1, 4))]
    assert found > 300


def test_a_text_that_repeats_itself_goes_on() -> None:
    assert list(NgramIndex(2).propose([9, 1, 2, 1, 2], 1, 5)) == [1, 2, 1, 2, 1]
    assert list(NgramIndex(3).propose([7, 7, 7, 7], 1, 4)) == [7, 7, 7, 7]


def test_new_tokens_have_no_drafts() -> None:
    index = NgramIndex(2)
    assert not index.propose([1], 1, 4)
    assert not index.propose([1, 2], 2, 4)
    assert not index.propose([1, 2, 3, 4], 2, 4)


def test_a_long_prompt_is_indexed_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "_MOST_PER_CALL", 10)
    index, tokens = NgramIndex(2), [*range(25), 3, 4]
    assert [len(index.propose(tokens, 27, 3)) for _ in range(4)] == [0, 0, 3, 3]
    assert list(index.propose(tokens, 27, 3)) == [5, 6, 7]


def test_an_expected_text_is_proposed_from_its_beginning() -> None:
    index = NgramIndex(3, hint=[10, 11, 12, 13, 14, 15])
    assert list(index.propose([1, 2], 2, 4)) == [10, 11, 12, 13]
    assert list(index.propose([1, 2, 10], 2, 3)) == [11, 12, 13]
    assert list(index.propose([1, 2, 10, 11, 12], 2, 9)) == [13, 14, 15]


def test_an_expected_text_is_found_again_behind_a_change() -> None:
    index = NgramIndex(2, hint=[10, 11, 12, 13, 14, 15])
    assert not index.propose([1, 2, 90], 2, 4)
    assert not index.propose([1, 2, 90, 12], 2, 4)
    assert list(index.propose([1, 2, 90, 12, 13], 2, 4)) == [14, 15]


def test_the_text_itself_goes_before_what_was_expected() -> None:
    index = NgramIndex(2, hint=[10, 11, 12])
    assert list(index.propose([5, 10, 11, 60, 10, 11], 1, 2)) == [60, 10]


def test_behind_the_end_of_an_expected_text_is_nothing() -> None:
    index = NgramIndex(2, hint=[10, 11])
    assert not index.propose([1, 10, 11], 1, 3)
    assert not NgramIndex(4, hint=[10, 11]).propose([1, 10, 11], 1, 3)
