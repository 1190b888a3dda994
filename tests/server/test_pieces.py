"""Long replies are written while they are sent, and say what the whole would have said."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, MutableMapping
from typing import Any

import msgspec
import pytest

from chairlift.server.http.pieces import Pieces, json_items, respond
from tests.server.harness import make_state


class Reply(msgspec.Struct):
    name: str
    first: list[Any]
    second: list[Any] | None
    third: list[Any]


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 3000])
def test_the_parts_of_a_reply_are_written_in_their_places(count: int) -> None:
    numbers, texts = list(range(count)), [f'"{i}"é' for i in range(count)]
    pieces = Pieces()
    second = pieces.later(json_items(texts), count)
    first = pieces.later(json_items(numbers), count)
    written = list(pieces.write(Reply("\x00", first, second, [])))
    assert json.loads(b"".join(written)) == {"name": "\x00", "first": numbers, "second": texts, "third": []}
    assert pieces.num_entries == 2 * count
    assert all(len(piece) < 2 * 65_536 for piece in written)


def test_a_long_reply_is_made_on_a_thread_and_no_faster_than_it_is_read() -> None:
    threads: list[bool] = []

    def numbers() -> Iterator[int]:
        for number in range(200_000):
            threads.append(threading.current_thread() is threading.main_thread())
            yield number

    async def main() -> None:
        state = make_state()
        pieces = Pieces()
        response = respond(state, Reply("", pieces.later(json_items(numbers()), 200_000), None, []), pieces, {"x": "y"})
        bodies: list[bytes] = []
        made: list[int] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                names = {name for name, _ in message["headers"]}
                assert {b"x", b"content-type"} <= names and b"content-length" not in names
                return
            assert not state.writing.locked()  # others may have a piece of theirs made meanwhile
            made.append(len(threads))
            bodies.append(message["body"])

        async def receive() -> MutableMapping[str, Any]:
            raise AssertionError("nothing is read")

        await response({"type": "http"}, receive, send)
        assert json.loads(b"".join(bodies))["first"] == list(range(200_000))
        assert len(bodies) > 10 and made[0] < 20_000 and not any(threads)

    asyncio.run(main())


def test_a_short_reply_is_one_message() -> None:
    pieces = Pieces()
    response = respond(make_state(), Reply("", pieces.later(json_items(range(2048)), 2048), None, []), pieces, {})
    assert json.loads(bytes(response.body))["first"] == list(range(2048))
    assert int(response.headers["content-length"]) == len(response.body)
