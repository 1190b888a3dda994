"""Drafts from a text that the caller expects: from its beginning, and found again behind a change."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from chairlift.core.spec_decode import predicted
from chairlift.core.spec_decode.predicted import PredictedText

PROMPT = [90, 91]


def propose(text: PredictedText, answer: Sequence[int], most: int = 4) -> list[int]:
    return list(text.propose([*PROMPT, *answer], len(PROMPT), most))


def test_the_text_is_drafted_from_its_beginning() -> None:
    text = PredictedText([10, 11, 12, 13, 14, 15])
    assert propose(text, []) == [10, 11, 12, 13]
    assert propose(text, [10]) == [11, 12, 13, 14]
    assert propose(text, [10, 11, 12, 13]) == [14, 15]
    assert propose(text, [10, 11, 12, 13, 14, 15]) == []
    assert propose(text, [10, 11, 12, 13, 14, 15, 10]) == []


@pytest.mark.parametrize(
    ("change", "drafts"),
    [([50], []), ([50, 13], []), ([50, 13, 14], [15, 16]), ([14, 15], [16]), ([12, 50, 51, 52, 10, 11], [12, 13])],
    ids=["changed", "one token is no match", "replaced", "left out", "begun again"],
)
def test_the_place_is_found_again_after_a_difference(change: list[int], drafts: list[int]) -> None:
    text = PredictedText([10, 11, 12, 13, 14, 15, 16])
    assert propose(text, [10, 11], 2) == [12, 13]
    assert propose(text, [10, 11, *change], 2) == drafts


def test_the_longest_match_goes_first_and_then_the_next_behind() -> None:
    text = PredictedText([1, 2, 30, 7, 1, 2, 31, 8, 1, 2, 32])
    assert propose(text, [1, 2, 30, 60, 1, 2], 1) == [31]  # lost at 3: the next of three equally long ones
    assert propose(text, [1, 2, 30, 60, 1, 2, 61, 8, 1, 2], 1) == [32]


def test_the_search_goes_back_when_nothing_follows_the_last_place() -> None:
    text = PredictedText([1, 2, 3, 4, 5, 6])
    propose(text, [1, 2, 3, 4, 5, 6])
    assert propose(text, [1, 2, 3, 4, 5, 6, 50, 2, 3], 2) == [4, 5]


def test_an_answer_that_began_elsewhere_is_followed_from_where_it_meets_the_text() -> None:
    text = PredictedText([10, 11, 12, 13, 14])
    assert propose(text, [50, 51, 10]) == []
    assert propose(text, [50, 51, 10, 11]) == [12, 13, 14]


def slow(text: Sequence[int], answer: Sequence[int], lost_at: int) -> list[int]:
    """The places behind the longest match: those from ``lost_at`` on ascending, then the others descending."""

    def match(end: int) -> int:
        count = 0
        while count < min(len(answer), end, 16) and answer[len(answer) - count - 1] == text[end - count - 1]:
            count += 1
        return count

    matches = {end: match(end) for end in range(len(text) + 1)}
    longest = max(matches.values())
    if longest < 2:
        return []
    best = [end for end, count in matches.items() if count == longest]
    return [*(end for end in best if end >= lost_at), *reversed([end for end in best if end < lost_at])]


def test_the_place_equals_that_of_a_slow_search() -> None:
    rng = random.Random(0)
    found = 0
    for _ in range(400):
        alphabet = rng.randint(2, 8)
        text = [rng.randrange(alphabet) for _ in range(rng.randint(1, 30))]
        lost_at = rng.randrange(len(text))
        answer = [*text[:lost_at], 99]
        proposer = PredictedText(text)
        assert propose(proposer, answer, 40) == []
        answer += [rng.randrange(alphabet) for _ in range(rng.randint(1, 10))]
        places = slow(text, answer, lost_at)
        drafts = propose(proposer, answer, 40)
        assert drafts == (text[places[0] :] if places else []), f"{text}, {answer}"
        found += bool(drafts)
    assert found > 100


def test_few_places_of_many_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    match = PredictedText._match
    monkeypatch.setattr(PredictedText, "_match", lambda self, *given: looked.append(1) or match(self, *given))
    text = PredictedText([1, 2] * 5000)
    assert propose(text, [7, 1, 2], 2) == [1, 2]
    assert len(looked) <= 2 * predicted._MAX_COMPARED
