"""Work of another kind that shares the engine's thread: it runs in slices between two steps.

The engine knows nothing about the work. Orders and replies are bytes, and pass through the connection of the engine's
process. The work decides how much of the time between two steps it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from chairlift.config import EngineConfig
from chairlift.engine.info import EngineInfo

__all__ = ["SideWork", "SideWorkOf"]


class SideWork(Protocol):
    """Work beside the engine's steps. All methods are called on the engine's thread."""

    def take(self, number: int, order: bytes) -> None:
        """Accept an order. :meth:`run` returns its reply later, with its ``number``."""
        ...

    def patience(self, busy: bool) -> float | None:
        """Seconds after which :meth:`run` should be called, if no step and no message comes before; None if there is no
        work. ``busy``: whether the engine has work."""
        ...

    def run(self, busy: bool) -> Iterable[tuple[int, bytes]]:
        """Do some work, or none. Returns (number, reply) of the orders that have ended."""
        ...


SideWorkOf = Callable[[EngineConfig, EngineInfo], SideWork]
"""Function that makes the side work for an engine that has loaded its model."""
