"""A new kind of request needs no change in the core: this page makes one up, and the scheduler honours it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from chairlift.core.request import Request
from chairlift.core.rows.kind import RowKind
from tests.core.scheduler.driver import Driver, request


class Pairs(RowKind):
    """At most two requests of this kind run together. Each is prepared before it joins, and computes the positions in
    ``params`` (first, end) in one step."""

    name = "pair"
    num_looked_past = 8

    def __init__(self) -> None:
        self.unprepared: dict[str, Request] = {}
        self.held: set[str] = set()
        self.running: set[str] = set()

    def has(self, request: Request) -> bool:
        return request.params is not None

    def added(self, request: Request) -> None:
        request.is_ready = False
        request.waits_for = self.name
        self.unprepared[request.request_id] = request
        self.held.add(request.request_id)

    def obstacle(self, request: Request) -> bool:
        return len(self.running) >= 2

    def skips(self, request: Request) -> bool:
        return self.obstacle(request)

    def joined(self, request: Request) -> None:
        self.running.add(request.request_id)

    def num_bytes(self, chunks: Iterable[Request], decodes: list[Request]) -> int:
        return 100 * sum(self.has(request) for request in [*chunks, *decodes])

    def whole(self, request: Request, index: int) -> tuple[int, int] | None:
        start, end = request.params
        return (start, end) if start < index < end else None

    def key(self, request: Request) -> bytes:
        return repr(request.params).encode()

    def left(self, request: Request) -> None:
        self.running.remove(request.request_id)

    def ended(self, request: Request) -> None:
        self.held.remove(request.request_id)
        self.unprepared.pop(request.request_id, None)


@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("settings", [{}, {"num_blocks": 9, "num_host_blocks": 8}, {"depth": 1}])
def test_a_made_up_kind_is_honoured(share: float, settings: dict[str, int]) -> None:
    kind = Pairs()
    driver = Driver(kinds=[kind], max_num_seqs=6, max_num_batched_tokens=7, policy_share=share, **settings)
    pairs = {f"pair{n}": request(f"pair{n}", 12, max_tokens=9, params=(3 + n % 3, 8 + n % 3)) for n in range(6)}
    plain = [request(f"plain{n}", 5, max_tokens=3) for n in range(4)]
    driver.add(*pairs.values(), *plain)
    assert driver.step().held_up_by in ("pair", "tokens") and kind.held == pairs.keys()
    most = 0
    for _ in range(400):
        if kind.unprepared:
            name, one = kind.unprepared.popitem()
            assert one.slot < 0, f"{name} runs, and was not prepared"
            driver.scheduler.ready(one, driver.now)
        out = driver.step()
        most = max(most, len(kind.running))
        assert len(kind.running) <= 2 and not kind.running & kind.unprepared.keys()
        rows = [*out.chunk_ids, *(name for name, _ in out.decode_rows if out.num_decodes)]
        assert out.kind_bytes == 100 * sum(name in pairs for name in rows)
        for name, chunk in zip(out.chunk_ids, out.chunks, strict=True):
            if name in pairs:
                start, end = pairs[name].params
                assert not start < chunk.end < end, "the chunk cuts what must be computed in one step"
        if not driver.scheduler.has_unfinished and not driver.flights:
            break
    assert sorted(driver.finished) == sorted([*pairs, *(one.request_id for one in plain)])
    assert most == 2 and not kind.held and not kind.running


def test_the_key_of_a_kind_separates_blocks_and_equal_keys_share_them() -> None:
    kind = Pairs()
    driver = Driver(kinds=[kind], caching=True)
    cached = {}
    for name, params in {"a": (1, 3), "b": (1, 3), "c": (1, 4), "d": None, "e": None}.items():
        one = request(name, [5] * 13, params=params)
        driver.add(one)
        if params is not None:
            driver.scheduler.ready(one, driver.now)
        driver.run()
        cached[name] = one.num_cached_tokens
    assert cached == {"a": 0, "b": 12, "c": 0, "d": 0, "e": 12}


def test_plain_requests_have_no_kind_and_no_order() -> None:
    driver = Driver(kinds=[Pairs()])
    one = request("a", 3)
    driver.add(one)
    assert one.kinds == () and one.row_order == 0
