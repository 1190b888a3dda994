"""Marks show where a block ends in the tokens of a prompt, and leases end with the last whole block before it."""

from __future__ import annotations

import random

import pytest

from chairlift.server.caching.breakpoints import Breakpoints, Leases, written
from chairlift.server.caching.marks import positions

MARK = [901, 902, 901]


def test_places_are_found_where_the_tokens_differ() -> None:
    plain = list(range(100))
    marked = [*plain[:20], *MARK, *plain[20:50], *MARK, *plain[50:]]
    assert positions(plain, marked, 2) == [20, 50]
    assert positions(plain, [*plain, *MARK], 1) == [100]
    assert positions(plain, [*MARK, *plain], 1) == [0]


def test_a_mark_may_change_the_token_before_it() -> None:
    plain = list(range(100))
    marked = [*plain[:19], 500, *MARK, *plain[20:50], *MARK, *plain[50:]]
    assert positions(plain, marked, 2) == [19, 50]


def test_marks_that_are_missing_have_the_place_of_the_last_one() -> None:
    plain = list(range(100))
    assert positions(plain, [*plain[:20], *MARK, *plain[20:]], 3) == [20, 20, 20]
    assert positions(plain, plain, 2) == [0, 0]
    assert positions(plain, [*plain[:10], *range(600, 700)], 2) == [10, 10]


def test_random_prompts_with_few_different_tokens() -> None:
    rng = random.Random(1)
    for _ in range(300):
        plain = [rng.randrange(6) for _ in range(rng.randrange(30, 6000))]
        places = [each + 10 * index for index, each in enumerate(sorted(rng.sample(range(len(plain) - 20), 3)))]
        marked = list(plain)
        for place in reversed(places):
            marked[place:place] = MARK
        found = positions(plain, marked, 3)
        assert found == places


def test_a_long_mark_such_as_a_tool_is_passed() -> None:
    plain = [random.Random(2).randrange(50) for _ in range(1000)]
    tool = [random.Random(3).randrange(50, 90) for _ in range(400)]
    assert positions(plain, [*plain[:300], *tool, *plain[300:700], *MARK, *plain[700:]], 2) == [300, 700]


@pytest.mark.parametrize(
    ("points", "places", "leases"),
    [
        (Breakpoints((3600.0, 300.0)), [40, 99], ((32, 3600.0), (96, 300.0))),
        (Breakpoints((300.0,)), [15], ()),
        (Breakpoints((0.0, 300.0)), [40, 99], ((96, 300.0),)),
        (Breakpoints((300.0,), whole=3600.0), [97], ((96, 300.0), (112, 3600.0))),
        (Breakpoints((300.0, 3600.0)), [97, 98], ((96, 3600.0),)),
        (Breakpoints((300.0,)), [], ()),
        (Breakpoints(whole=300.0), [], ((112, 300.0),)),
    ],
)
def test_leases_cover_whole_blocks(points: Breakpoints, places: list[int], leases: Leases) -> None:
    assert points.leases(places, 120, 16) == leases


def test_written_tokens_are_those_that_the_cache_did_not_have() -> None:
    leases = ((32, 3600.0), (96, 300.0))
    assert written(leases, 0) == {3600.0: 32, 300.0: 64}
    assert written(leases, 48) == {300.0: 48}
    assert written(leases, 112) == {}
    assert written(((96, 300.0), (112, 3600.0)), 0) == {3600.0: 112}
