"""Events of an engine, and their subscribers.

The core publishes ``added`` and ``ended`` for requests, ``paused`` for those that called tools, ``scheduled`` and
``landed`` for steps. The engine in the
server's process publishes ``began`` and ``ended`` for requests, and ``steps``: lines of the core's recorder. An event
without subscribers costs one call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

__all__ = ["Events"]

_log = logging.getLogger(__name__)


class Events:
    """Subscribers to the events of an engine, by name.

    For each event that it wants, a subscriber has a method with the event's name. The method is called in the engine's
    thread, so it must be fast. If it raises an exception, the exception is logged, the engine continues, and the
    subscriber's method ``missed`` is called if it has one. ``changed`` is called after a subscriber is added or
    removed.
    """

    def __init__(self, *events: str, changed: Callable[[], object] = lambda: None) -> None:
        self.subscribers: dict[str, Any] = {}
        self._calls: dict[str, tuple[tuple[str, Callable[..., object]], ...]] = dict.fromkeys(events, ())
        self._changed = changed
        self._missed: dict[str, int] = {}
        """Name of a subscriber -> number of events that it has missed by an exception."""

    def subscribe(self, name: str, subscriber: Any) -> None:
        """Add a subscriber. Earlier subscribers are called before it."""
        self.subscribers[name] = subscriber
        self._renew()

    def unsubscribe(self, name: str) -> None:
        """Remove a subscriber. Unknown names are ignored."""
        if self.subscribers.pop(name, None) is not None:
            self._renew()

    def wants(self, event: str) -> bool:
        """Whether the event has a subscriber."""
        return bool(self._calls[event])

    def tell(self, event: str, *facts: Any) -> None:
        """Call the subscribers of an event with its ``facts``."""
        for name, call in self._calls[event]:
            try:
                call(*facts)
            except Exception:
                self._log_missed(name, event)
                missed = getattr(self.subscribers.get(name), "missed", None)
                if missed is not None:
                    missed()

    def _log_missed(self, name: str, event: str) -> None:
        """Log the current exception of a subscriber. A subscriber that fails at every step is logged at its 1st, 10th,
        100th, ... failure."""
        self._missed[name] = count = self._missed.get(name, 0) + 1
        if str(count).strip("0") == "1":
            _log.error("%s missed something (%s), %d times so far", name, event, count, exc_info=True)

    def _renew(self) -> None:
        for event in self._calls:
            methods = ((name, getattr(each, event, None)) for name, each in self.subscribers.items())
            self._calls[event] = tuple((name, call) for name, call in methods if call is not None)
        self._changed()
