"""The image encoder takes a fraction of the time of running requests, whatever the size of its pieces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chairlift.engine.clock import VirtualClock
from chairlift.engine.images import Images
from chairlift.request import Request
from chairlift.vision.spans import ImageSpan, ImageTile


class TimedMemory:
    """An encoder whose tiles take ``pieces`` pieces of ``seconds`` each on a virtual clock."""

    def __init__(self, clock: VirtualClock, pieces: int, seconds: float) -> None:
        self.clock = clock
        self.pieces = pieces
        self.seconds = seconds
        self.num_pieces = 0
        self.keys: set[bytes] = set()

    def encode(self, tile: ImageTile) -> Iterator[None]:
        for _ in range(self.pieces):
            self.clock.advance(self.seconds)
            self.num_pieces += 1
            yield
        self.keys.add(tile.key)

    def holds(self, key: bytes) -> bool:
        return key in self.keys

    def size(self, key: bytes) -> int:
        return 1

    def drop(self, key: bytes) -> None:
        self.keys.remove(key)


def waiting(memory: TimedMemory, clock: VirtualClock, tiles: int = 1) -> Images:
    """Images with one request that waits for this number of tiles."""
    images = Images(memory, clock)
    keys = [bytes([index]) * 16 for index in range(tiles)]
    spans = tuple(ImageSpan(index, 1, key) for index, key in enumerate(keys))
    request = Request("a", list(range(tiles + 1)), max_tokens=1, images=spans)
    images.add([request], [ImageTile(key, b"") for key in keys])
    return images


@pytest.mark.parametrize("seconds", [0.001, 0.01, 0.03, 0.1, 0.35])
def test_the_encoder_takes_the_same_fraction_with_small_and_large_pieces(seconds: float) -> None:
    clock = VirtualClock()
    memory = TimedMemory(clock, 1_000_000, seconds)
    images = waiting(memory, clock)
    turns = 1000
    for _ in range(turns):
        before = clock.now()
        images.work(0.1)
        assert clock.now() - before < 0.04 + seconds + 1e-9, "a turn exceeds its time by less than a piece"
    assert memory.num_pieces * seconds == pytest.approx(0.4 * turns * 0.1, rel=0.01)


def test_without_running_requests_a_turn_does_not_depend_on_steps() -> None:
    clock = VirtualClock()
    memory = TimedMemory(clock, 1_000_000, 0.01)
    images = waiting(memory, clock)
    images.work(None)
    assert clock.now() == pytest.approx(0.05)
    for _ in range(3):  # a long piece while requests run
        memory.seconds = 1.0
        images.work(0.1)
    memory.seconds = 0.01
    before = clock.now()
    images.work(None)
    assert clock.now() - before == pytest.approx(0.05), "what was too long before does not count when none runs"


def test_a_turn_goes_on_with_the_next_tile() -> None:
    clock = VirtualClock()
    images = waiting(TimedMemory(clock, 3, 0.001), clock, tiles=4)
    images.work(0.1)
    assert images.num_encoded == 4 and clock.now() == pytest.approx(0.012)
    ready, failed = images.take_ready()
    assert [request.request_id for request in ready] == ["a"] and not failed and not images.is_encoding
