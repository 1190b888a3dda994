"""Reduces a failing world to the events that the failure needs (delta debugging; Zeller and Hildebrandt, 2002)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from chairlift_lab.sim.simulator import Violation, run_world
from chairlift_lab.sim.world import Event, World

__all__ = ["failure_of", "minimise"]


def failure_of(world: World) -> str | None:
    """Run a world. Returns the message of the check that failed, or None if all checks passed."""
    try:
        run_world(world)
    except Violation as violation:
        return str(violation)
    return None


def minimise(world: World, fails: Callable[[World], object | None] = failure_of) -> World:
    """Reduce a failing world: the returned world still fails, but passes if any one of its events is removed."""
    events = list(world.events)
    parts = 2
    while len(events) >= 2:
        size = max(1, len(events) // parts)
        for start in range(0, len(events), size):
            fewer = events[:start] + events[start + size :]
            if fewer and fails(_with(world, fewer)):
                events = fewer
                parts = max(parts - 1, 2)
                break
        else:
            if size == 1:
                break
            parts = min(len(events), parts * 2)
    return _with(world, events)


def _with(world: World, events: list[Event]) -> World:
    return dataclasses.replace(world, events=tuple(events))
