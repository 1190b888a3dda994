"""Turns of real processes, one of which is killed or stopped while it has the turn."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from chairlift.fleet.models.turnstile.order import StepTurn
from chairlift.fleet.models.turnstile.shared import SharedTurns, Turnstile, can_share

pytestmark = pytest.mark.skipif(not can_share(), reason="the system has no eventfd or pidfd")

PATIENCE = 60.0


def _engine(program: tuple[str, ...], pipe: Connection, cost: float) -> None:
    """Follow orders: enter, leave, rest, or run N steps of one millisecond. Reports each with the time."""
    slot, memory, *bells = map(int, program)
    turns = SharedTurns(slot, memory, bells, threads=1, predict=lambda: cost)
    pipe.send("joined")
    while True:
        order = pipe.recv()
        if isinstance(order, int):
            begin = time.monotonic()
            for _ in range(order):
                turns.enter()
                turns.leave()
            turns.rest()
            pipe.send((time.monotonic() - begin) / order)
        else:
            getattr(turns, order)()
            pipe.send(order)


class Engine:
    """A process with turns."""

    def __init__(self, turnstile: Turnstile, slot: int, cost: float = 0.001) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        arguments = (turnstile.program(slot).arguments, theirs, cost)
        self.process: BaseProcess = context.Process(target=_engine, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        assert self.heard() == "joined"

    def tell(self, order: Any) -> None:
        self.pipe.send(order)

    def heard(self) -> Any:
        assert self.pipe.poll(PATIENCE), "nothing happens"
        return self.pipe.recv()

    def do(self, order: Any) -> Any:
        self.tell(order)
        return self.heard()

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def waits(engine: Engine, turns: SharedTurns, slot: int) -> None:
    """Let an engine ask for its turn, and return when it waits."""
    engine.tell("enter")
    while turns.order.turns[slot] != StepTurn.WAITING:
        time.sleep(0.001)


@pytest.fixture
def watcher() -> Iterator[tuple[SharedTurns, list[Engine]]]:
    """Two engines, and the turns of this process, which looks on."""
    turnstile = Turnstile([1.0, 1.0, 1.0], 1)
    slot, memory, *bells = map(int, turnstile.program(2).arguments)
    turns = SharedTurns(slot, memory, bells, threads=1, predict=lambda: 0.001)
    found = [Engine(turnstile, slot) for slot in range(2)]
    yield turns, found
    for each in found:
        each.end()
    turnstile.close()


@pytest.mark.full
def test_the_death_of_the_holder_frees_its_turn_at_once(watcher: tuple[SharedTurns, list[Engine]]) -> None:
    turns, (first, second) = watcher
    assert first.do("enter") == "enter"
    waits(second, turns, 1)
    first.kill()
    assert second.heard() == "enter" and turns.order.turns[0] == StepTurn.ABSENT


@pytest.mark.full
def test_a_holder_that_died_before_anybody_waited_keeps_nobody(watcher: tuple[SharedTurns, list[Engine]]) -> None:
    turns, (first, second) = watcher
    first.do("enter")
    first.end()
    assert second.do("enter") == "enter" and turns.order.turns[0] == StepTurn.ABSENT


@pytest.mark.full
def test_a_stopped_holder_keeps_the_others_for_a_second(watcher: tuple[SharedTurns, list[Engine]]) -> None:
    turns, (first, second) = watcher
    first.do("enter")
    first.kill(signal.SIGSTOP)
    assert second.do("enter") == "enter" and turns.order.turns[0] == StepTurn.LATE
    first.kill(signal.SIGCONT)
    assert first.do("leave") == "leave"
    first.do("rest")
    second.do("leave")
    second.do("rest")
    assert turns.enter() is False


@pytest.mark.nightly
def test_engines_that_die_again_and_again_lose_no_turn() -> None:
    """Three engines make steps; each is killed at a random moment and replaced, 40 times."""
    turnstile = Turnstile([1.0, 2.0, 1.0], 1)
    found = [Engine(turnstile, slot) for slot in range(3)]
    for each in found:
        each.tell(10**9)
    for number in range(40):
        time.sleep(0.003 * (number % 7))
        found[number % 3].end()
        found[number % 3] = Engine(turnstile, number % 3)
        if number < 38:
            found[number % 3].tell(10**9)
    found[39 % 3 - 2].end()
    assert found[38 % 3].do(200) > 0
    for each in found:
        each.end()
    turnstile.close()


@pytest.mark.nightly
def test_a_lone_engine_pays_microseconds() -> None:
    turnstile = Turnstile([1.0] * 20, 2)
    engine = Engine(turnstile, 3)
    assert min(engine.do(2000) for _ in range(5)) < 300e-6
    engine.end()
    turnstile.close()
