"""The image encoder takes at most a fraction of the time of running requests, whatever the size of its pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from chairlift.base.image_spans import ImageSpan, ImageTile
from chairlift.base.sampling_row import SamplingRow
from chairlift.config import CacheConfig
from chairlift.core.request import Request
from chairlift.core.scheduler.cost_model import StepFeatures
from chairlift.engine.clock import VirtualClock
from chairlift.engine.image_room import HeldRows
from chairlift.engine.images import Images
from chairlift.models.hashlm import HashLM
from tests.engine.make import greedy, make_engine


class TimedMemory:
    """An encoder whose tiles take ``pieces`` pieces of ``seconds`` each on a virtual clock."""

    def __init__(self, clock: VirtualClock, pieces: int, seconds: float) -> None:
        self.clock = clock
        self.pieces = pieces
        self.seconds = seconds
        self.num_pieces = 0
        self.num_rests = 0
        self.keys: set[bytes] = set()

    def encode(self, tile: ImageTile) -> Iterator[None]:
        for _ in range(self.pieces):
            self.clock.advance(self.seconds)
            self.num_pieces += 1
            yield
        self.keys.add(tile.key)

    def rest(self) -> None:
        self.num_rests += 1

    def holds(self, key: bytes) -> bool:
        return key in self.keys

    def nbytes(self, num_rows: int) -> int:
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


@pytest.mark.parametrize(
    ("seconds", "fraction"), [(0.001, 0.4), (0.01, 0.4), (0.03, 0.3), (0.05, 0.4), (0.1, 0.4), (0.35, 0.4)]
)
def test_a_turn_exceeds_its_time_only_by_a_piece_that_is_longer(seconds: float, fraction: float) -> None:
    clock = VirtualClock()
    memory = TimedMemory(clock, 1_000_000, seconds)
    images = waiting(memory, clock)
    turns = 1000
    for _ in range(turns):
        before = clock.now()
        images.work(0.1)
        assert clock.now() - before < max(0.04, seconds) + 1e-9
    assert memory.num_pieces * seconds == pytest.approx(fraction * turns * 0.1, rel=0.02)
    assert memory.num_rests == pytest.approx(min(turns, memory.num_pieces), abs=1), "one rest for each turn with pieces"


def test_short_pieces_between_long_ones_do_not_lengthen_a_turn() -> None:
    clock = VirtualClock()
    memory = TimedMemory(clock, 1_000_000, 0.0)
    images, longest, used = waiting(memory, clock), 0.0, 0.0

    def lengths() -> Iterator[None]:
        while True:
            for seconds in (0.002, 0.002, 0.015, 0.002, 0.015, 0.002):
                clock.advance(seconds)
                yield

    images._work = next(iter(images._queue)), lengths()
    images.work(0.1)  # the first turn does not know how long a piece takes
    for _ in range(200):
        before = clock.now()
        images.work(0.1)
        longest, used = max(longest, clock.now() - before), used + clock.now() - before
    assert longest < 0.04 + 1e-9, "a long piece began at the end of a turn"
    assert used > 0.6 * 200 * 0.04, "the encoder uses little of its time"


def test_a_hiccup_delays_the_encoder_for_a_few_turns_only() -> None:
    clock = VirtualClock()
    memory = TimedMemory(clock, 1_000_000, 1.0)
    images = waiting(memory, clock)
    images.work(0.1)
    memory.seconds, before = 0.001, memory.num_pieces
    for _ in range(60):
        images.work(0.1)
    assert memory.num_pieces - before > 100


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


def test_the_encoder_and_prompts_with_images_take_turns() -> None:
    clock = VirtualClock()
    memory = TimedMemory(clock, 1_000_000, 0.0001)
    seeing = type("Seeing", (HashLM,), {"images": memory})
    core = make_engine(model=seeing, max_num_seqs=4, num_blocks=200).core
    core.clock = clock
    core.preparers.attach(core.executor, core.scheduler, core.costs, clock, CacheConfig())
    core.preparers.images = Images(memory, clock)
    core.executor._runner.image_tags = {b"seen": 1}  # type: ignore[attr-defined]
    memory.keys.add(b"seen")
    text = Request("text", [1], max_tokens=60)
    seen = Request("seen", [1] * 62, max_tokens=1, images=(ImageSpan(1, 61, b"seen"),))
    new = Request("new", [1, 1], max_tokens=1, images=(ImageSpan(1, 1, b"new"),))
    for request in (text, seen, new):
        request.sampling = SamplingRow(greedy(), 1, len(request.token_ids))
        core.preparers.images.add(
            [request], [ImageTile(key, b"") for key in (b"seen", b"new")] if request.images else ()
        )
        core.scheduler.add(request)
        core.causes.added(request, clock.now())
        core.step()
    turns = list[bool]()
    while not seen.is_finished:
        pieces, computed = memory.num_pieces, seen.num_computed_tokens
        limit = core.costs.model.step_seconds(StepFeatures(1, core.scheduler.batch.num_computed_tokens))
        before = clock.now()
        core.step()
        turns.append(memory.num_pieces > pieces)
        computed = 62 - computed if seen.is_finished else seen.num_computed_tokens - computed
        pairs = computed * (computed + 1) / 2
        step = core.costs.model.step_seconds(StepFeatures(1, core.scheduler.batch.num_computed_tokens, computed, pairs))
        assert clock.now() - before + step < 1.45 * limit or computed <= 8, (turns, computed)
        assert len(turns) < 40, "the prompt makes no progress"
    assert len(turns) > 2 and turns[1:] == [not each for each in turns[:-1]], turns


def test_tiles_that_are_cheap_to_encode_again_are_dropped_first() -> None:
    """Two tiles have room. The costly tile outlives cheap tiles that were used later, but not for ever."""
    clock = VirtualClock()
    memory = TimedMemory(clock, 1, 0.0)
    images = Images(memory, clock, kept_bytes=2)

    def use(name: bytes, seconds: float) -> None:
        memory.seconds = seconds
        request = Request(name.decode(), [0, 0], max_tokens=1, images=(ImageSpan(0, 1, name),))
        images.add([request], [ImageTile(name, b"")])
        while not memory.holds(name):
            images.work(None)
        images.take_ready()
        images.forget(request)
        images.check_invariants([])

    use(b"costly", 10.0)
    for number in range(5):
        use(b"cheap%d" % number, 1.0)
        assert memory.holds(b"costly") and memory.holds(b"cheap%d" % number) and len(memory.keys) <= 2
    for number in range(5, 30):
        use(b"cheap%d" % number, 1.0)
    assert not memory.holds(b"costly"), "a tile that is not used again is kept for ever"
    assert memory.keys == {b"cheap28", b"cheap29"}, "tiles of equal cost are dropped in order of use"
    assert images.num_encoded == 31


def test_encoding_again_counts_for_all_requests_with_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for those that wait for KV or run: the encoder takes time from their steps."""
    asked = list[tuple[int, int]]()

    def rule(held: Iterable[HeldRows], lack: int, waited: float, num_requests: int, seconds: object) -> list[bytes]:
        asked.append((lack, num_requests))
        return []

    monkeypatch.setattr("chairlift.engine.images.rows_to_give_up", rule)
    clock = VirtualClock()
    images = Images(TimedMemory(clock, 1, 0.001), clock, limit=2)
    for name in "abcde":
        key = name.encode()
        request = Request(name, [1, 1], max_tokens=1, images=(ImageSpan(1, 1, key),))
        images.add([request], [ImageTile(key, b"")])
        images.work(None)
    assert [request.request_id for request in images.take_ready()[0]] == ["a", "b"]
    assert asked[-1] == (1, 5), "three requests wait for the encoder, and two have their rows"
