"""Drafts by suffixes: what they are against a slow search over all texts, who shares answers, and how many are kept."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from chairlift.core.request import Request
from chairlift.core.spec_decode import suffix
from chairlift.core.spec_decode.suffix import SuffixProposer

RUN = 2


def request(name: str, tokens: Sequence[int], num_prompt_tokens: int = 1, **more: Any) -> Request:
    made = Request(name, list(tokens[:num_prompt_tokens]), max_tokens=500, **more)
    made.token_ids.extend(tokens[num_prompt_tokens:])
    return made


def proposer(**settings: Any) -> SuffixProposer:
    return SuffixProposer(**{"run": RUN, "depth": 24, "factor": 1.0, "least": 0.1, "max_answers": 100, **settings})


def voters_of(texts: Sequence[Sequence[int]], own: Sequence[int], length: int) -> list[tuple[Sequence[int], int]]:
    """(text, index after the match) of all places that have the last ``length`` tokens of ``own``, newest first."""
    places = [(text, end) for text in (own, *reversed(texts)) for end in range(len(text) - 1, RUN - 1, -1)]
    tail = list(own[-length:])
    return [(text, end) for text, end in places if end >= length and list(text[end - length : end]) == tail]


def slow(
    texts: Sequence[Sequence[int]], own: Sequence[int], limit: int, depth: int, factor: float, least: float
) -> list[int]:
    """The drafts with the highest sum of probabilities, counted over all places in all texts."""
    best: list[int] = []
    best_score = 0.0
    for length in range(min(depth, len(own)), RUN - 1, -1):
        voters = voters_of(texts, own, length)
        drafts: list[int] = []
        score, chance = 0.0, 1.0
        while len(drafts) < min(limit, int(factor * length)):
            whole = [[*text, *drafts] if text is own else text for text, _ in voters]
            at = [end + len(drafts) for _, end in voters]
            following = [text[n] if n < len(text) else None for text, n in zip(whole, at, strict=True)]
            votes = Counter(token for token in following if token is not None)
            if not votes:
                break
            token = next(each for each in following if votes[each] == max(votes.values()))
            chance *= votes[token] / len(voters)
            if chance < least or token is None:
                break
            drafts.append(token)
            score += chance
            voters = [each for each, after in zip(voters, following, strict=True) if after == token]
        if score > best_score:
            best, best_score = drafts, score
    return best


def test_drafts_are_the_most_frequent_continuations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafts are those of a search over all places."""
    monkeypatch.setattr(suffix, "_MAX_PLACES", 10_000)
    found = 0
    for seed in range(150):
        rng = random.Random(seed)
        alphabet = rng.randint(2, 5)
        made = proposer(depth=rng.randint(2, 8), least=rng.choice((0.0, 0.1, 0.4)), factor=rng.choice((1.0, 2.0)))
        texts = [[rng.randrange(alphabet) for _ in range(rng.randint(3, 25))] for _ in range(rng.randint(0, 5))]
        for number, text in enumerate(texts):
            made.forget(request(f"old{number}", [99, *text]))
        own = request("own", [rng.randrange(alphabet) for _ in range(rng.randint(2, 20))])
        for _ in range(3):
            limit = rng.randint(1, 6)
            (drafts,) = made.propose([(own, limit)])
            assert list(drafts) == slow(texts, own.token_ids, limit, made._depth, made._factor, made._least)
            found += bool(drafts)
            own.token_ids += [rng.randrange(alphabet) for _ in range(rng.randint(1, 3))]
    assert found > 200


def test_answers_of_earlier_requests_are_drafted() -> None:
    made = proposer()
    made.forget(request("a", [1, 5, 6, 7, 8, 9, 10]))
    assert list(made.propose([(request("b", [2, 5, 6, 7]), 8)])[0]) == [8, 9, 10]
    assert list(made.propose([(request("c", [2, 6, 7]), 8)])[0]) == [8, 9]  # as many as match
    assert not list(made.propose([(request("d", [2, 8, 6]), 8)])[0])


def test_a_text_that_repeats_itself_goes_on() -> None:
    assert list(proposer(factor=3.0).propose([(request("a", [9, 1, 2, 1, 2]), 5)])[0]) == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("more", [{"cache_salt": "x"}, {"adapter_id": 3}], ids=str)
def test_callers_with_another_salt_or_adapter_share_nothing(more: dict[str, Any]) -> None:
    made = proposer()
    made.forget(request("a", [1, 5, 6, 7, 8, 9]))
    assert not list(made.propose([(request("b", [2, 5, 6, 7], **more), 8)])[0])
    assert list(made.propose([(request("c", [2, 5, 6, 7]), 8)])[0]) == [8, 9]


def test_the_oldest_answers_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "_MAX_TOKENS", 50)
    made = proposer(max_answers=7)
    for number in range(40):
        made.forget(request(f"{number}", [0, *(number * 20 + n for n in range(10))], cache_salt=str(number % 3)))
        assert made.num_answers <= 5 and made.num_tokens <= 50
    assert sum(index.num_runs for index in made._answers.values()) == made.num_answers * 8
    newest = request("new", [1, 39 * 20, 39 * 20 + 1, 39 * 20 + 2], cache_salt="0")
    assert list(made.propose([(newest, 3)])[0]) == [39 * 20 + 3, 39 * 20 + 4, 39 * 20 + 5]
    for number in range(40):  # none of the old ones is found
        old = request("old", [1, number * 20, number * 20 + 1, number * 20 + 2], cache_salt=str(number % 3))
        assert bool(list(made.propose([(old, 3)])[0])) == (number >= 35)


def test_no_answers_are_kept_without_room() -> None:
    made = proposer(max_answers=0)
    made.forget(request("a", [1, 5, 6, 7, 8, 9]))
    assert not made.num_answers and not made.num_tokens


def test_a_long_prompt_is_indexed_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "_MAX_PER_CALL", 10)
    made, long = proposer(), request("a", [*range(25), 3, 4], 27)
    assert [len(made.propose([(long, 2)])[0]) for _ in range(4)] == [0, 0, 2, 2]


def test_ended_requests_leave_nothing_of_their_own() -> None:
    made = proposer()
    asked = request("a", [1, 5, 6, 7])
    made.propose([(asked, 2)])
    assert len(made) == 1
    made.forget(asked)
    assert not len(made)
