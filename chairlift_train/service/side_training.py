"""Follows the service's orders between two steps of the engine, in slices."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from chairlift.errors import ConfigError
from chairlift_train.service.host import NOT_SET_UP, Order, TrainingHost, TrainingSetup, WorkResult
from chairlift_train.service.turns import SliceTurns

__all__ = ["SideTraining"]


class SideTraining:
    """Implements :class:`chairlift.engine.process.side_work.SideWork`."""

    def __init__(
        self, make: Callable[[TrainingSetup], TrainingHost], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._make = make
        self._clock = clock
        self._host: TrainingHost | None = None
        self._orders: deque[tuple[int, bytes]] = deque()
        self._running: tuple[int, Iterator[WorkResult | None]] | None = None
        self._turns = SliceTurns(0.0, 1.0)

    def take(self, number: int, order: bytes) -> None:
        self._orders.append((number, order))

    def patience(self, busy: bool) -> float | None:
        if self._running is None and not self._orders:
            return None
        return self._turns.wait(self._clock(), busy)

    def run(self, busy: bool) -> list[tuple[int, bytes]]:
        replies: list[tuple[int, bytes]] = []
        since = now = self._clock()
        if self.patience(busy) != 0.0:
            return replies
        while True:
            if self._running is None:
                if not self._orders:
                    break
                number, order = self._orders.popleft()
                if self._host is None:  # the process is new
                    replies.append((number, self._set_up(order)))
                    continue
                self._running = number, self._host.run(msgspec.msgpack.decode(order, type=Order))
            number, slices = self._running
            result = next(slices)
            if result is not None:
                self._running = None
                result = msgspec.structs.replace(result, slice_seconds=self._turns.take_longest())
                replies.append((number, msgspec.msgpack.encode(result)))
            before, now = now, self._clock()
            self._turns.sliced(now - before)
            if not self._turns.goes_on(since, now, busy):
                break
        self._turns.ended(since, now)
        return replies

    def _set_up(self, order: bytes) -> bytes:
        setup = msgspec.msgpack.decode(order, type=Order)
        if not isinstance(setup, TrainingSetup):
            return msgspec.msgpack.encode(WorkResult(error=NOT_SET_UP, broken=True))
        self._turns = SliceTurns(setup.gap, setup.share)
        try:
            self._host = self._make(setup)
        except (ConfigError, OSError, MemoryError) as error:
            return msgspec.msgpack.encode(WorkResult(error=str(error) or type(error).__name__))
        return msgspec.msgpack.encode(WorkResult())
