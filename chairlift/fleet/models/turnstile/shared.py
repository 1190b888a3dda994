"""Shares the order of steps among engine processes: memory that all of them see, and a bell for each.

A process changes the order while it holds a lock on the memory, which the kernel releases if the process dies. It then
rings the bells (eventfds) of the engines that may make their step. An engine that waits sleeps until its bell rings, or
until another engine's process ends (pidfd). So the death of an engine that has the turn is noticed at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from chairlift.base.processors import allowed_processors
from chairlift.engine.process.process_client import EngineProgram
from chairlift.fleet.models.turnstile.order import StepOrder, StepTurn
from chairlift.kernels.control_group import processor_limit

__all__ = ["SharedTurns", "Turnstile", "can_share", "num_processors"]

_MODULE: Final = "chairlift.fleet.models.turnstile.engine_process"
_VALUE_BYTES: Final = 8


def can_share() -> bool:
    """Whether the system has what the engines need to share an order."""
    return sys.platform == "linux" and hasattr(os, "eventfd") and hasattr(os, "pidfd_open")


def num_processors() -> int:
    """Number of processors that this process may use."""
    allowed = len(allowed_processors())
    limit = processor_limit()
    return allowed if limit is None else max(1, min(allowed, math.ceil(limit)))


class Turnstile:
    """The order of the steps of several engines, made by the parent of their processes. ``weights`` has one weight per
    engine. Raises OSError."""

    def __init__(self, weights: Sequence[float], processors: int) -> None:
        self._memory = os.memfd_create("chairlift-turnstile")
        self._bells: list[int] = []
        try:
            os.truncate(self._memory, StepOrder.num_values(len(weights)) * _VALUE_BYTES)
            for _ in weights:
                self._bells.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
            _order(self._memory, len(weights)).set_up(weights, processors)
        except BaseException:
            self.close()
            raise

    def program(self, slot: int) -> EngineProgram:
        """The program of the engine in a slot."""
        files = (self._memory, *self._bells)
        return EngineProgram(_MODULE, (str(slot), *map(str, files)), files)

    def close(self) -> None:
        """Free the memory and the bells. Engines that still run keep theirs."""
        for each in (self._memory, *self._bells):
            os.close(each)


def _order(memory: int, num_slots: int) -> StepOrder:
    view = mmap.mmap(memory, StepOrder.num_values(num_slots) * _VALUE_BYTES)
    return StepOrder(memoryview(view).cast("d"), num_slots)


class SharedTurns:
    """The turns of the engine in this process, which is in ``slot``. ``memory`` and ``bells`` are the inherited files
    of a :class:`Turnstile`. ``predict`` returns the seconds that the next step takes. It implements
    :class:`~chairlift.engine.process.core_process.StepGate`."""

    def __init__(
        self,
        slot: int,
        memory: int,
        bells: Sequence[int],
        *,
        threads: int,
        predict: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for each in (memory, *bells):
            os.set_inheritable(each, False)
        self.order = _order(memory, len(bells))
        self._slot = slot
        self._memory = memory
        self._bells = bells
        self._predict = predict
        self._clock = clock
        self._poll = select.epoll()
        self._poll.register(bells[slot], select.EPOLLIN)
        self._lives: dict[int, tuple[int, int]] = {}
        """File that becomes readable at the end of another engine -> (its slot, its process id)."""
        self._known = -1.0
        """Generation of the engines in ``_lives``."""
        self._rests = True
        with self._locked():
            self._ring(self.order.join(slot, os.getpid(), threads, clock()))
        self._ring(range(len(bells)))  # those that wait begin to watch this process too

    def enter(self) -> bool:
        """Wait until this engine may make a step. Returns whether it had to wait."""
        self._rests = False
        self._ask()
        if self.order.turns[self._slot] == StepTurn.STEPPING:
            return False
        while (turn := self.order.turns[self._slot]) != StepTurn.STEPPING:
            if turn == StepTurn.WAITING:
                self._sleep()
            else:  # this process was stopped when its turn came
                self._ask()
        return True

    def leave(self) -> None:
        """Let others make their steps."""
        cost = self._predict()
        with self._locked():
            self._ring(self.order.end(self._slot, cost, self._clock()))

    def rest(self) -> None:
        """Take no part until the next step."""
        if not self._rests:
            self._rests = True
            with self._locked():
                self._ring(self.order.rest(self._slot, self._clock()))

    def _ask(self) -> None:
        cost = self._predict()
        with self._locked():
            self._ring(self.order.ask(self._slot, cost, self._clock()))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._memory, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._memory, fcntl.LOCK_UN)

    def _ring(self, slots: Sequence[int]) -> None:
        for slot in slots:
            if slot != self._slot:
                with contextlib.suppress(BlockingIOError):  # it rings already
                    os.eventfd_write(self._bells[slot], 1)

    def _sleep(self) -> None:
        """Wait for a bell, the end of another engine, or a turn that is late."""
        self._watch()
        if self.order.turns[self._slot] != StepTurn.WAITING:
            return
        due = self.order.next_due()
        seconds = None if due == math.inf else max(0.0, due - self._clock())
        for file, _ in self._poll.poll(seconds):
            if file == self._bells[self._slot]:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(file)
            else:
                self._bury(*self._lives.pop(file))
                self._poll.unregister(file)
                os.close(file)
        if self._clock() >= self.order.next_due():
            with self._locked():
                self._ring(self.order.expire(self._clock()))

    def _watch(self) -> None:
        """Learn which engines there are, if one has joined."""
        if self._known == self.order.generation:
            return
        self._known = self.order.generation
        watched = set(self._lives.values())
        for slot, pid in enumerate(map(int, self.order.pids)):
            if slot == self._slot or not self.order.takes_part(slot) or (slot, pid) in watched:
                continue
            try:
                file = os.pidfd_open(pid)
            except ProcessLookupError:
                self._bury(slot, pid)
            except OSError:  # a container forbids it; a dead engine is late
                continue
            else:
                self._lives[file] = slot, pid
                self._poll.register(file, select.EPOLLIN)

    def _bury(self, slot: int, pid: int) -> None:
        """Note the end of an engine, unless another one has its slot by now."""
        with self._locked():
            if self.order.pids[slot] == pid:
                self._ring(self.order.gone(slot, self._clock()))
