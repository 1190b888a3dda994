"""Decides which engine makes the next step: deficit round robin (Shreedhar and Varghese, 1995) in seconds of steps.

The engines take turns. In each round, the deficit of an engine grows by a quantum times its weight, and the engine may
make steps while its deficit covers the predicted seconds of its next one. A step costs the seconds that it took. So
engines that always have work share the time by their weights, whatever the length of their steps. An engine without
work does not take part, and saves nothing for later.

All state is in a flat array of float64, which engines may share. Each change leaves every single value valid, because a
process may die between two of them. The module has no clock and no processes: the caller passes the time, and wakes the
engines that a method returns. An engine is named by its slot, from 0.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import Final

__all__ = ["StepOrder", "StepTurn"]

_QUANTUM: Final = 0.005
"""Seconds that the deficit of an engine of weight 1 grows in a round. Shorter turns only switch engines more often."""
_LEAST_CHARGE: Final = 1e-5
"""Seconds that any step costs, so that the turn of an engine ends even if its steps do nothing."""
_LEAST_PATIENCE: Final = 1.0
_PATIENCE: Final = 4.0
"""A turn is late after this multiple of the step's predicted seconds, but not before ``_LEAST_PATIENCE`` seconds. It
then keeps no other engine waiting, for example if the process was stopped by a signal."""
_HEADER: Final = 3
_FIELDS: Final = 7


class StepTurn(enum.IntEnum):
    """What an engine does."""

    ABSENT = 0
    """There is no engine."""
    IDLE = 1
    """It has no work."""
    BETWEEN = 2
    """Its step has ended, and another one follows soon."""
    WAITING = 3
    """It waits for its turn."""
    KEPT = 4
    """It is between two steps, and the next turn is its own."""
    STEPPING = 5
    """It makes a step."""
    LATE = 6
    """Its step takes so long that others do not wait for it."""


# The array has plain numbers, which are faster to compare with plain numbers.
_IDLE: Final = float(StepTurn.IDLE)
_TAKES_PART: Final = frozenset((float(StepTurn.BETWEEN), float(StepTurn.WAITING)))
_HOLDS: Final = frozenset((float(StepTurn.KEPT), float(StepTurn.STEPPING)))


class StepOrder:
    """The order of the steps of ``num_slots`` engines, in the array ``values`` of float64.

    Engines whose threads together are at most :attr:`processors` may make steps at the same time. An engine with more
    threads makes its steps alone. No engine overtakes another that waits for its threads.
    """

    def __init__(self, values: memoryview[float], num_slots: int) -> None:
        self.num_slots = num_slots
        self._header = values[:_HEADER]
        columns = [values[_HEADER + at * num_slots : _HEADER + (at + 1) * num_slots] for at in range(_FIELDS)]
        self.turns, self.weights, self.deficits, self.costs, self.threads, self.since, self.pids = columns

    @staticmethod
    def num_values(num_slots: int) -> int:
        """Length of the array."""
        return _HEADER + _FIELDS * num_slots

    def set_up(self, weights: Sequence[float], processors: int) -> None:
        """Prepare a new array. ``weights`` has one weight per slot, above 0."""
        self._header[1] = processors
        for slot, weight in enumerate(weights):
            self.weights[slot] = weight

    @property
    def processors(self) -> float:
        """Number of threads that may compute at the same time."""
        return self._header[1]

    @property
    def generation(self) -> float:
        """Number that changes when an engine joins."""
        return self._header[2]

    def takes_part(self, slot: int) -> bool:
        """Whether there is an engine in a slot."""
        return self.turns[slot] != StepTurn.ABSENT

    # -- events of engines ---------------------------------------------------------------------------------------------

    def join(self, slot: int, pid: int, threads: int, now: float) -> list[int]:
        """A new engine of ``threads`` compute threads has taken a slot. Like all methods below, this returns the slots
        of the engines that may make their step now."""
        self.turns[slot] = StepTurn.IDLE
        self.pids[slot] = pid
        self.threads[slot] = threads
        self.deficits[slot] = 0.0
        self._header[2] += 1
        return self._grant(now)

    def ask(self, slot: int, cost: float, now: float) -> list[int]:
        """An engine wants to make a step, which takes ``cost`` seconds according to a prediction."""
        self.costs[slot] = cost
        is_alone = self._is_alone(slot)
        if is_alone or self.turns[slot] == StepTurn.KEPT:
            if is_alone:  # there is nobody to share with
                self.deficits[slot] = 0.0
                self._header[0] = slot
            self._hold(slot, StepTurn.STEPPING, now)
            return [slot]
        self.turns[slot] = StepTurn.WAITING
        return self._grant(now)

    def end(self, slot: int, cost: float, now: float) -> list[int]:
        """The step of an engine has ended. Its next one takes ``cost`` seconds according to a prediction."""
        if self.turns[slot] == StepTurn.STEPPING:
            self._charge(slot, now)
        self.costs[slot] = cost
        if self._is_alone(slot):
            self._hold(slot, StepTurn.KEPT, now)
            return [slot]
        self.turns[slot] = StepTurn.BETWEEN
        return self._grant(now)

    def rest(self, slot: int, now: float) -> list[int]:
        """An engine has no more work."""
        self.deficits[slot] = min(0.0, self.deficits[slot])
        self.turns[slot] = StepTurn.IDLE
        return self._grant(now)

    def gone(self, slot: int, now: float) -> list[int]:
        """The process of an engine has ended."""
        self.turns[slot] = StepTurn.ABSENT
        return self._grant(now)

    def expire(self, now: float) -> list[int]:
        """Wait no longer for engines that are late."""
        for slot, turn in enumerate(self.turns.tolist()):
            if turn in _HOLDS and now >= self._due(slot):
                if turn == StepTurn.STEPPING:
                    self._charge(slot, now)
                self.turns[slot] = StepTurn.LATE if turn == StepTurn.STEPPING else StepTurn.IDLE
        return self._grant(now)

    def next_due(self) -> float:
        """Time at which the first turn is late; infinity if no engine has a turn."""
        return min(
            (self._due(slot) for slot, turn in enumerate(self.turns.tolist()) if turn in _HOLDS), default=math.inf
        )

    # -- decisions -----------------------------------------------------------------------------------------------------

    def _is_alone(self, slot: int) -> bool:
        """Whether no other engine has work."""
        busy = [each for each, turn in enumerate(self.turns.tolist()) if turn > _IDLE]
        return not busy or busy == [slot]

    def _patience(self, slot: int) -> float:
        return max(_LEAST_PATIENCE, _PATIENCE * self.costs[slot])

    def _due(self, slot: int) -> float:
        return self.since[slot] + self._patience(slot)

    def _charge(self, slot: int, now: float) -> None:
        taken = min(self._patience(slot), now - self.since[slot])
        self.deficits[slot] -= max(_LEAST_CHARGE, taken)

    def _hold(self, slot: int, turn: StepTurn, now: float) -> None:
        self.since[slot] = now
        self.turns[slot] = turn

    def _grant(self, now: float) -> list[int]:
        """Give turns, as long as threads are free."""
        granted: list[int] = []
        while True:
            turns = self.turns.tolist()
            takers = [slot for slot, turn in enumerate(turns) if turn in _TAKES_PART]
            holders = [slot for slot, turn in enumerate(turns) if turn in _HOLDS]
            if not takers:
                return granted
            free = self.processors - sum(self.threads[slot] for slot in holders)
            if holders and free < min(self.threads[slot] for slot in takers):
                return granted
            slot = self._next(takers)
            if holders and free < self.threads[slot]:
                return granted
            self._hold(slot, StepTurn.STEPPING if turns[slot] == StepTurn.WAITING else StepTurn.KEPT, now)
            granted.append(slot)

    def _next(self, takers: list[int]) -> int:
        """The engine whose deficit covers its next step: the one of the current turn, or the first after it. Deficits
        grow by as many rounds as it takes."""
        current = int(self._header[0])
        if current in takers and self._covers(current):
            return current
        order = [slot for slot in takers if slot > current] + [slot for slot in takers if slot <= current]
        rounds = min(self._num_rounds(slot) for slot in order)
        for slot in order:
            self.deficits[slot] += max(0, rounds - 1) * self._growth(slot)
        while True:
            for slot in order:
                self.deficits[slot] += self._growth(slot)
                if self._covers(slot):
                    self._header[0] = slot
                    return slot

    def _growth(self, slot: int) -> float:
        return _QUANTUM * self.weights[slot]

    def _covers(self, slot: int) -> bool:
        return self.deficits[slot] >= self.costs[slot]

    def _num_rounds(self, slot: int) -> int:
        """Number of rounds until the deficit of an engine covers its next step."""
        return math.ceil((self.costs[slot] - self.deficits[slot]) / self._growth(slot))
