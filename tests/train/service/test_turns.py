"""Training between the steps of the engine: shares and gaps on a virtual clock, and orders in the engine's loop."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from chairlift.engine.clock import VirtualClock
from chairlift_train.service.compute.calls import AdapterConfig
from chairlift_train.service.host import (
    NOT_SET_UP,
    CreateOrder,
    DropOrder,
    Order,
    PackOrder,
    PartOrder,
    TrainingHost,
    TrainingSetup,
    WorkResult,
)
from chairlift_train.service.side_training import SideTraining
from tests.train.service.fake_trainer import FakeTrainer
from tests.train.service.wire_client import pass_body

SETUP = TrainingSetup("base", 64, 8, 2048, gap=0.025, share=0.4)


class SlowHost(TrainingHost):
    """A host whose slices take time on a virtual clock."""

    def __init__(self, clock: VirtualClock, slices: Iterator[float]) -> None:
        super().__init__(FakeTrainer())
        self._clock, self._slices = clock, slices

    def run(self, order: Order) -> Iterator[WorkResult | None]:
        for result in super().run(order):
            self._clock.advance(next(self._slices))
            yield result


def send(side: SideTraining, number: int, order: Any) -> None:
    side.take(number, msgspec.msgpack.encode(order))


def replies(found: Any) -> dict[int, WorkResult]:
    return {number: msgspec.msgpack.decode(reply, type=WorkResult) for number, reply in found}


def busy_engine(seed: int, slice_seconds: tuple[float, float]) -> tuple[float, float, float]:
    """(share of training, longest gap, longest slice) of an engine that always has requests, over a minute."""
    rng = random.Random(seed)
    clock = VirtualClock()
    lengths = iter(lambda: rng.uniform(*slice_seconds), None)
    side = SideTraining(lambda setup: SlowHost(clock, lengths), clock.now)
    send(side, 0, SETUP)
    send(side, 1, CreateOrder("m", AdapterConfig(8)))
    trained = longest = 0.0
    number = 1
    while clock.now() < 60:
        clock.advance(rng.uniform(0.005, 0.02))  # a step of the engine
        if side.patience(busy=True) is None:
            number += 1
            body = pass_body("m", number, [[1, 2]] * 50)
            send(side, number, PackOrder([PartOrder("m", number, 0, 50, True, body)]))
        before = clock.now()
        side.run(busy=True)
        trained += clock.now() - before
        longest = max(longest, clock.now() - before)
    return trained / clock.now(), longest, slice_seconds[1]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("slices", [(0.001, 0.002), (0.001, 0.02), (0.05, 0.2)])
def test_a_busy_engine_keeps_its_share_and_its_pace(seed: int, slices: tuple[float, float]) -> None:
    share, gap, longest_slice = busy_engine(seed, slices)
    assert share <= SETUP.share + 0.02
    assert share >= 0.5 * SETUP.share, "training is not starved either"
    assert gap <= SETUP.gap + longest_slice


@pytest.mark.planted("test_a_busy_engine_keeps_its_share_and_its_pace")
@pytest.mark.parametrize("broken", ["goes_on", "wait"])
def test_training_without_pauses_is_noticed(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from chairlift_train.service.turns import SliceTurns

    values: dict[str, Any] = {"goes_on": lambda self, since, now, busy: now - since < 1, "wait": lambda *given: 0.0}
    monkeypatch.setattr(SliceTurns, broken, values[broken])
    share, gap, longest_slice = busy_engine(0, (0.001, 0.002))
    assert share > SETUP.share + 0.02 or gap > SETUP.gap + longest_slice


def test_an_idle_engine_trains_without_a_pause_and_looks_at_requests_often() -> None:
    clock = VirtualClock()
    side = SideTraining(lambda setup: SlowHost(clock, iter(lambda: 0.005, None)), clock.now)
    assert side.patience(busy=False) is None
    send(side, 0, SETUP)
    send(side, 1, CreateOrder("m", AdapterConfig(8)))
    assert side.patience(busy=False) == 0.0
    found = replies(side.run(busy=False))
    assert found == {0: WorkResult(), 1: WorkResult(slice_seconds=0.0)}
    send(side, 2, PackOrder([PartOrder("m", 1, 0, 50, True, pass_body("m", 1, [[1, 2]] * 50))]))
    turns = 0
    while not (found := replies(side.run(busy=False))):
        turns += 1
        assert side.patience(busy=False) == 0.0
    assert 10 < turns < 20, "a turn lasts some 20 ms"
    assert found[2].passes[0].output and not found[2].passes[0].error
    assert found[2].slice_seconds == pytest.approx(0.005)


def test_a_new_process_says_that_it_was_not_set_up() -> None:
    side = SideTraining(lambda setup: TrainingHost(FakeTrainer()))
    send(side, 1, DropOrder("m"))
    assert replies(side.run(busy=False)) == {1: WorkResult(error=NOT_SET_UP, broken=True)}


def test_a_model_that_cannot_be_trained_is_said_at_the_start() -> None:
    from chairlift.errors import ConfigError

    def make(setup: TrainingSetup) -> TrainingHost:
        raise ConfigError("the native kernels do not run it")

    side = SideTraining(make)
    send(side, 1, SETUP)
    assert replies(side.run(busy=False)) == {1: WorkResult(error="the native kernels do not run it")}


def test_a_mistake_of_the_trainer_is_a_broken_result_and_not_the_end_of_the_engine() -> None:
    class Broken(FakeTrainer):
        def compute(self, data: Any) -> Any:
            raise MemoryError("no room")
            yield

    host = TrainingHost(Broken())
    list(host.run(CreateOrder("m", AdapterConfig(8))))
    (result,) = host.run(PackOrder([PartOrder("m", 1, 0, 1, True, pass_body("m", 1, [[1]]))]))
    assert result == WorkResult(error="MemoryError: no room", broken=True)
