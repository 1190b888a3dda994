"""Events of an engine, and their subscribers.

The core publishes requests that were ``added`` and have ``ended``, and steps that were ``scheduled`` and have
``landed``. The engine in the server's process publishes requests that ``began`` and have ``ended``, and ``steps``: the
lines that the core's recorder made. An event without subscribers costs one call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

__all__ = ["Events"]

_log = logging.getLogger(__name__)


class Events:
    """Subscribers by name.

    A subscriber has one method per event that it wants, with the event's name. It is called on the engine's own thread,
    so it must be quick. Its exceptions are logged and do not affect the engine; its method ``missed``, if there is one,
    is called then. ``changed`` is called whenever a subscriber comes or goes.
    """

    def __init__(self, *events: str, changed: Callable[[], object] = lambda: None) -> None:
        self.subscribers: dict[str, Any] = {}
        self._calls: dict[str, tuple[tuple[str, Callable[..., object]], ...]] = dict.fromkeys(events, ())
        self._changed = changed

    def subscribe(self, name: str, subscriber: Any) -> None:
        """Add ``subscriber``. It is called after the earlier ones."""
        self.subscribers[name] = subscriber
        self._renew()

    def unsubscribe(self, name: str) -> None:
        """Remove a subscriber. Unknown names are ignored."""
        if self.subscribers.pop(name, None) is not None:
            self._renew()

    def wants(self, event: str) -> bool:
        """Whether anybody has subscribed to the event."""
        return bool(self._calls[event])

    def tell(self, event: str, *facts: Any) -> None:
        """Call the subscribers of an event."""
        for name, call in self._calls[event]:
            try:
                call(*facts)
            except Exception:
                _log.exception("%s missed something (%s)", name, event)
                missed = getattr(self.subscribers.get(name), "missed", None)
                if missed is not None:
                    missed()

    def _renew(self) -> None:
        for event in self._calls:
            told = ((name, getattr(each, event, None)) for name, each in self.subscribers.items())
            self._calls[event] = tuple((name, call) for name, call in told if call is not None)
        self._changed()
