"""Rows of images are given up where that costs less time than waiting for room."""

from __future__ import annotations

import pytest

from chairlift.engine.image_room import HeldRows, rows_to_give_up


def rows(
    name: str, size: int = 10, seconds: float = 1.0, *, may_go: bool = True, needed: bool = True, tokens: int | None = 0
) -> HeldRows:
    return HeldRows(name.encode(), size, seconds, may_go, needed, tokens)


def chosen(held: list[HeldRows], lack: int = 10, waited: float = 0.0, num_requests: int = 1) -> str:
    """Names of the rows to give up. A prompt token takes 0.1 seconds."""
    return "".join(key.decode() for key in rows_to_give_up(held, lack, waited, num_requests, lambda n: 0.1 * n))


def test_rows_whose_kv_exists_go_first_and_at_once() -> None:
    held = [rows("a", tokens=5), rows("b", seconds=9.0, needed=False, tokens=5)]
    assert chosen(held) == "b"
    assert chosen(held, lack=20, waited=0.4) == "", "the needed rows are worth the wait"
    assert chosen(held, lack=20, waited=0.5) == "ba"


def test_the_cheapest_rows_for_their_size_go_first() -> None:
    held = [rows("a", 10, 3.0), rows("b", 20, 4.0), rows("c", 10, 1.0)]
    assert chosen(held, lack=10, waited=9.0) == "c"
    assert chosen(held, lack=11, waited=9.0) == "cb"
    assert chosen(held, lack=31, waited=9.0) == "cba"


@pytest.mark.parametrize(
    ("tokens", "waited", "num_requests", "goes"),
    [(5, 0.0, 1, False), (15, 0.0, 1, True), (5, 0.6, 1, True), (15, 0.0, 2, False), (5, 1.6, 2, True)],
)
def test_rows_go_if_the_wait_takes_longer_than_all_lose_by_encoding(
    tokens: int, waited: float, num_requests: int, goes: bool
) -> None:
    """Encoding again takes a second, and delays all requests. Until the rows are free, a request must compute
    ``tokens`` tokens."""
    assert chosen([rows("a", tokens=tokens)], waited=waited, num_requests=num_requests) == "a" * goes


def test_the_wait_ends_when_enough_rows_are_free() -> None:
    """The wait lasts until the request with 30 tokens has computed its image: then 20 bytes are free."""
    held = [rows("a", seconds=2.0, tokens=10), rows("b", seconds=2.0, may_go=False, tokens=30)]
    held.append(rows("c", size=20, seconds=2.0, tokens=60))
    assert chosen(held, lack=10) == "", "1 second of waiting costs less than 2 of encoding"
    assert chosen(held, lack=20, waited=0.9) == "c", "3.9 seconds of waiting"
    assert chosen([rows("a", tokens=None)], lack=10) == "a", "requests that wait for other images free no rows"


def test_no_rows_are_dropped_if_too_few_may_go() -> None:
    assert chosen([rows("a"), rows("b", may_go=False)], lack=11, waited=100.0) == ""
    assert chosen([]) == ""


def test_rows_that_cost_nothing_are_not_waited_for() -> None:
    assert chosen([rows("a", seconds=0.0)]) == "a"
